"""Wrong arguments raise before any work. The message names the argument, what was expected and what was given."""

# N tokens, D hidden, V vocabulary

import contextlib
import importlib
import inspect
import io

import numpy
import pytest
import torch

import flce_ops
from flce_ops import LinearCrossEntropyHead, LinearCrossEntropyLoss, VocabParallel
from flce_ops.support.refusals import ELSEWHERE
from flce_ops.support.target_range import assert_in_range

N, D, V = 6, 4, 9


def good():
    return {
        "input": torch.randn(N, D),
        "linear_weight": torch.randn(V, D),
        "target": torch.randint(V, (N,)),
        "linear_bias": torch.randn(V),
    }


# the wrong argument, changed arguments, error, patterns that the message must contain
LONG, NONE, PROBABILITIES = torch.int64, {"reduction": "none"}, {"target": torch.rand(N, V)}
CASES = [
    ("input without dimensions", {"input": torch.randn(())}, ValueError, ["input", r"\(\.\.\., D\)", "0-d"]),
    ("integer input", {"input": torch.ones(N, D, dtype=LONG)}, TypeError, ["input", "float", "int64"]),
    ("float8 input", {"input": torch.randn(N, D).to(torch.float8_e4m3fn)}, TypeError, ["input", "float32", "float8"]),
    ("weight of rank 1", {"linear_weight": torch.randn(V * D)}, ValueError, ["linear_weight", r"\(V, D\)", r"\(36,\)"]),
    # linear_weight of rank 3 is that of a K-dimensional loss
    ("weight of rank 3", {"linear_weight": torch.randn(1, V, D)}, ValueError, ["target", r"\(6, 9\)", r"\(1, 9, 4\)"]),
    ("other D", {"linear_weight": torch.randn(V, 5)}, ValueError, ["linear_weight", r"\(V, 4\)", r"\(9, 5\)"]),
    (
        "no classes",
        {"linear_weight": torch.randn(0, D), "linear_bias": None},
        ValueError,
        ["linear_weight", r"\(0, 4\)"],
    ),
    ("target of other length", {"target": torch.zeros(5, dtype=LONG)}, ValueError, ["target", r"\(6,\)", r"\(5,\)"]),
    ("float target", {"target": torch.zeros(N)}, TypeError, ["target", "int64", "float32"]),
    ("probabilities of other shape", {"target": torch.rand(V, N)}, TypeError, ["target", r"\(6, 9\)", r"\(9, 6\)"]),
    ("learnt probabilities", {"target": torch.rand(N, V).requires_grad_()}, NotImplementedError, ["target", "detach"]),
    ("an ignored class", PROBABILITIES | {"ignore_index": 3}, ValueError, ["ignore_index", "token_weight", "3"]),
    ("options of another kind", {"options": {"batch_chunk_size": 2}}, TypeError, ["options", "batch_chunk_size"]),
    ("no position", {"linear_weight": torch.randn(V, 0, D)}, ValueError, ["linear_weight", r"\(9, 0, 4\)"]),
    ("other D of positions", {"linear_weight": torch.randn(V, 2, 5)}, ValueError, ["linear_weight", r"\(9, 2, 5\)"]),
    ("probabilities with z_loss", PROBABILITIES | {"z_loss": 0.1}, NotImplementedError, ["z_loss"]),
    ("their metrics", PROBABILITIES | {"return_metrics": True}, NotImplementedError, ["return_metrics", "argmax"]),
    ("int16 target", {"target": torch.zeros(N, dtype=torch.int16)}, TypeError, ["target", "int32", "int16"]),
    ("bias of other length", {"linear_bias": torch.randn(8)}, ValueError, ["linear_bias", r"\(9,\)", r"\(8,\)"]),
    (
        "other dtype",
        {"linear_weight": torch.randn(V, D).bfloat16()},
        TypeError,
        ["linear_weight", "float32", "bfloat16"],
    ),
    ("other dtype of bias", {"linear_bias": torch.randn(V).double()}, TypeError, ["linear_bias", "float32", "float64"]),
    ("class weight of other length", {"weight": torch.rand(8)}, ValueError, ["weight", r"\(9,\)", r"\(8,\)"]),
    ("integer class weight", {"weight": torch.ones(V, dtype=LONG)}, TypeError, ["weight", "float", "int64"]),
    ("learnt class weight", {"weight": torch.rand(V).requires_grad_()}, NotImplementedError, ["weight", "gradient"]),
    ("unknown reduction", {"reduction": "average"}, ValueError, ["reduction", "none.*mean.*sum", "'average'"]),
    ("negative smoothing", {"label_smoothing": -0.1}, ValueError, ["label_smoothing", r"\[0, 1\]", r"-0\.1"]),
    ("smoothing above 1", {"label_smoothing": 1.5}, ValueError, ["label_smoothing", r"\[0, 1\]", r"1\.5"]),
    ("smoothing nan", {"label_smoothing": float("nan")}, ValueError, ["label_smoothing", "nan"]),
    ("zero softcap", {"softcap": 0.0}, ValueError, ["softcap", "positive", r"0\.0"]),
    ("token_weight's shape", {"token_weight": torch.rand(5)}, ValueError, ["token_weight", r"\(6,\)", r"\(5,\)"]),
    ("normalizer of rank 1", {"normalizer": torch.ones(1)}, ValueError, ["normalizer", "0-d", r"\(1,\)"]),
    ("normalizer without a sum", {"normalizer": torch.tensor(3.0)} | NONE, ValueError, ["normalizer", "mean", "none"]),
    ("number without a sum", {"normalizer": 3.0} | NONE, ValueError, ["normalizer", "mean", "none"]),
]


