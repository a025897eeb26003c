"""linear_kl_div as an operator: opcheck, compile, checkpoint, autocast, torch.func, FLOPs, memory, refusals."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import functools
import re

import pytest
import torch
from inputs import scalars
from reference_divergence import KINDS, clone, leaves, make_pair, run, run_reference
from reference_loss import error
from test_compile import LENGTHS, compiled, warnings_are_errors
from test_memory import SMALL_CHANGE, MiB, peak_on_cpu, peak_on_cuda
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.aten import kl_div as reference
from flce_ops.aten.chunks import rows_per_chunk as rows_of_cross_entropy
from flce_ops.aten.gradients import ROUNDED_CHUNKS_ON_CPU

flce = torch.ops.flce
SHAPE = (12, 11, 7, 31)
REDUCTIONS = ("none", "mean", "sum")
EVERYTHING = {"softcap": 5.0, "logit_scale": 0.7, "teacher_logit_scale": 0.9, "teacher_softcap": 4.0, "beta": 0.3}
WANTED = [(True, True), (True, False), (False, True), (False, False)]


def entry_call(pair):
    pair = dict(pair)
    args = [pair.pop(name, None) for name in ("input", "linear_weight", "teacher_input", "teacher_weight")]
    return tuple(args), pair


def inner_args(pair):
    names = (
        "input",
        "linear_weight",
        "linear_bias",
        "teacher_input",
        "teacher_weight",
        "teacher_bias",
        "teacher_probs",
    )
    return *(pair.get(name) for name in names), None if "target" not in pair else pair["target"] != -100


def with_gradients(pair, wanted):
    pair["input"].requires_grad_(wanted[0])
    for name in ("linear_weight", "linear_bias"):
        if name in pair:
            pair[name].requires_grad_(wanted[1])
    return pair


# ---------------------------------------------------------------- opcheck


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_entry_passes_opcheck(device, reduction, dtype):
    args, options = entry_call(make_pair(SHAPE, device=device, dtype=dtype, bias=True))
    opcheck(flce.linear_kl_div.default, args, {**options, "reduction": reduction, "kind": "jsd"})


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_entry_passes_opcheck_with_every_argument(device, reduction, wanted):
    made = make_pair(SHAPE, device=device, bias=True, token_weight=True)
    args, options = entry_call(with_gradients(made, wanted))
    if reduction != "none":
        options["normalizer"] = torch.tensor(7.0, device=device)
    opcheck(flce.linear_kl_div.default, args, {**options, **EVERYTHING, "reduction": reduction, "kind": "reverse"})


@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_pass_opcheck(device, kind, probs):
    pair = make_pair(SHAPE, device=device, bias=True, probs=probs)
    options = scalars({"kind": kind, **EVERYTHING}, device)
    opcheck(flce.linear_kl_div_forward.default, inner_args(pair), options)
    with torch.no_grad():
        divergence, *statistics = flce.linear_kl_div_forward(*inner_args(pair), **options)
    grad = torch.randn_like(divergence).requires_grad_()
    args = (grad, *inner_args(pair), *statistics)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # its derivative is refused
    opcheck(flce.linear_kl_div_backward.default, args, {**options, "output_mask": [True] * 3}, test_utils=tests)


@pytest.mark.parametrize(
    "kind, wanted", [*(("jsd", wanted) for wanted in WANTED), ("forward", WANTED[0]), ("reverse", WANTED[0])], ids=str
)
def test_with_grad_passes_opcheck(device, kind, wanted):
    pair = with_gradients(make_pair(SHAPE, device=device, bias=True), wanted)
    row_scale = torch.rand(SHAPE[0], device=device)
    options = scalars({"kind": kind, "beta": 0.5, "output_mask": [wanted[0], wanted[1], wanted[1]]}, device)
    opcheck(flce.linear_kl_div_with_grad.default, (*inner_args(pair), row_scale), options)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_operators_pass_opcheck_under_autocast(device, half):
    pair = make_pair(SHAPE, device=device, bias=True)
    args, options = entry_call(pair)
    with torch.autocast(device, half):
        for reduction in ("none", "mean"):
            opcheck(flce.linear_kl_div.default, args, {**options, "reduction": reduction})
        opcheck(flce.linear_kl_div_forward.default, inner_args(pair), {})


def test_every_operator_of_this_name_is_checked_here():
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flce::linear_kl_div")
    }
    assert names == {f"linear_kl_div{end}" for end in ("", "_forward", "_backward", "_with_grad")}


# ---------------------------------------------------------------- compile, checkpoint


@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind, reduction", [("forward", "none"), ("reverse", "mean"), ("jsd", "sum")])
def test_compiled_is_eager(device, kind, reduction, probs):
    pair = make_pair(SHAPE, device=device, bias=True, token_weight=True, probs=probs)
    cotangent = torch.randn(SHAPE[0], device=device) if reduction == "none" else torch.tensor(-3.0, device=device)
    loss, counter = compiled(flce_ops.linear_kl_div)
    options = {"kind": kind, "reduction": reduction, **EVERYTHING}
    with warnings_are_errors():
        found = run(loss, pair, cotangent, **options)
    expected = run(flce_ops.linear_kl_div, pair, cotangent, **options)
    assert counter.count == 1
    for name in expected:
        assert error(found[name], expected[name]) < 1e-6, name


@pytest.mark.parametrize(
    "backend, reduction, target",
    [("inductor", "mean", True), ("aot_eager", "mean", False), ("aot_eager", "none", True)],
)
def test_one_graph_for_any_number_of_tokens(device, backend, reduction, target):
    counter = CompileCounterWithBackend(backend)
    loss = torch.compile(flce_ops.linear_kl_div, backend=counter, fullgraph=True)
    chunks = set()
    with warnings_are_errors(), flce_ops.workspace(2**15):
        for length in LENGTHS:
            ignored = 0.0 if length == 129 else 0.15  # two chunks of what is kept
            pair = make_pair((length, 11, 7, 61), device=device, dtype=torch.float64, target=target, ignored=ignored)
            expected = run_reference(pair, reduction=reduction)
            for name in ("input", "teacher_input", "target"):
                if name in pair:
                    torch._dynamo.mark_dynamic(pair[name], 0)
            value = loss(**pair, reduction=reduction)
            value.sum().backward()
            chunks.add(flce_ops.last_path().chunks)
            assert error(value, expected["loss"]) < 1e-13
            for name, leaf in leaves(pair).items():
                assert error(leaf.grad, expected[name]) < 1e-13, (name, length)
    assert counter.frame_count == 1
    assert 1 in chunks and len(chunks) > 2, f"the lengths do not differ in chunks: {chunks}"


WAYS = {
    "reentrant": {"use_reentrant": True},
    "non_reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, flce_ops.SAC_SAVE_OPS),
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_gradients(device, kind, reduction, way):
    pair = make_pair(SHAPE, device=device, dtype=torch.float64, bias=True)
    expected = run_reference(pair, kind=kind, reduction=reduction)

    def loss(input, **others):  # the reentrant kind sees gradients of positional arguments only
        def block(input, linear_weight, linear_bias):
            tensors = {**others, "linear_weight": linear_weight, "linear_bias": linear_bias}
            return flce_ops.linear_kl_div(input, **tensors)

        return checkpoint(block, input, others["linear_weight"], others["linear_bias"], **WAYS[way])

    found = run(loss, pair, kind=kind, reduction=reduction)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiled_checkpointing(device, reduction):
    pair = make_pair(SHAPE, device=device, dtype=torch.float64)
    expected = run_reference(pair, reduction=reduction)

    def loss(**arguments):
        return checkpoint(flce_ops.linear_kl_div, use_reentrant=False, **arguments)

    found = run(torch.compile(loss, backend="aot_eager", fullgraph=True), pair, reduction=reduction)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name


# ---------------------------------------------------------------- upstream gradients, torch.func, autocast


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("factor", [3.0, -0.7, 0.0, 65536.0])
def test_upstream_factor_is_applied_once(device, factor, reduction):
    pair = make_pair(device=device, bias=True, token_weight=True)
    once = run(flce_ops.linear_kl_div, pair, reduction=reduction)
    found = run(lambda **arguments: factor * flce_ops.linear_kl_div(**arguments), pair, reduction=reduction)
    for name in once:
        assert error(found[name], factor * once[name]) <= 8e-7, name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_retained_graph_gives_the_same_gradients_again(device, reduction):
    pair = make_pair(device=device, bias=True)
    wanted = list(leaves(pair).values())
    loss = flce_ops.linear_kl_div(**pair, kind="reverse", reduction=reduction)
    first, second, third = (
        torch.autograd.grad(loss, wanted, torch.full_like(loss, factor), retain_graph=True)
        for factor in (5.0, 1.0, 5.0)
    )
    last = torch.autograd.grad(loss, wanted, torch.full_like(loss, 1.0))
    for a, b, c, d in zip(first, second, third, last, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        assert error(a, 5.0 * b) <= 8e-7


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("frozen", ["input", "linear_weight"])
def test_only_the_gradients_asked_for(device, frozen, reduction):
    """A frozen head (LoRA) or a frozen trunk: one GEMM pass less, the other gradient the same."""
    pair = make_pair(device=device)
    expected = run(flce_ops.linear_kl_div, pair, reduction=reduction)
    pair[frozen].requires_grad_(False)
    found = run(flce_ops.linear_kl_div, pair, reduction=reduction)
    assert frozen not in found
    for name in found:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_token_weight_alone_needs_a_gradient(device, reduction):
    pair = make_pair(device=device, dtype=torch.float64, token_weight=True)
    expected = run_reference(pair, reduction=reduction)["token_weight"]
    with_gradients(pair, (False, False))
    found = run(flce_ops.linear_kl_div, pair, reduction=reduction)
    assert error(found["token_weight"], expected) < 1e-14


def test_normalizer_may_be_a_tensor_with_a_gradient(device):
    pair = make_pair(device=device, dtype=torch.float64)
    count = torch.tensor(37.0, dtype=torch.float64, device=device, requires_grad=True)
    flce_ops.linear_kl_div(**pair, normalizer=count).backward()
    total = run_reference(pair, reduction="sum")
    assert error(count.grad, -total["loss"] / 37.0**2) < 1e-14
    for name, leaf in leaves(pair).items():
        assert error(leaf.grad, total[name] / 37.0) < 1e-13


def test_func_grad_and_vmap(device):
    pair = make_pair((12, 11, 7, 31), device=device, dtype=torch.float64, target=False)
    expected = run_reference(pair, kind="jsd", reduction="sum")
    fixed = {name: tensor.detach() for name, tensor in pair.items() if name not in ("input", "teacher_input")}

    def loss(input, teacher_input):
        return flce_ops.linear_kl_div(input=input, teacher_input=teacher_input, kind="jsd", reduction="sum", **fixed)

    hidden, teacher = pair["input"].detach(), pair["teacher_input"]
    assert error(torch.func.grad(loss)(hidden, teacher), expected["input"]) < 1e-13
    batches = hidden.view(3, 4, -1), teacher.view(3, 4, -1)
    assert error(torch.func.vmap(loss)(*batches).sum(), expected["loss"]) < 1e-13
    found = torch.func.vmap(torch.func.grad(loss))(*batches)
    assert error(found.flatten(0, 1), expected["input"]) < 1e-13


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
def test_autocast_is_the_half_operator(device, probs, reduction, half):
    pair = make_pair(device=device, bias=True, probs=probs)
    cast = {
        name: t.detach().to(half).requires_grad_(t.requires_grad)
        if t.is_floating_point() and name != "teacher_probs"
        else t
        for name, t in pair.items()
    }
    expected = run(flce_ops.linear_kl_div, cast, reduction=reduction)

    def autocasted(**arguments):
        with torch.autocast(device, half):
            return flce_ops.linear_kl_div(**arguments)

    found = run(autocasted, pair, reduction=reduction)
    assert torch.equal(found["loss"], expected["loss"])
    for name in ("input", "linear_weight", "linear_bias"):
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], expected[name].float()), name


def test_backward_inside_autocast_is_backward_outside(device):
    pair = make_pair(device=device)
    expected = run(flce_ops.linear_kl_div, pair, reduction="none")
    again = clone(pair)
    loss = flce_ops.linear_kl_div(**again, reduction="none").sum()
    with torch.autocast(device, torch.bfloat16):
        loss.backward()
    for name, leaf in leaves(again).items():
        assert torch.equal(leaf.grad, expected[name])


# ---------------------------------------------------------------- FLOPs, memory, shapes


@pytest.mark.parametrize(
    "options, gradient, student, teacher",
    [
        ({}, True, 3, 1),
        ({"reduction": "none"}, True, 4, 2),
        ({}, False, 1, 1),
        ({"probs": True}, True, 3, 0),
    ],
    ids=["training step", "reduction none", "no gradient", "given probabilities"],
)
def test_gemm_passes(device, options, gradient, student, teacher):
    options = dict(options)
    pair = make_pair((40, 16, 8, 61), device=device, probs=options.pop("probs", False), requires_grad=gradient)
    with FlopCounterMode(display=False) as counter:
        loss = flce_ops.linear_kl_div(**pair, kind="jsd", **options)
        if gradient:
            loss.sum().backward()
    assert counter.get_total_flops() == 2 * 40 * 61 * (16 * student + 8 * teacher)


@pytest.mark.parametrize("way, student, teacher", [("reentrant", 4, 2), ("non_reentrant", 5, 3), ("selective", 4, 2)])
def test_gemm_passes_under_checkpointing(device, way, student, teacher):
    pair = make_pair((40, 16, 8, 61), device=device)

    def block(input):
        return flce_ops.linear_kl_div(**{**pair, "input": input})

    with FlopCounterMode(display=False) as counter:
        checkpoint(block, pair["input"], **WAYS[way]).backward()
    assert counter.get_total_flops() == 2 * 40 * 61 * (16 * student + 8 * teacher)


N, D, E, V = 2048, 16, 24, 2003  # float32 logits: 16 MiB
WORKSPACE = 6 * MiB  # for more than the 128 rows that are always held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind, softcap", [*((kind, None) for kind in KINDS), ("jsd", 5.0)])
def test_temporary_memory_stays_within_the_workspace(device, softcap, kind, reduction, dtype):
    pair = make_pair((N, D, E, V), device=device, dtype=dtype, bias=True)

    def step():
        loss = flce_ops.linear_kl_div(**pair, kind=kind, reduction=reduction, softcap=softcap, teacher_softcap=softcap)
        torch.autograd.grad(loss.sum(), list(leaves(pair).values()))

    with flce_ops.workspace(WORKSPACE):
        peak = (peak_on_cpu if device == "cpu" else peak_on_cuda)(step)
    assert flce_ops.last_path().chunks > 2  # half matrices on a GPU, float32 ones elsewhere
    results = sum(leaf.numel() * leaf.element_size() for leaf in leaves(pair).values())
    assert peak - results <= WORKSPACE + SMALL_CHANGE, f"{(peak - results) / MiB:.1f} MiB"
    assert peak - results > WORKSPACE / 4, "chunks far smaller than the workspace allows"


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_weight_gradient_is_summed_in_float32_though_cross_entropy_would_need_one_chunk(monkeypatch, reduction):
    """More matrices than linear_cross_entropy's, so more chunks: they are what the rule for the sum counts."""
    dtypes = []

    class Watched(reference.GradientAccumulator):
        def finish(self):
            dtypes.append(self.weight_sum.dtype)
            super().finish()

    monkeypatch.setattr(reference, "GradientAccumulator", Watched)
    pair = make_pair((2000, 16, 8, 509), dtype=torch.bfloat16)
    with flce_ops.workspace(2000 * (509 * 2 + 200)):
        assert rows_of_cross_entropy(pair["input"], 509) == 2000
        flce_ops.linear_kl_div(**pair, kind="jsd", reduction=reduction).sum().backward()
        assert flce_ops.last_path().chunks > ROUNDED_CHUNKS_ON_CPU
    assert dtypes == [torch.float32]


