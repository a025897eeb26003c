"""linear_token_loss: functions of one token against dense float64, and what is refused."""

# N tokens, K classes of each, D hidden, V vocabulary

import functools

import pytest
import torch
from guides import names_after
from reference_loss import error
from reference_token_loss import dense_token_loss, make_call, run
from torch.utils.checkpoint import checkpoint

import flce_ops
from flce_ops.aten.chunks import with_zeroed_rows
from flce_ops.aten.cross_entropy import with_grad
from flce_ops.meta import outputs as outputs_of
from flce_ops.meta.arguments import WithGrad
from flce_ops.objectives.token_function import token_loss_of

RAGGED = (61, 33, 97)
ONE_PASS, FORWARD = "linear_cross_entropy_with_grad", "linear_cross_entropy_forward"


@functools.cache
def page():
    """The names that the code of docs/token_losses.md defines, and two more losses."""
    return names_after("docs/token_losses") | {"generalized": generalized, "surrogate": surrogate}


def per_token(*low_high):
    return [torch.empty(RAGGED[0], dtype=torch.float64).uniform_(*bounds) for bounds in low_high]


@flce_ops.token_loss
def generalized(log_prob, alpha):
    return -torch.expm1(alpha * log_prob) / alpha


@flce_ops.token_loss
def surrogate(log_prob, advantage, old, low, high, dual):
    """PPO's clipped surrogate with a dual clip, as a user would write it."""
    log_ratio, negative = log_prob - old, advantage < 0
    lower, upper = torch.where(negative, 1 - low, 0.0), torch.where(negative, dual, 1 + high)
    ratio = log_ratio.detach().exp()
    beyond = (ratio < lower) | (ratio > upper)
    within = torch.where(beyond, 0.0, log_ratio).exp()
    return -advantage * torch.where(beyond, ratio.clamp(lower, upper), within)


