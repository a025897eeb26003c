"""linear_log_probs: its cost and opcheck."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs, scalars
from test_log_probs import BOTH, FLOATS, ours
from test_memory import MiB, peak_on_cpu, peak_on_cuda
from torch.library import opcheck
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
        _, pair, _, expected, *_ = flce.linear_cross_entropy_forward(*inputs.args, expected_log_prob=True)
    cotangents = [torch.randn_like(pair[:, 0]) for _ in range(3)]
    options = {"output_mask": [True] * 3, "grad_expected_log_prob": cotangents[2], "expected_log_prob": expected}
    tests = ("test_schema", "test_faketensor")  # its second derivative is refused
    args = (*cotangents[:2], None, *inputs.args, None, pair)
    opcheck(flce.linear_cross_entropy_backward.default, args, options, test_utils=tests)


def test_the_backward_operator_takes_cotangents_of_any_dtype(device):
    """They are numbers: gradients have the bits of float32 cotangents."""
    inputs = make_inputs((12, 11, 31), device=device, bias=True, requires_grad=False)
    _, pair, *_ = flce.linear_cross_entropy_forward(*inputs.args)
    cotangents = [torch.randn_like(pair[:, 0]).bfloat16() for _ in range(2)]

    def gradients(dtype):
        of_rows = [cotangent.to(dtype) for cotangent in cotangents]
        return flce.linear_cross_entropy_backward(*of_rows, None, *inputs.args, None, pair, output_mask=[True] * 3)

    expected = gradients(torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        for found, right in zip(gradients(dtype), expected, strict=True):
            assert found.dtype == right.dtype and torch.equal(found, right)


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