def test_teacher_states_are_not_held_until_backward(device):
    """Gradients are made in forward, so a freed teacher is free."""
    import weakref

    pair = make_pair(device=device)
    loss = flce_ops.linear_kl_div(**pair)
    teacher = weakref.ref(pair["teacher_input"])
    del pair["teacher_input"]
    assert teacher() is None
    loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_leading_dimensions_and_strides(device, reduction):
    pair = make_pair((24, 11, 7, 31), device=device, dtype=torch.float64, bias=True, token_weight=True)
    expected = run_reference(pair, reduction=reduction)
    shaped = dict(pair)
    for name in ("input", "teacher_input", "target", "token_weight"):
        tensor = pair[name].detach()
        shaped[name] = tensor.view(2, 3, 4, *tensor.shape[1:]).requires_grad_(pair[name].requires_grad)
    wide = torch.zeros(11, 31, dtype=torch.float64, device=device).copy_(pair["linear_weight"].detach().T)
    shaped["linear_weight"] = wide.T.requires_grad_()
    loss = flce_ops.linear_kl_div(**shaped, reduction=reduction)
    assert loss.shape == ((2, 3, 4) if reduction == "none" else ())
    loss.sum().backward()
    assert error(loss.flatten() if reduction == "none" else loss, expected["loss"]) < 1e-13
    for name in ("input", "linear_weight", "token_weight"):
        assert error(shaped[name].grad.reshape(expected[name].shape), expected[name]) < 1e-13


