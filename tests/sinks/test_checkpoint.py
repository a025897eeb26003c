"""Activation checkpointing: reentrant, non-reentrant and selective, eager and compiled."""

# N tokens, D hidden, V vocabulary

import functools

import pytest
import torch
from counting_backend import CountingBackend
from inputs import make_inputs
from reference_loss import error, run, run_reference
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flce_ops

N, D, V = 40, 16, 61


def save_the_operator(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in flce_ops.SAC_SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "reentrant": {"use_reentrant": True},
    "non_reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_the_operator),
    },
    "selective_by_list": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, flce_ops.SAC_SAVE_OPS),
    },
}
COMPILABLE = ["non_reentrant", "selective"]


def checkpointed(way, **options):
    """The loss as the last block of a model: a layer and the head in one checkpointed region."""

    def block(input, linear_weight, target, linear_bias):
        return flce_ops.linear_cross_entropy(torch.sin(input), linear_weight, target, linear_bias, **options)

    return lambda *args: checkpoint(block, *args, **WAYS[way])


def expectation(inputs, **options):
    hidden = inputs.clone(torch.float64)
    found = run_reference(type(hidden)(torch.sin(hidden.input).detach().requires_grad_(), *hidden.args[1:]), **options)
    found["input"] = found["input"] * torch.cos(hidden.input)
    return {name: tensor.detach() for name, tensor in found.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_checkpointed_gradients(device, dtype, reduction, way):
    inputs = make_inputs((N, D, V), device=device, dtype=dtype, bias=True)
    expected = expectation(inputs, reduction=reduction)
    found = run(checkpointed(way, reduction=reduction), inputs)
    for name in expected:
        assert error(found[name], expected[name]) < (1e-13 if dtype == torch.float64 else 1e-2), name


# GEMM passes of 2 N D V operations. The first forward takes 1, the recomputed forward 1 (unless saved), and backward 3:
# logits, dX, dW.
PASSES = {"reentrant": 4, "non_reentrant": 5, "selective": 4, "selective_by_list": 4}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gemm_passes_under_checkpointing(device, reduction, way):
    inputs = make_inputs((N, D, V), device=device, bias=True)
    with FlopCounterMode(display=False) as counter:
        run(checkpointed(way, reduction=reduction), inputs)
    assert counter.get_total_flops() == PASSES[way] * 2 * N * D * V


@pytest.mark.parametrize("way", COMPILABLE)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiled_checkpointing(device, reduction, way):
    inputs = make_inputs((N, D, V), device=device, dtype=torch.float64, bias=True)
    expected = expectation(inputs, reduction=reduction)
    backend = CountingBackend()
    found = run(torch.compile(checkpointed(way, reduction=reduction), fullgraph=True, backend=backend), inputs)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name
    assert backend.flops == PASSES[way] * 2 * N * D * V


def test_nothing_of_the_size_of_the_weight_is_held_between_forward_and_backward(device):
    """With checkpointing dW is not computed in forward, where it would be held until backward."""
    inputs = make_inputs((N, D, V), device=device, bias=True)
    loss = checkpointed("non_reentrant")(*inputs.args)
    held = flce_ops.last_path()
    assert held.op.endswith("linear_cross_entropy_forward"), held
    loss.backward()
    assert inputs.linear_weight.grad is not None


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_saved_tensors_moved_to_the_cpu(device, reduction):
    inputs = make_inputs((N, D, V), device=device, dtype=torch.float64, bias=True)
    expected = run_reference(inputs, reduction=reduction)

    def offloaded(*args, **options):
        with torch.autograd.graph.save_on_cpu():
            return flce_ops.linear_cross_entropy(*args, **options)

    found = run(offloaded, inputs, reduction=reduction)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name


def test_checkpoint_of_a_layer_before_the_loss_leaves_the_loss_at_three_passes(device):
    inputs = make_inputs((N, D, V), device=device)

    def loss(input, *rest):
        return flce_ops.linear_cross_entropy(checkpoint(torch.sin, input, use_reentrant=False), *rest)

    with FlopCounterMode(display=False) as counter:
        run(loss, inputs)
    assert counter.get_total_flops() == 3 * 2 * N * D * V
