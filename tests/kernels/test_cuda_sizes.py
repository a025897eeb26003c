"""Matrices of more than 2^31 and 2^32 numbers on a GPU."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from marks import ON_CUDA
from reference_loss import error, run, run_reference
from test_cuda_contract import needs_memory

import flce_ops

pytestmark = ON_CUDA


def only_last_rows(inputs, count):
    """Ignores all tokens but the last ones, so that a reference of a few rows gives every gradient."""
    inputs.target[:-count] = -100
    few = inputs.clone()
    few.input = inputs.input.detach()[-count:].clone().requires_grad_()
    few.target = inputs.target[-count:]
    return few


def assert_of_last_rows(found, last, reduction):
    """`found` covers all tokens, of which only the last ones are not ignored."""
    exact, count = run_reference(last, reduction=reduction), last.target.shape[0]
    loss = found["loss"][-count:] if reduction == "none" else found["loss"]
    assert error(loss, exact["loss"]) < 1e-5  # tensor cores truncate the sums
    assert error(found["input"][-count:], exact["input"]) < 5e-3
    assert error(found["linear_weight"], exact["linear_weight"]) < 5e-3
    assert not found["input"][:-count].any()


@pytest.mark.parametrize("power, N", [(31, 20000), (32, 40000)])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_more_than_two_to_the_31_and_32_logits_in_one_chunk(reduction, power, N):
    """Offsets of int32 would overflow, signed or not."""
    needs_memory(60)
    D, V = 64, 128256
    assert N * V > 2**power
    inputs = make_inputs((N, D, V), device="cuda", dtype=torch.bfloat16, ignored=0.0)
    few = only_last_rows(inputs, 64)
    with flce_ops.workspace(40 * 2**30):
        found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    assert flce_ops.last_path().rows_per_chunk * V > 2**power, flce_ops.last_path()
    assert_of_last_rows(found, few, reduction)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_more_than_two_to_the_31_hidden_values(reduction):
    needs_memory(40)
    N, D, V = 530000, 4096, 67
    assert N * D > 2**31
    inputs = make_inputs((N, D, V), device="cuda", dtype=torch.bfloat16, ignored=0.0)
    few = only_last_rows(inputs, 64)
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    assert_of_last_rows(found, few, reduction)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_weight_of_more_than_two_to_the_31_numbers(reduction):
    needs_memory(60)
    N, D, V = 200, 4096, 530000
    assert V * D > 2**31
    inputs = make_inputs((N, D, V), device="cuda", dtype=torch.bfloat16, ignored=0.0)
    inputs.target[:100] = V - 1 - torch.arange(100, device="cuda")  # classes beyond the boundary
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    hidden, weight = inputs.input.detach().float(), inputs.linear_weight.detach().float()
    logits = hidden @ weight.T
    lse = logits.double().logsumexp(1)
    losses = lse - logits.gather(1, inputs.target[:, None])[:, 0].double()
    assert error(found["loss"], losses if reduction == "none" else losses.sum()) < 5e-6
    slopes = (logits - lse[:, None].float()).exp_()
    slopes.scatter_add_(1, inputs.target[:, None], slopes.new_full((N, 1), -1.0))
    assert error(found["input"], slopes @ weight) < 8e-3
    # the gradients of the last classes are beyond the boundary
    assert error(found["linear_weight"][-100:], slopes[:, -100:].T @ hidden) < 8e-3