# ---------------------------------------------------------------- refusals


def changed(pair, **changes):
    pair = {**pair, **changes}
    return {name: value for name, value in pair.items() if value is not None}


REFUSED = {
    "neither teacher": ({"teacher_input": None, "teacher_weight": None}, ValueError, "got neither"),
    "half a teacher": ({"teacher_weight": None}, ValueError, "got teacher_input"),
    "both teachers": (
        {"teacher_probs": lambda p: torch.rand(p["input"].shape[0], p["linear_weight"].shape[0])},
        ValueError,
        "teacher_probs came together with",
    ),
    "another vocabulary": (
        {"teacher_weight": lambda p: p["teacher_weight"][:-2]},
        ValueError,
        "one vocabulary, but linear_weight has 31 rows and teacher_weight 29",
    ),
    "other tokens": (
        {"teacher_input": lambda p: p["teacher_input"][1:]},
        ValueError,
        "expected teacher_input of shape",
    ),
    "features of the teacher": (
        {"teacher_input": lambda p: p["teacher_input"][:, 1:]},
        ValueError,
        "teacher_input has 6 features",
    ),
    "teacher's dtype": (
        {"teacher_weight": lambda p: p["teacher_weight"].half()},
        TypeError,
        "expected teacher_weight in",
    ),
    "student's dtype": ({"linear_weight": lambda p: p["linear_weight"].half()}, TypeError, "expected linear_weight in"),
    "integer input": ({"input": lambda p: p["input"].detach().long()}, TypeError, "expected input in one of"),
    "bias": ({"teacher_bias": lambda p: torch.zeros(5)}, ValueError, "expected teacher_bias of shape (31,)"),
    "flat weight": ({"linear_weight": lambda p: p["linear_weight"].flatten()}, ValueError, "FSDP1"),
    "kind": ({"kind": "kl"}, ValueError, "expected kind to be one of forward, reverse, jsd, got 'kl'"),
    "beta": ({"kind": "jsd", "beta": 1.5}, ValueError, "expected beta in [0, 1], got 1.5"),
    "reduction": ({"reduction": "batchmean"}, ValueError, "expected reduction to be one of"),
    "softcap": ({"teacher_softcap": 0.0}, ValueError, "expected teacher_softcap to be positive"),
    "target's shape": ({"target": lambda p: p["target"][1:]}, ValueError, "expected target of shape (12,)"),
    "target's dtype": ({"target": lambda p: p["target"].float()}, TypeError, "expected target of class indices"),
    "token_weight": ({"token_weight": lambda p: torch.ones(5)}, ValueError, "expected token_weight of shape (12,)"),
    "normalizer of rows": ({"reduction": "none", "normalizer": 3.0}, ValueError, "normalizer divides a sum"),
    "normalizer's shape": ({"normalizer": torch.ones(2)}, ValueError, "expected normalizer to be a number or a 0-d"),
    "teacher's gradient": (
        {"teacher_weight": lambda p: p["teacher_weight"].clone().requires_grad_()},
        NotImplementedError,
        "the teacher is constant, but teacher_weight requires a gradient; pass teacher_weight.detach()",
    ),
}


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case, compile):
    changes, kind, message = REFUSED[case]
    pair = make_pair(SHAPE)
    changes = {name: change(pair) if callable(change) else change for name, change in changes.items()}
    function = torch.compile(flce_ops.linear_kl_div, backend="eager", fullgraph=True) if compile else None
    with pytest.raises(Exception if compile else kind, match=re.escape(message)):
        (function or flce_ops.linear_kl_div)(**changed(pair, **changes))


