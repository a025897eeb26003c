"""linear_kl_div as an operator: opcheck, compile, checkpoint, autocast, torch.func, FLOPs, memory, refusals."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import functools

import pytest
import torch
from inputs import scalars
from reference_divergence import KINDS, clone, leaves, make_pair, run, run_reference
from reference_loss import error
from test_compile import LENGTHS, compiled, warnings_are_errors
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flce_ops

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
    known = {"divergence": divergence.detach()} if options["kind"] == "nla" else {}
    opcheck(
        flce.linear_kl_div_backward.default, args, {**options, **known, "output_mask": [True] * 3}, test_utils=tests
    )


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


# ---------------------------------------------------------------- compile, checkpoint


@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind, reduction", [("forward", "none"), ("reverse", "mean"), ("jsd", "sum")])
def test_compiled_is_eager(device, kind, reduction, probs):
    pair = make_pair(SHAPE, device=device, bias=True, token_weight=True, probs=probs)
    cotangent = torch.randn(SHAPE[0], device=device) if reduction == "none" else torch.tensor(-3.0, device=device)
    loss, counter = compiled(flce_ops.linear_kl_div)
    # refused together with teacher_probs
    of_teacher = [name for name in EVERYTHING if probs and name.startswith("teacher")]
    options = {"kind": kind, "reduction": reduction, **EVERYTHING, **dict.fromkeys(of_teacher)}
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
            ignored = 0.0 if length == 129 else 0.15  # two chunks of valid tokens
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

    def loss(input, **others):  # a reentrant checkpoint only sees gradients of positional arguments
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


# ---------------------------------------------------------------- grad_output, torch.func, autocast


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("factor", [3.0, -0.7, 0.0, 65536.0])
def test_grad_output_is_applied_once(device, factor, reduction):
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
    """With a frozen head (LoRA) or a frozen trunk there is one GEMM pass less, and the other gradient is the same."""
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
