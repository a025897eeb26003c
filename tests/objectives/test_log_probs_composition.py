"""linear_log_probs: its cost, opcheck, torch.compile, torch.func, checkpoints and export."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from counting_backend import CountingBackend
from inputs import make_inputs, scalars
from test_log_probs import BOTH, FLOATS, dense, ours
from test_memory import MiB, peak_on_cpu, peak_on_cuda
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops import linear_log_probs

flce = torch.ops.flce

# ---------------------------------------------------------------- cost


def passes(inputs, names=(), **options):
    N, D, V = *inputs.input.shape, inputs.linear_weight.shape[0]
    with FlopCounterMode(display=False) as counter:
        found = linear_log_probs(*inputs.args, **options)
        if names:
            sum(getattr(found, name).sum() for name in names).backward()
    return counter.get_total_flops() / (2 * N * D * V)


@pytest.mark.parametrize("options", [{}, {"entropy": True}, {"argmax": True}, BOTH], ids=str)
def test_one_pass_forward_and_three_with_gradients(device, options):
    inputs = make_inputs((24, 16, 61), device=device)
    assert passes(inputs, **options) == 1
    names = FLOATS if options.get("entropy") else FLOATS[:2]
    assert passes(inputs, names, **options) == 3
    with torch.no_grad():
        assert passes(inputs, **options) == 1


def test_a_frozen_head_or_trunk_saves_a_pass(device):
    for frozen in ("input", "linear_weight"):
        inputs = make_inputs((24, 16, 61), device=device)
        getattr(inputs, frozen).requires_grad_(False)
        assert passes(inputs, FLOATS, entropy=True) == 2


def test_what_is_not_asked_for_is_not_computed(device):
    inputs = make_inputs((12, 11, 31), device=device)
    with torch.profiler.profile() as profile:
        linear_log_probs(*inputs.args).log_probs.sum().backward()
    names = {event.name for event in profile.events()}
    assert "flce::linear_cross_entropy_backward" in names
    assert not names & {"aten::max", "aten::argmax", "aten::clamp_"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_temporary_memory_stays_within_the_workspace(device, softcap, dtype):
    inputs = make_inputs((4096, 16, 2003), device=device, dtype=dtype)

    def step():
        found = ours(*inputs.args, softcap=softcap)
        torch.autograd.grad(sum(getattr(found, name).sum() for name in FLOATS), list(inputs.leaves.values()))

    with flce_ops.workspace(4 * MiB, retained=0):
        peak = (peak_on_cpu if device == "cpu" else peak_on_cuda)(step)
    results = sum(leaf.numel() * leaf.element_size() for leaf in inputs.leaves.values())
    assert peak - results <= 5 * MiB, f"{(peak - results) / MiB:.1f} MiB"


# ---------------------------------------------------------------- composition


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {**BOTH, "softcap": 5.0, "logit_scale": 0.7}], ids=["plain", "everything"])
def test_the_entry_through_opcheck(device, options, dtype):
    inputs = make_inputs((12, 11, 31), device=device, dtype=dtype, bias=bool(options))
    opcheck(flce.linear_log_probs.default, inputs.args, options)


@pytest.mark.parametrize(
    "options", [{"expected_log_prob": True}, {"argmax": True}, {"expected_log_prob": True, "argmax": True}]
)
def test_the_forward_operator_through_opcheck(device, options):
    inputs = make_inputs((12, 11, 31), device=device, bias=True)
    options = scalars({**options, "softcap": 5.0}, device)
    opcheck(flce.linear_cross_entropy_forward.default, (*inputs.args, None), options)


@pytest.mark.parametrize("needs", [False, True])
def test_the_backward_operator_through_opcheck(device, needs):
    inputs = make_inputs((12, 11, 31), device=device, bias=True, requires_grad=needs)
    with torch.no_grad():
        _, lse, _, expected, *_ = flce.linear_cross_entropy_forward(*inputs.args, expected_log_prob=True)
    cotangents = [torch.randn_like(lse) for _ in range(3)]
    options = {"output_mask": [True] * 3, "grad_expected_log_prob": cotangents[2], "expected_log_prob": expected}
    tests = ("test_schema", "test_faketensor")  # its second derivative is refused
    args = (*cotangents[:2], None, *inputs.args, None, lse)
    opcheck(flce.linear_cross_entropy_backward.default, args, options, test_utils=tests)


def test_the_backward_operator_takes_cotangents_of_any_dtype(device):
    """They are numbers: gradients have the bits of float32 cotangents."""
    inputs = make_inputs((12, 11, 31), device=device, bias=True, requires_grad=False)
    _, lse, *_ = flce.linear_cross_entropy_forward(*inputs.args)
    cotangents = [torch.randn_like(lse).bfloat16() for _ in range(2)]

    def gradients(dtype):
        of_rows = [cotangent.to(dtype) for cotangent in cotangents]
        return flce.linear_cross_entropy_backward(*of_rows, None, *inputs.args, None, lse, output_mask=[True] * 3)

    expected = gradients(torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        for found, right in zip(gradients(dtype), expected, strict=True):
            assert found.dtype == right.dtype and torch.equal(found, right)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(device, dynamic):
    inputs = make_inputs((24, 11, 31), device=device, dtype=torch.float64, bias=True)
    backend = CountingBackend()

    def penalised(*args):
        found = ours(*args, logit_scale=0.7)
        return found.log_probs.sum() + 0.1 * found.entropy.sum() + found.lse.square().sum(), found.argmax

    expected, theirs = penalised(*inputs.args)
    leaves = list(inputs.leaves.values())
    grads = torch.autograd.grad(expected, leaves)
    torch._dynamo.utils.counters.clear()
    found, mine = torch.compile(penalised, fullgraph=True, dynamic=dynamic, backend=backend)(*inputs.args)
    torch.testing.assert_close(found, expected)
    assert torch.equal(mine, theirs)
    for one, other in zip(torch.autograd.grad(found, leaves), grads, strict=True):
        torch.testing.assert_close(one, other)
    assert backend.flops == 3 * 2 * 24 * 11 * 31
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_f_linear(device, half):
    inputs = make_inputs((40, 33, 131), device=device, bias=True)
    with torch.autocast(device, half):
        found = ours(*inputs.args)
        expected = dense(*inputs.args)
    by_hand = ours(*inputs.clone(half).args)
    assert torch.equal(found.tail_log_prob, by_hand.tail_log_prob)
    for one, cast, plain in zip(found[:4], by_hand[:4], expected[:4], strict=True):
        assert one.dtype == plain.dtype
        assert torch.equal(one, cast)
    found.entropy.sum().backward()
    assert inputs.linear_weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(device, reentrant):
    inputs = make_inputs((24, 11, 31), device=device, dtype=torch.float64)
    leaves = list(inputs.leaves.values())

    def objective(*args):
        found = ours(*args)
        return found.log_probs.sum() + found.entropy.sum()

    expected = torch.autograd.grad(objective(*inputs.args), leaves)
    checkpoint(objective, *inputs.args, use_reentrant=reentrant).backward()
    for leaf, exact in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, exact)


def test_func_grad_and_vmap(device):
    inputs = make_inputs((24, 11, 31), device=device, dtype=torch.float64, requires_grad=False)
    batch = inputs.input.view(4, 6, 11), inputs.target.view(4, 6)

    def objective(function):
        def of(hidden, target, weight):
            found = function(hidden, weight, target)
            return (found.log_probs + 0.3 * found.entropy + found.lse).sum()

        return of

    transformed = [
        torch.func.vmap(torch.func.grad(objective(function), argnums=(0, 2)), (0, 0, None))(
            *batch, inputs.linear_weight
        )
        for function in (ours, dense)
    ]
    for one, other in zip(*transformed, strict=True):
        torch.testing.assert_close(one, other)
    mapped = torch.func.vmap(lambda hidden, target: ours(hidden, inputs.linear_weight, target))(*batch)
    for one, other in zip(mapped, ours(batch[0], inputs.linear_weight, batch[1]), strict=True):
        torch.testing.assert_close(one, other)


def test_forward_mode_is_refused_by_name(device):
    inputs = make_inputs((5, 4, 7), device=device, requires_grad=False)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(lambda x: ours(x, *inputs.args[1:]).entropy, (inputs.input,), (inputs.input,))


def test_export_keeps_one_node_and_a_dynamic_number_of_tokens(device):
    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(11, 31, device=device)

        def forward(self, hidden, target):
            found = ours(hidden, self.head.weight, target, self.head.bias)
            return found.log_probs, found.entropy, found.argmax

    model, tokens = Scores(), torch.export.Dim("tokens", min=2)
    hidden, target = torch.randn(9, 11, device=device), torch.randint(31, (9,), device=device)
    program = torch.export.export(model, (hidden, target), dynamic_shapes=({0: tokens}, {0: tokens}))
    names = [str(node.target) for node in program.graph.nodes if "flce" in str(node.target)]
    assert names == ["flce.linear_log_probs.default"]
    hidden, target = torch.randn(17, 11, device=device), torch.randint(31, (17,), device=device)
    for one, other in zip(program.module()(hidden, target), model(hidden, target), strict=True):
        assert torch.equal(one, other)


def test_no_host_synchronisation_on_cuda(device):
    if device != "cuda":
        pytest.skip("a CPU has nothing to wait for")
    inputs = make_inputs(device=device, dtype=torch.bfloat16)
    ours(*inputs.args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ours(*inputs.args)
        (found.log_probs + found.entropy).sum().backward()
        inputs.input.grad = inputs.linear_weight.grad = None
        flce_ops.linear_cross_entropy(*inputs.args, return_metrics=True)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