EXAMPLES = {
    "focal": lambda: [2.0],
    "generalized": lambda: [0.7],
    "dft": list,
    "unlikelihood": lambda: [(torch.rand(RAGGED[0]) < 0.3).double()],
    "tis_policy": lambda: [*per_token((-1, 1), (-5, -1)), 2.0],
    "surrogate": lambda: [*per_token((-1, 1), (-5, -1)), 0.2, 0.28, 3.0],
    "with_bonus": lambda: [0.1],
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_page_is_the_dense_formula(name, reduction):
    function, tensors = page()[name], EXAMPLES[name]()
    call = make_call(RAGGED, bias=True, token_weight=True)
    options = {"reduction": reduction, "cotangent": torch.rand(RAGGED[0]) if reduction == "none" else None}
    found = run(flce_ops.linear_token_loss, call, function, *tensors, **options)
    expected = run(dense_token_loss, call, function, *tensors, reads=function.reads, **options)
    for key, truth in expected.items():
        assert error(found[key], truth) < 1e-12, key


def test_the_page_has_no_other_example():
    assert {name for name, value in page().items() if hasattr(value, "reads")} == set(EXAMPLES)


OF_SEVERAL = {
    "a loss of lse": (lambda lp, *, lse: 1e-2 * lse**2 - lp, [], {}, 0),
    "K classes": (lambda lp, q: -(q * lp).sum(), [torch.rand(RAGGED[0], 4).double()], {}, 4),
    "K classes and lse": (lambda lp, *, lse: -lp.logsumexp(0) + 0.1 * lse, [], {}, 3),
    "one class in a row of them": (lambda lp: -(lp.exp() * lp).sum(), [], {"logit_scale": 0.3}, 1),
    "an integer a token": (lambda lp, kind: torch.where(kind == 1, -lp, lp.exp()), [torch.arange(61) % 2], {}, 0),
    "a vector a token": (lambda lp, v: -lp * v.softmax(0)[0], [torch.randn(RAGGED[0], 5).double()], {}, 0),
    "a number": (lambda lp, a: -lp * a, [torch.tensor(0.7, dtype=torch.float64)], {"softcap": 4.0}, 0),
    "temperature": (lambda lp: -torch.expm1(lp), [], {"temperature": 0.7, "normalizer": 37.5}, 0),
}


@pytest.mark.parametrize("workspace", [512 << 20, 1])
@pytest.mark.parametrize("name", OF_SEVERAL)
def test_what_a_function_may_take(name, workspace):
    function, tensors, options, topk = OF_SEVERAL[name]
    call, reads = make_call(RAGGED, topk=topk), token_loss_of(function).reads
    with flce_ops.workspace(workspace):
        found = run(flce_ops.linear_token_loss, call, function, *tensors, **options)
        assert flce_ops.last_path().op == ONE_PASS
    expected = run(dense_token_loss, call, function, *tensors, reads=reads, **options)
    for key, truth in expected.items():
        assert error(found[key], truth) < 1e-12, key
    several = run(
        flce_ops.linear_token_loss, call, function, *tensors, **options | {"reduction": "sum", "normalizer": 3}
    )
    with_checkpoint = run(checkpointed, call, function, *tensors, **options | {"reduction": "sum", "normalizer": 3})
    for key, truth in several.items():
        assert error(with_checkpoint[key], truth) < 1e-12, key


def checkpointed(*args, **options):
    return checkpoint(lambda: flce_ops.linear_token_loss(*args, **options), use_reentrant=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_log_probs_in_the_same_dtype(dtype):
    """As if the function had been applied to linear_log_probs, which makes the gradients in backward."""
    focal = page()["focal"]

    def of_log_probs(input, linear_weight, target, function, *numbers, **options):
        found = flce_ops.linear_log_probs(input, linear_weight, target)
        valid = target != -100
        losses = torch.where(valid, function(torch.where(valid, found.log_probs, -1.0), *numbers), 0.0)
        return losses.sum() / valid.sum(), found.log_probs.detach()

    call = make_call(RAGGED, dtype=dtype)
    exact = run(dense_token_loss, call, focal, 2.0, dtype=torch.float64)
    found = run(flce_ops.linear_token_loss, call, focal, 2.0)
    beside = run(of_log_probs, call, focal, 2.0)
    for key, truth in exact.items():
        assert error(found[key], truth) <= 1.25 * error(beside[key], truth) + 4e-7, key


def test_last_path_says_which_plan_ran():
    x, w, y = (make_call(RAGGED, dtype=torch.float32)[name] for name in ("input", "linear_weight", "target"))
    x.requires_grad_()
    focal, bonus = page()["focal"], page()["with_bonus"]
    flce_ops.linear_token_loss(x, w, y, focal, 2.0)
    assert flce_ops.last_path().op == ONE_PASS
    for given, options in (((x, w, y, bonus, 0.1), {}), ((x, w, y, focal, 2.0), {"reduction": "none"})):
        flce_ops.linear_token_loss(*given, **options)
        assert flce_ops.last_path().op == FORWARD and "of 61 tokens saved" in flce_ops.last_path().reason
    flce_ops.linear_token_loss(x.half(), w.half(), y, focal, 2.0)
    assert flce_ops.last_path().op == FORWARD
    checkpointed(x, w, y, focal, 2.0)
    assert flce_ops.last_path().op == FORWARD
    torch.func.grad(lambda x: flce_ops.linear_token_loss(x, w, y, focal, 2.0)[0])(x.detach())
    assert flce_ops.last_path().op == "linear_cross_entropy_backward"


def test_sequences_and_tensors_of_sequences():
    call = make_call(RAGGED)
    x, w, y, (a,) = call["input"], call["linear_weight"], call["target"], per_token((-1, 1))
    flat = flce_ops.linear_token_loss(x[:60], w, y[:60], lambda lp, a: -a * lp, a[:60], reduction="none")
    shaped = flce_ops.linear_token_loss(
        x[:60].view(5, 12, -1), w, y[:60].view(5, 12), lambda lp, a: -a * lp, a[:60].view(5, 12), reduction="none"
    )
    assert torch.equal(shaped.loss.flatten(), flat.loss) and torch.equal(shaped.log_probs.flatten(), flat.log_probs)


# ---------------------------------------------------------------- what ignored tokens hold, and nan


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_what_ignored_tokens_hold_does_not_matter(reduction):
    call, (a,) = make_call(RAGGED), per_token((0.5, 1))
    ignored = call["target"] == -100
    call["input"][ignored] = torch.nan
    a[ignored] = torch.nan
    found = run(flce_ops.linear_token_loss, call, lambda lp, a: -a.log() * lp, a, reduction=reduction)
    assert all(result.isfinite().all() for result in found.values())
    assert not found["input"][ignored].any() and not found["log_probs"][ignored].any()


def test_ignored_tokens_that_are_computed_as_zeros_see_harmless_numbers():
    """This is the case on a GPU in ATen. log(1 - p) would be infinite at a log-probability of 0, and log a at 0 is."""
    call, (a,) = make_call(RAGGED, bias=True), per_token((0.5, 1))
    ignored = call["target"] == -100
    call["input"][ignored], a[ignored] = torch.nan, torch.nan
    call["linear_bias"][0] = -torch.inf  # the class that stands in for an ignored target
    call["target"][call["target"] == 0] = 1
    loss = token_loss_of(lambda lp, a: -torch.log1p(-lp.exp()) * a - a.log() * lp)
    operands = [call[name] for name in ("input", "linear_weight", "target", "linear_bias")]
    inner = WithGrad.bind(*operands, None, None, function=loss.name, tensors=[a], output_mask=[True, True, True])
    outputs = outputs_of(inner)
    with_zeroed_rows(with_grad.of_call.__wrapped__, inner, outputs, WithGrad.fills, ignored)
    for found, expected in zip(outputs, with_grad(inner), strict=True):
        assert found.isfinite().all() and error(found, expected) < 1e-12


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_nan_of_a_token_that_counts_is_the_loss_and_the_gradient_of_that_token(reduction):
    call, (a,) = make_call(RAGGED), per_token((-1, 1))
    place = int((call["target"] != -100).nonzero()[3])
    a[place] = torch.nan
    found = run(flce_ops.linear_token_loss, call, lambda lp, a: -a * lp, a, reduction=reduction)
    assert found["loss"].isnan().sum() == 1
    rows = found["input"].isnan().any(1).nonzero()
    assert rows.flatten().tolist() == [place] and found["linear_weight"].isnan().any()


def test_no_token_at_all():
    call = make_call((5, 8, 11))
    call["target"] = torch.full_like(call["target"], -100)
    assert run(flce_ops.linear_token_loss, call, lambda lp: -lp)["loss"].isnan()
    assert run(flce_ops.linear_token_loss, call, lambda lp: -lp, reduction="sum")["loss"] == 0.0
    empty = {"input": call["input"][:0], "linear_weight": call["linear_weight"], "target": call["target"][:0]}
    found = run(flce_ops.linear_token_loss, empty, lambda lp, a: -lp * a, torch.empty(0), reduction="sum")
    assert found["loss"] == 0.0 and not found["linear_weight"].any()


def test_tokens_of_weight_0_are_left_out():
    call = make_call(RAGGED) | {"token_weight": (torch.rand(RAGGED[0]) < 0.5).double()}
    x, w, y, weight = (call[name] for name in ("input", "linear_weight", "target", "token_weight"))
    for function in (lambda lp: -lp, lambda lp, *, entropy: -lp - entropy):
        found = flce_ops.linear_token_loss(x, w, y, function, token_weight=weight, reduction="sum")
        kept = flce_ops.linear_token_loss(x, w, torch.where(weight == 0, -100, y), function, reduction="sum")
        torch.testing.assert_close(found, kept)


# ---------------------------------------------------------------- what is refused

SCALE = torch.tensor(2.0, requires_grad=True)
PATHS = {
    "one pass": {},
    "backward": {"reduction": "none"},
    "a checkpoint": {"of": checkpointed},
    "torch.func": {"of": lambda x, *args: torch.func.vjp(lambda x: flce_ops.linear_token_loss(x, *args).loss, x)[0]},
}
REFUSED = {
    "a tensor that trains": (lambda lp: -lp * SCALE, NotImplementedError, r"shape \(\) that requires a gradient"),
    "what is made of one": (lambda lp, s=SCALE * 2: -lp * s, NotImplementedError, "closes over a tensor"),
    "a branch on a value": (lambda lp: -lp if lp > -1 else lp, RuntimeError, "control flow"),
    ".item()": (lambda lp: -lp * lp.item(), RuntimeError, r"\.item\(\)"),
    "random numbers": (lambda lp: -lp * torch.rand_like(lp), RuntimeError, "random"),
    "no number": (
        lambda lp: -lp.expand(2),
        TypeError,
        r"expected .* to return a floating 0-d tensor .* got shape \(2,",
    ),
    "an integer": (lambda lp: (lp > -1).long(), TypeError, "got shape .* in torch.int64"),
    "a Python number": (lambda lp: 1.0, TypeError, "for a token, got float"),
    "no log_prob": (lambda lp: -lp.detach(), ValueError, "to depend on log_prob"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_is_none_of_one_token_is_refused_on_every_path(name, path):
    function, error_type, message = REFUSED[name]
    options = dict(PATHS[path])
    of = options.pop("of", flce_ops.linear_token_loss)
    call = make_call((13, 11, 31), dtype=torch.float32)
    x = call["input"] if path == "torch.func" else call["input"].requires_grad_()
    with pytest.raises(error_type, match=f"^linear_token_loss: .*{message}"):
        of(x, call["linear_weight"], call["target"], function, **options)


def test_a_branch_on_a_number_that_all_tokens_share_is_refused():
    call = make_call((13, 11, 31))
    with pytest.raises(RuntimeError, match="linear_token_loss: .*control flow"):
        run(flce_ops.linear_token_loss, call, lambda lp, gamma: -lp if gamma > 1 else lp, 2.0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "function",
    [
        lambda lp: lp - lp.mean() - lp,
        lambda lp, a: -lp * (a - a.mean()),
        lambda lp, a: -lp * a / a.sum(),
        lambda lp: (lp * lp).mean(),
        lambda lp: -lp.softmax(0),
    ],
)
def test_numbers_of_other_tokens_are_refused_in_the_first_call(function, reduction):
    call = make_call((13, 11, 31))
    tensors = [torch.randn(13).double()] * (function.__code__.co_argcount - 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="linear_token_loss: expected .* to give a vector of tokens what it gives"):
            run(flce_ops.linear_token_loss, call, function, *tensors, reduction=reduction)


def test_a_function_is_compared_once_and_a_lambda_of_each_step_too():
    call, calls = make_call((13, 11, 31)), []

    def once(lp):
        calls.append(lp.dim())
        return -lp

    for _ in range(3):
        run(flce_ops.linear_token_loss, call, once)
    assert calls == [0, 1, 0, 0]  # 0-d for a token; the comparison is with a vector
    calls.clear()
    for factor in (1.0, 2.0, 3.0):
        run(flce_ops.linear_token_loss, call, lambda lp: calls.append(lp.dim()) or -factor * lp)  # noqa: B023
    assert calls == [0, 1, 0, 0]


def test_tensors_that_require_a_gradient_are_refused_by_name():
    call = make_call((13, 11, 31))
    x, w, y = call["input"], call["linear_weight"], call["target"]
    a = torch.rand(13, requires_grad=True)
    for options in PATHS.values():
        of = dict(options).pop("of", flce_ops.linear_token_loss)
        with pytest.raises(NotImplementedError, match=r"advantage is a constant .*; pass advantage\.detach\(\)"):
            of(x.requires_grad_(), w, y, lambda lp, advantage: -lp * advantage, a)
        x = x.detach()
    name, inner = token_loss_of(lambda lp, advantage: -lp * advantage), torch.ops.flce.linear_cross_entropy_with_grad
    with pytest.raises(NotImplementedError, match=r"tensors\[0\] is a constant"):
        inner(x, w, y, None, None, None, function=name.name, tensors=[a], output_mask=[True, True, False])


BAD = {
    "a shape": ([torch.rand(12)], ValueError, r"expected a of shape \(13,\), .* got \(12,\)"),
    "a device": ([torch.rand(13, device="meta")], ValueError, "expected a on the device of input, cpu, got meta"),
    "a complex one": ([torch.rand(13) * 1j], TypeError, "expected a to be real"),
    "a sparse one": ([torch.rand(13).to_sparse()], TypeError, "expected a to be a dense tensor"),
    "a flag": ([True], TypeError, r"expected a to be a tensor or a number, got bool; .*functools\.partial"),
    "None": ([None], TypeError, "expected a to be a tensor or a number, got NoneType"),
    "too large": ([1e300], ValueError, "expected a in the range of torch.float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_tensor_is_refused_by_the_name_of_the_parameter(name):
    tensors, error_type, message = BAD[name]
    call = make_call((13, 11, 31), dtype=torch.float32)
    with pytest.raises(error_type, match=f"^linear_token_loss: {message}"):
        flce_ops.linear_token_loss(*list(call.values())[:3], lambda lp, a: -lp * a, *tensors)


def test_what_is_no_function_of_one_token():
    x, w, y = list(make_call((13, 11, 31)).values())[:3]
    with pytest.raises(TypeError, match="expected function to be a function of one token, got Tensor"):
        flce_ops.linear_token_loss(x, w, y, torch.ones(13))
    with pytest.raises(TypeError, match="to be entropy or lse, or to have a default, got top"):
        flce_ops.linear_token_loss(x, w, y, lambda lp, *, top: -lp)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'gamma'"):
        flce_ops.linear_token_loss(x, w, y, page()["focal"])
    with pytest.raises(RuntimeError, match="expected function to be the name of a registered function, got 'nothing'"):
        torch.ops.flce.linear_token_loss(x, w, y, "nothing", [])
    with pytest.raises(TypeError, match="linear_token_loss: no argument is named gradient_threshold"):
        flce_ops.linear_token_loss(x, w, y, page()["focal"], 2.0, gradient_threshold=0.1)
    with pytest.raises(TypeError, match="linear_token_loss: no argument is named tensors"):
        flce_ops.linear_token_loss(x, w, y, page()["focal"], tensors=[2.0])


# ---------------------------------------------------------------- names


def test_a_different_function_under_a_taken_name_is_refused():
    @flce_ops.token_loss(name="tests.taken")
    def first(lp, gamma):
        return -lp * gamma

    def made(factor):
        return lambda lp: -lp * factor

    again = flce_ops.token_loss(first.function, name="tests.taken")
    assert again.function is first.function
    with pytest.raises(ValueError, match="another name than 'tests.taken', under which a different function"):
        flce_ops.token_loss(lambda lp, gamma: lp * gamma, name="tests.taken")
    flce_ops.token_loss(made(1.0), name="tests.factor")
    flce_ops.token_loss(made(1.0), name="tests.factor")
    with pytest.raises(ValueError, match="a different function"):
        flce_ops.token_loss(made(2.0), name="tests.factor")
    with pytest.raises(TypeError, match="token_loss: expected name"):
        flce_ops.token_loss(lambda lp: -lp)
    with pytest.raises(ValueError, match="dotted name, got 'a b'"):
        flce_ops.token_loss(first.function, name="a b")
    with pytest.raises(TypeError, match="expected a function of one token, got float"):
        flce_ops.token_loss(2.0, name="tests.number")


def test_a_registered_function_is_a_function():
    assert float(page()["focal"](torch.tensor(-1.0), 2.0)) == pytest.approx(0.39957640)
    assert page()["focal"].name.endswith("focal") and page()["focal"].__name__ == "focal"


def test_a_partial_an_object_and_a_function_of_torch_are_functions_of_one_token():
    class Loss(torch.nn.Module):
        def forward(self, log_prob):
            return -log_prob

    call = make_call((13, 11, 31))
    expected = run(dense_token_loss, call, lambda lp: -lp)
    for function in (torch.neg, Loss(), functools.partial(torch.mul, torch.tensor(-1.0).double())):
        found = run(flce_ops.linear_token_loss, call, function)
        for key, truth in expected.items():
            assert error(found[key], truth) < 1e-12, key
