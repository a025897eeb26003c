"""grad_output, the factor from above the loss, is applied exactly once."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, plain_loss, run

import flce_ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# the factor is applied before or after rounding
TOLERANCE = {torch.float64: 1e-15, torch.float32: 8e-7, torch.bfloat16: 9e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("factor", [3.0, -0.7, 0.0, 65536.0])  # 65536: a loss scale
def test_grad_output_is_applied_once(device, factor, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, token_weight=True, normalizer=reduction != "none")

    def scaled(*args, **options):
        return factor * flce_ops.linear_cross_entropy(*args, **options)

    once, found = (
        run(flce_ops.linear_cross_entropy, inputs, reduction=reduction),
        run(scaled, inputs, reduction=reduction),
    )
    for name in once:
        assert error(found[name], factor * once[name]) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_retained_graph_gives_the_same_gradients_again(device, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    leaves = list(inputs.leaves.values())
    loss = flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction)
    # a factor other than 1 first: if gradients were rescaled in place, the next backward would be wrong
    first, second, third = (
        torch.autograd.grad(loss, leaves, torch.full_like(loss, factor), retain_graph=True)
        for factor in (5.0, 1.0, 5.0)
    )
    last = torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.0))
    for a, b, c, d in zip(first, second, third, last, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        assert error(a, 5.0 * b) <= TOLERANCE[dtype]


def test_gradients_of_two_backwards_are_separate_tensors(device):
    """A caller may scale one result in place (gradient clipping) without changing the other."""
    inputs = make_inputs(device=device)
    leaves = list(inputs.leaves.values())
    loss = flce_ops.linear_cross_entropy(*inputs.args)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()
    for g, expected in zip(torch.autograd.grad(loss, leaves), kept, strict=True):
        assert torch.equal(g, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_second_backward_without_retain_graph_is_refused(device, reduction):
    inputs = make_inputs(device=device)
    loss = flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_used_twice(device, reduction):
    """loss + loss.square(), a penalty on the loss: the factor is known only in backward."""
    inputs = make_inputs(device=device, dtype=torch.float64)

    def penalised(function):
        def call(*args, **options):
            loss = function(*args, **options)
            return loss + loss.square()

        return call

    expected = run(penalised(plain_loss), inputs, reduction=reduction)
    found = run(penalised(flce_ops.linear_cross_entropy), inputs, reduction=reduction)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-14, name


@pytest.mark.parametrize("factor", [1.0, -0.7])
def test_row_scale_alone_may_want_a_gradient(device, factor):
    """This tests the operator itself."""
    inputs = make_inputs((24, 8, 10), device=device, dtype=torch.float32, requires_grad=False)
    row_scale = torch.rand(24, device=device, requires_grad=True)
    operands = inputs.input, inputs.linear_weight, inputs.target, None, None
    loss, losses, *_ = torch.ops.flce.linear_cross_entropy_with_grad(
        *operands, row_scale, output_mask=[False, False, False]
    )
    (factor * loss).backward()
    assert error(row_scale.grad, factor * losses) < 1e-6