@pytest.mark.parametrize("what, changes, expected, patterns", CASES, ids=[case[0] for case in CASES])
def test_bad_input_is_refused_by_name(what, changes, expected, patterns):
    import re

    arguments = {**good(), **changes}
    before = flce_ops.last_path()
    with pytest.raises(expected) as caught:
        flce_ops.linear_cross_entropy(**arguments)
    message = str(caught.value)
    assert message.startswith("linear_cross_entropy")
    for pattern in patterns:
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} not in {message!r}"
    assert flce_ops.last_path() is before, "a kernel ran before the refusal"


def test_options_cannot_be_passed_by_position():
    with pytest.raises(TypeError, match="positional"):
        flce_ops.linear_cross_entropy(*good().values(), torch.rand(V))


@pytest.mark.parametrize("bad", [V, V + 1, -1, -99, 10**6, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_target_out_of_range_is_an_index_error(wants_gradient, reduction, dtype, bad):
    """A wrong target never gives a number silently. On CUDA it is a device-side assert: test_cuda_contract.py."""
    arguments = good()
    arguments["target"] = arguments["target"].to(dtype)
    arguments["target"][3] = bad
    arguments["input"].requires_grad_(wants_gradient)
    with pytest.raises(IndexError, match=rf"target.*\[0, {V}\).*{bad}"):
        flce_ops.linear_cross_entropy(**arguments, reduction=reduction)


def test_int64_target_beyond_int32_is_not_truncated():
    arguments = good()
    arguments["target"][3] = 2**32 + 1
    with pytest.raises(IndexError, match=str(2**32 + 1)):
        flce_ops.linear_cross_entropy(**arguments)


def test_default_ignore_index_is_out_of_range_when_another_is_set():
    arguments = good()
    arguments["target"][3] = -100
    flce_ops.linear_cross_entropy(**arguments)
    with pytest.raises(IndexError, match="-100"):
        flce_ops.linear_cross_entropy(**arguments, ignore_index=0)


def test_a_target_out_of_range_is_told_on_the_device_too():
    """A target of the meta device stands for one of CUDA. torch's assert raises at once on a CPU."""
    for inside in (True, False):
        refused = pytest.raises(RuntimeError, match=r"expected target in \[0, 5\)")
        with contextlib.nullcontext() if inside else refused:
            assert_in_range(torch.tensor(inside), torch.zeros(1, device="meta"), 5, -100)


@pytest.mark.parametrize("ignore_index", [-(2**31), -100, 1000, 2**31 - 1])
def test_an_int32_target_takes_every_ignore_index_of_its_range(ignore_index):
    arguments = good()
    arguments["target"][3] = ignore_index
    expected = flce_ops.linear_cross_entropy(**arguments, ignore_index=ignore_index)
    arguments["target"] = arguments["target"].int()
    assert torch.equal(flce_ops.linear_cross_entropy(**arguments, ignore_index=ignore_index), expected)


def test_class_weights_of_given_logits_are_checked():
    """In the words of the function that was called, not of an operator that it calls."""
    logits, target = torch.randn(6, 9), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^cross_entropy: expected weight of shape \(9,\).*\(8,\)"):
        flce_ops.cross_entropy(logits, target, weight=torch.rand(8))
    with pytest.raises(NotImplementedError, match=r"^cross_entropy: weight is a constant and gets no gradient"):
        flce_ops.cross_entropy(logits, target, weight=torch.rand(9).requires_grad_())


def test_class_weights_do_not_hide_a_target_out_of_range():
    arguments = good()
    arguments["target"][3] = V
    with pytest.raises(IndexError, match="target"):
        flce_ops.linear_cross_entropy(**arguments, weight=torch.rand(V))


def test_inner_operators_refuse_too():
    """Direct callers of the operators (sharded heads) get the same messages."""
    flce = torch.ops.flce
    x, w, t, b = good().values()
    with pytest.raises(ValueError, match=r"linear_cross_entropy_forward.*input.*\(N, D\).*\(1, 6, 4\)"):
        flce.linear_cross_entropy_forward(x[None], w, t, b, None)
    with pytest.raises(ValueError, match="linear_cross_entropy_with_grad.*row_scale"):
        flce.linear_cross_entropy_with_grad(x, w, t, b, None, torch.ones(3), output_mask=[True] * 3)
    with pytest.raises(ValueError, match=r"_grad: expected linear_weight of .* \(V, D\), V = 9, D = 4, got \(9, 3\)"):
        flce.linear_cross_entropy_with_grad(x, w[:, 1:], t, b, None, None, output_mask=[True] * 3)
    with pytest.raises(NotImplementedError, match="denominator gets no gradient here"):
        denominator = torch.tensor(2.0, requires_grad=True)
        flce.linear_cross_entropy_with_grad(x, w, t, b, None, None, denominator, output_mask=[True] * 3)
    with pytest.raises(ValueError, match="linear_cross_entropy_backward.*grad_lse"):
        flce.linear_cross_entropy_backward(
            None, torch.ones(3), None, x, w, t, b, None, torch.ones(N), output_mask=[True] * 3
        )
    with pytest.raises(ValueError, match="cross_entropy_forward.*target"):
        flce.linear_cross_entropy_forward(torch.randn(N, V), None, t[:3])
    with pytest.raises(ValueError, match=r"expected weight of shape \(V\), V = 9, got \(8,\)"):
        flce.linear_cross_entropy_forward(torch.randn(N, V), None, t, None, torch.ones(V - 1))
    with pytest.raises(ValueError, match="expected neither linear_bias nor gradient_threshold without linear_weight"):
        flce.linear_cross_entropy_forward(torch.randn(N, V), None, t, b)
    with pytest.raises(IndexError, match="target"):
        flce.linear_cross_entropy_forward(x, w, t.clone().fill_(V), b, None)
    with pytest.raises(IndexError, match="target"):
        flce.linear_cross_entropy_forward(x, w, t.clone().fill_(30), b, None, vocab_start=20, vocab_size=30)


def test_fake_tensors_are_refused_with_the_same_words():
    """Fake and real kernels share their checks, so a graph is refused when it is traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    messages = []
    for context in (torch.no_grad(), FakeTensorMode()):
        with context:
            x, w, t = torch.ones(N, D), torch.ones(V, D), torch.zeros(N, dtype=torch.int64)
            with pytest.raises(ValueError) as caught:
                torch.ops.flce.linear_cross_entropy_forward(x, w[:, :-1], t)
            messages.append(str(caught.value))
    assert messages[0] == messages[1]


# ---------------------------------------------------------------- wrong types

HEAD = {"input": torch.randn(N, D), "linear_weight": torch.randn(V, D), "target": torch.randint(V, (N,))}
FUNCTIONS = {
    flce_ops.linear_cross_entropy: HEAD,
    flce_ops.linear_log_probs: HEAD,
    flce_ops.cross_entropy: {"logits": torch.randn(N, V), "target": HEAD["target"]},
    flce_ops.linear_policy_loss: {**HEAD, "advantages": torch.randn(N)},
    flce_ops.linear_kl_div: {**HEAD, "teacher_input": torch.randn(N, D), "teacher_weight": torch.randn(V, D)},
}
OTHERS = ("3", [1.0], 1j, True, 2, 2.5, None, torch.tensor(2), numpy.ones(2))


def fits(value, hint):
    """Checks a value against a type hint, as a reader of the signature would."""
    kinds = hint.__args__ if hasattr(hint, "__args__") else (hint,)
    kinds = {type(kind) if isinstance(kind, str) else kind for kind in kinds}  # a Literal's types
    if isinstance(value, (bool, str, torch.Tensor)) or value is None:
        return type(value) in kinds
    return float in kinds if isinstance(value, float) else isinstance(value, int) and {int, float} & kinds


@pytest.mark.parametrize(
    ("function", "name"),
    [
        pytest.param(function, name, id=f"{function.__name__}-{name}")
        for function in FUNCTIONS
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("options", "return_metrics")  # these have their own errors for wrong types
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(function, name):
    hint = inspect.signature(function).parameters[name].annotation
    for value in OTHERS:
        if not fits(value, hint):
            with pytest.raises(TypeError, match=rf"^{function.__name__}: expected {name} to be "):
                function(**FUNCTIONS[function] | {name: value})


@pytest.mark.parametrize("module", [flce_ops.LinearCrossEntropyHead, flce_ops.LinearCrossEntropyLoss])
def test_arguments_of_a_module_are_refused_by_its_name(module):
    for name, value in {"label_smoothing": "0.1", "softcap": 1j, "ignore_index": 2.5, "bias": None}.items():
        with pytest.raises(TypeError, match=f"^{module.__name__}: expected {name} to be"):
            module(D, V, **{name: value})
    for name, value in {"ignore_index": 2**63, "logit_scale": 10**400, "z_loss": 10**400}.items():
        with pytest.raises(ValueError, match=f"^{module.__name__}: expected {name} in the range of"):
            module(D, V, **{name: value})
    with pytest.raises(TypeError, match="expected (num_classes|out_features) to be an integer, got '9'"):
        module(D, "9")


def test_numbers_of_numpy_are_numbers():
    options = {"softcap": numpy.float64(3.0), "label_smoothing": numpy.float64(0.1), "ignore_index": numpy.int64(3)}
    options |= {"normalizer": numpy.float32(2.0), "z_loss": numpy.float32(0.1), "temperature": numpy.int64(2)}
    found = flce_ops.linear_cross_entropy(**HEAD, **options)
    plain = {name: value.item() for name, value in options.items()}
    torch.testing.assert_close(found, flce_ops.linear_cross_entropy(**HEAD, **plain))
    assert flce_ops.LinearCrossEntropyHead(numpy.int64(D), numpy.int64(V)).weight.shape == (V, D)


def parameters_of_kind(function, *kinds):
    hints = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
    return [name for name, hint in hints.items() if set(getattr(hint, "__args__", (hint,))) & set(kinds)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_an_integer_that_is_too_large_is_refused_by_name(function):
    for name in parameters_of_kind(function, float):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: expected {name} in the range of float64, got"):
            function(**FUNCTIONS[function], **{name: 10**400})
    for name in parameters_of_kind(function, int):
        for value in (2**63, -(2**63) - 1, numpy.uint64(2**63), 10**5000):
            with pytest.raises(ValueError, match=rf"^{function.__name__}: expected {name} in the range of int64, got"):
                function(**FUNCTIONS[function], **{name: value})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_number_that_float32_does_not_hold_is_refused_by_name(function):
    for name in parameters_of_kind(function, float):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: expected {name} "):
            function(**FUNCTIONS[function], **{name: 1e39})


def test_an_integer_beyond_int64_is_the_number_that_it_is():
    for name in ("normalizer", "z_loss", "temperature"):
        found = flce_ops.linear_cross_entropy(**HEAD, **{name: 2**70})
        torch.testing.assert_close(found, flce_ops.linear_cross_entropy(**HEAD, **{name: 2.0**70}), rtol=0, atol=0)


# ---------------------------------------------------------------- swapped arguments

ADVANTAGES = torch.randn(N)
INDICES_OF_CLASSES = "class indices have; are {0} and target swapped"
SWAPPED = {
    "target as the weight": (("input", "target", "linear_weight"), INDICES_OF_CLASSES.format("linear_weight")),
    "target first": (("target", "linear_weight", "input"), INDICES_OF_CLASSES.format("input")),
    "weight first": (("linear_weight", "input", "target"), "are input and linear_weight swapped"),
}


@pytest.mark.parametrize("case", SWAPPED)
@pytest.mark.parametrize(
    "function", [flce_ops.linear_cross_entropy, flce_ops.linear_log_probs, flce_ops.linear_policy_loss]
)
def test_swapped_arguments_are_named(function, case):
    order, message = SWAPPED[case]
    others = (ADVANTAGES,) if function is flce_ops.linear_policy_loss else ()
    with pytest.raises((TypeError, ValueError), match=f"^{function.__name__}: .*{message}") as caught:
        function(*(HEAD[name] for name in order), *others)
    assert "quantized" not in str(caught.value)


def test_swapped_arguments_of_other_functions_are_named():
    x, w, t = HEAD.values()
    for swapped, match in (
        (lambda: flce_ops.cross_entropy(t, x @ w.T), "^cross_entropy: .*are logits and target swapped"),
        (lambda: flce_ops.linear_kl_div(x, t, x, w), "^linear_kl_div: .*are linear_weight and target swapped"),
        (lambda: flce_ops.linear_policy_loss(x, w, ADVANTAGES, t), "^linear_policy_loss: .*advantages .*two swapped"),
        (lambda: LinearCrossEntropyLoss(D, V)(t, x), "^linear_cross_entropy: .*are input and target swapped"),
    ):
        with pytest.raises(TypeError, match=match):
            swapped()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_name_that_is_not_known_says_which_one_is_meant(function):
    for given, meant in {"labels": "target", "ignore_idx": "ignore_index"}.items():
        with pytest.raises(
            TypeError, match=f"^{function.__name__}: no argument is named {given}; did you mean {meant}?"
        ):
            function(**FUNCTIONS[function], **{given: 1})
    with pytest.raises(TypeError, match=f"^{function.__name__}: no argument is named potato; there are .*, softcap"):
        function(**FUNCTIONS[function], potato=1)


def test_names_of_other_code_say_which_argument_is_meant():
    x, w, t = HEAD.values()
    for function, given, hint in (
        (flce_ops.linear_cross_entropy, "hidden", "did you mean input?"),
        (flce_ops.linear_log_probs, "x", "did you mean input?"),
        (flce_ops.linear_cross_entropy, "lm_head", "did you mean linear_weight?"),
        (flce_ops.linear_cross_entropy, "W", "did you mean linear_weight?"),
        (flce_ops.linear_cross_entropy, "targets", "did you mean target?"),
        (flce_ops.linear_cross_entropy, "logits", "flce_ops.cross_entropy takes logits"),
        (flce_ops.cross_entropy, "input", "did you mean logits?"),
        (flce_ops.linear_kl_div, "teacher_logits", r"teacher_probs=teacher_logits.softmax\(-1\)"),
        (flce_ops.linear_kl_div, "teacher_hidden_states", "did you mean teacher_input?"),
        (flce_ops.linear_policy_loss, "old_per_token_logps", "did you mean old_log_probs?"),
        (flce_ops.linear_policy_loss, "epsilon_high", "did you mean clip_high?"),
        (flce_ops.linear_cross_entropy, "weight_scale", "dequantize it, and pass it as linear_weight"),
    ):
        with pytest.raises(TypeError, match=f"^{function.__name__}: no argument is named {given}; .*{hint}"):
            function(x, w, t, **{given: x})
    with pytest.raises(TypeError, match=r"linear_weight is missing; weight holds class weights, \(V,\), but has shape"):
        flce_ops.linear_cross_entropy(x, target=t, weight=w)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'linear_weight'"):
        flce_ops.linear_cross_entropy(x, target=t, weight=torch.ones(V))


@pytest.mark.parametrize("name, instead", [("explain", "last_path"), ("warmup", "compiles its kernels")])
def test_a_function_of_an_earlier_version_says_what_to_do_instead(name, instead):
    with pytest.raises(AttributeError, match=f"'flce_ops' has no attribute '{name}'; .*{instead}"):
        getattr(flce_ops, name)


@pytest.mark.parametrize("name", ["logit_scale", "temperature"])
def test_a_scale_of_shape_1_says_how_to_make_it_a_number(name):
    given = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match=rf"{name} to be .* 0-d tensor, got shape \(1,\); pass {name}.reshape"):
        flce_ops.linear_cross_entropy(*HEAD.values(), **{name: given})
    flce_ops.linear_cross_entropy(*HEAD.values(), **{name: given.reshape(())}).backward()
    assert given.grad.shape == (1,)


def test_every_name_in_the_table_of_names_is_meant():
    """A name that stands for two arguments is one that no function has both of."""
    arguments = [tuple(inspect.signature(function).parameters) for function in FUNCTIONS]
    for ours, theirs in ELSEWHERE.items():
        assert any(ours in of for of in arguments), ours
        for name in theirs.split():
            meant = [known for known, others in ELSEWHERE.items() if name in others.split()]
            assert not any(name in of and ours in of for of in arguments), name
            assert all(len(set(meant) & set(of)) <= 1 for of in arguments), name


@pytest.mark.parametrize(
    "rows, target, hint",
    [
        ((6, D), torch.zeros(6, V, dtype=torch.int64), r"one-hot, pass target.argmax\(-1\)"),
        ((6, D), torch.zeros(2, 3, dtype=torch.int64), r"pass target.flatten\(\)"),
        ((2, 3, D), torch.zeros(6, dtype=torch.int64), r"pass target.view\(2, 3\)"),
        ((2, 5, D), torch.zeros(2, 4, dtype=torch.int64), "pass all labels with shift=True"),
    ],
    ids=["one-hot", "rows flattened", "target flattened", "labels shifted"],
)
def test_a_target_of_another_shape_says_what_is_likely_meant(rows, target, hint):
    x, w = torch.randn(rows), HEAD["linear_weight"]
    for call in (
        lambda: flce_ops.linear_cross_entropy(x, w, target),
        lambda: flce_ops.linear_policy_loss(x, w, target, torch.ones(rows[:-1])),
        lambda: flce_ops.cross_entropy(x @ w.T, target),
    ):
        with pytest.raises(ValueError, match=f"expected target of shape .*{hint}"):
            call()


def test_classes_or_features_in_the_second_dimension_are_told():
    """torch's order is (N, C, L)."""
    target = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"the classes come last here, not second: pass logits.movedim\(1, -1\)"):
        flce_ops.cross_entropy(torch.randn(2, V, 5), target)
    with pytest.raises(ValueError, match=r"the features come last here, not second: pass input.movedim\(1, -1\)"):
        flce_ops.linear_cross_entropy(torch.randn(2, D, 5), HEAD["linear_weight"], target)
    with pytest.raises(ValueError, match=r"as nn.Linear's weight; pass linear_weight.T"):
        flce_ops.linear_cross_entropy(HEAD["input"], HEAD["linear_weight"].T, HEAD["target"])


@pytest.mark.parametrize(
    "convert, hint",
    [
        (torch.Tensor.tolist, r"pass torch.tensor\(target\)"),
        (torch.Tensor.numpy, r"pass torch.from_numpy\(target\)"),
        (lambda tensor: torch.nn.Embedding(2, 2), "pass target.weight"),
    ],
    ids=["list", "numpy", "module"],
)
def test_what_is_no_tensor_says_how_to_make_one(convert, hint):
    x, w, t = HEAD.values()
    with pytest.raises(TypeError, match=f"expected target to be a tensor, got .*; {hint}"):
        flce_ops.linear_cross_entropy(x, w, convert(t))


@pytest.mark.parametrize("value", [True, numpy.bool_(True), torch.tensor(True)], ids=["bool", "numpy", "tensor"])
@pytest.mark.parametrize("name", ["temperature", "logit_scale", "normalizer"])
def test_a_bool_is_no_number(name, value):
    with pytest.raises(TypeError, match=f"expected {name} to be .*(True|bool)"):
        flce_ops.linear_cross_entropy(*HEAD.values(), **{name: value})
    if value is True and name != "normalizer":
        with pytest.raises(TypeError, match=f"expected {name} to be a number, got True"):
            torch.ops.flce.linear_cross_entropy(*HEAD.values(), **{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused(value):
    x, w, t = HEAD.values()
    tokens = {"ref_log_probs": -torch.ones(6)}
    for function, args, refused in (
        (flce_ops.linear_cross_entropy, (x, w, t), ("logit_scale", "z_loss", "normalizer", "temperature")),
        (flce_ops.linear_log_probs, (x, w, t), ("logit_scale",)),
        (flce_ops.cross_entropy, (x @ w.T, t), ("logit_scale", "z_loss", "normalizer")),
        (flce_ops.linear_kl_div, (x, w, x, w), ("logit_scale", "teacher_logit_scale", "normalizer")),
        (flce_ops.linear_policy_loss, (x, w, t, torch.ones(6)), ("logit_scale", "beta", "normalizer")),
    ):
        for name in refused:
            given = {name: value} | (tokens if name == "beta" else {})
            with pytest.raises(ValueError, match=f"^{function.__name__}: expected {name} .*, got {value}"):
                function(*args, **given)


@pytest.mark.parametrize("made", [LinearCrossEntropyHead(D, V), LinearCrossEntropyLoss(D, V)], ids=["head", "loss"])
def test_a_name_that_a_module_does_not_know_says_which_one_is_meant(made):
    x, _, t = HEAD.values()
    for given, meant in {"labels": "target", "num_items_in_batch": "normalizer", "metrics": "return_metrics"}.items():
        with pytest.raises(TypeError, match=f"^{type(made).__name__}: no argument is named {given}; .*{meant}"):
            made(x, t, **{given: 1})
    with pytest.raises(TypeError, match="target"):
        made(x, labels=t)
    with pytest.raises(TypeError, match=f"^{type(made).__name__}: .* label_smooth; did you mean label_smoothing"):
        type(made)(D, V, label_smooth=0.1)


def test_the_plan_refuses_by_name_and_hands_on_what_it_does_not_know():
    with pytest.raises(TypeError, match=r"^VocabParallel: expected input_layouts to be a Placement .*'Shard\(1\)'"):
        VocabParallel(input_layouts="Shard(1)")
    with pytest.raises(TypeError, match="^VocabParallel: no argument is named input_layout; .*input_layouts"):
        VocabParallel(input_layout=None)
    args, named = VocabParallel()._to_dtensors(None, None, ("an input", "a target", "a third"), {"labels": 1})
    assert args == ("a third",)  # forward takes two arguments
    assert named == {"input": "an input", "target": "a target", "labels": 1}


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_a_patch_refuses_arguments_by_name(name):
    pytest.importorskip("transformers")
    patching = importlib.import_module(f"flce_ops.integrations.{name}")
    given = (torch.nn.Linear(D, V),) if name == "transformers" else ()
    for function in (patching.patch, patching.patched):
        with pytest.raises(
            TypeError, match=f"^{function.__name__}: expected gradient_threshold to be a number, got 'x'"
        ):
            function(*given, gradient_threshold="x")
        with pytest.raises(TypeError, match=f"^{function.__name__}: .* threshold; did you mean gradient_threshold"):
            function(*given, threshold=0.1)


# ---------------------------------------------------------------- tracing


class Scored(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(**dict(zip(FUNCTIONS[self.function], tensors)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_symbolic_tracing_is_refused_by_name(function):
    tensors = FUNCTIONS[function]
    first = next(iter(tensors))
    with pytest.raises(NotImplementedError, match=rf"^{function.__name__}: torch.fx.symbolic_trace .*torch.export"):
        torch.fx.symbolic_trace(lambda tensor: function(**tensors | {first: tensor}))


@pytest.mark.parametrize("module", [LinearCrossEntropyHead, LinearCrossEntropyLoss])
def test_symbolic_tracing_of_a_module_is_refused_by_name(module):
    with pytest.raises(NotImplementedError, match="^linear_cross_entropy: torch.fx.symbolic_trace .*torch.export"):
        torch.fx.symbolic_trace(module(D, V))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_export_to_onnx_is_refused_by_name(function):
    """With the exporter that needs no additional package."""
    with pytest.raises(NotImplementedError, match=rf"^{function.__name__}: ONNX has no such operator; "):
        torch.onnx.export(Scored(function), tuple(FUNCTIONS[function].values()), io.BytesIO(), dynamo=False)