def test_given_probabilities_of_another_shape_or_dtype_are_refused():
    pair = make_pair(SHAPE, probs=True)
    with pytest.raises(ValueError, match="expected teacher_probs of shape \\(12, 31\\)"):
        flce_ops.linear_kl_div(**changed(pair, teacher_probs=pair["teacher_probs"][:, 1:]))
    with pytest.raises(TypeError, match="expected teacher_probs in a floating dtype"):
        flce_ops.linear_kl_div(**changed(pair, teacher_probs=pair["teacher_probs"].long()))


def test_a_teacher_that_requires_a_gradient_is_fine_where_nothing_is_recorded():
    pair = make_pair(SHAPE)
    expected = flce_ops.linear_kl_div(**pair).detach()
    pair["teacher_weight"] = torch.nn.Parameter(pair["teacher_weight"])
    with torch.no_grad():
        assert torch.equal(flce_ops.linear_kl_div(**pair), expected)
    with pytest.raises(NotImplementedError, match="teacher_weight requires a gradient"):
        flce.linear_kl_div_forward(*inner_args(pair))  # the inner operators do not drop it in silence either


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivatives_are_refused_by_name(reduction):
    pair = make_pair(SHAPE)
    loss = flce_ops.linear_kl_div(**pair, reduction=reduction).sum()
    with pytest.raises(NotImplementedError, match="linear_kl_div: second derivatives are not implemented"):
        (gradient,) = torch.autograd.grad(loss, pair["input"], create_graph=True)
        gradient.sum().backward()


@pytest.mark.parametrize("frozen", [None, "linear_weight"])
def test_compiled_second_derivatives_are_refused(frozen):
    """AOTAutograd refuses where the backward graph reads a tensor that requires a gradient: an unfrozen one."""
    pair = make_pair(SHAPE)
    if frozen is not None:
        pair[frozen].requires_grad_(False)
    loss = torch.compile(flce_ops.linear_kl_div, backend="aot_eager")(**pair)
    with pytest.raises(RuntimeError, match="double backward"):
        (gradient,) = torch.autograd.grad(loss, pair["input"], create_graph=True)
        gradient.sum().backward()


def test_forward_mode_is_refused_by_name():
    pair = {name: tensor.detach() for name, tensor in make_pair(SHAPE).items()}
    hidden = pair.pop("input")
    with pytest.raises(NotImplementedError, match="linear_kl_div: forward-mode differentiation"):
        torch.func.jvp(lambda input: flce_ops.linear_kl_div(input, **pair), (hidden,), (hidden,))
