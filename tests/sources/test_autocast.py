"""Under autocast, dtypes and numbers are those of F.cross_entropy(F.linear(...)) under the same autocast."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, plain_loss, run

import flce_ops

HALVES = [torch.bfloat16, torch.float16]
# the difference of two half results, with a tanh in only one of them
ROUNDED = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def under_autocast(function, half, device, *args, **options):
    with torch.autocast(device, half):
        return function(*args, **options)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("everything", [False, True])
def test_float32_operands_under_autocast(device, everything, reduction, half):
    made = {"bias": True, "weight": True, "token_weight": True} if everything else {}
    options = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01} if everything else {}
    inputs = make_inputs(device=device, dtype=torch.float32, **made)

    def autocast(function):
        return lambda *args, **kwargs: under_autocast(function, half, device, *args, **kwargs)

    found = run(autocast(flce_ops.linear_cross_entropy), inputs, reduction=reduction, **options)
    plain = run(autocast(plain_loss), inputs, reduction=reduction, **options)
    assert found["loss"].dtype == torch.float32
    for name, tensor in found.items():
        assert tensor.dtype == plain[name].dtype == torch.float32, name
        assert error(tensor, plain[name]) < ROUNDED[half], name
    # it did compute in half: the result is that of half operands, not of float32 ones
    half_operands = [t.detach().to(half) if t is not None and t.is_floating_point() else t for t in inputs.args]
    expected = flce_ops.linear_cross_entropy(*half_operands, **inputs.options, reduction=reduction, **options)
    assert error(found["loss"], expected.detach()) < 1e-6  # paths with and without gradients sum in different orders


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_half_hidden_states_with_a_float32_head(device, reduction, half):
    """As a model under autocast calls it: hidden states in half, parameters in float32."""
    inputs = make_inputs(device=device, dtype=torch.float32, bias=True)
    hidden = inputs.input.detach().to(half).requires_grad_()
    leaves = (hidden, inputs.linear_weight, inputs.linear_bias)

    def grads(function):
        with torch.autocast(device, half):
            loss = function(hidden, *inputs.args[1:], reduction=reduction)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaves)

    (loss, found), (plain, expected) = grads(flce_ops.linear_cross_entropy), grads(plain_loss)
    assert loss.dtype == torch.float32
    assert error(loss, plain) < ROUNDED[half]
    for leaf, ours, theirs in zip(leaves, found, expected, strict=True):
        assert ours.dtype == leaf.dtype == theirs.dtype
        assert error(ours, theirs) < ROUNDED[half]


def test_float64_operands_stay_float64_under_autocast(device):
    """F.linear under autocast does not change float64."""
    inputs = make_inputs(device=device, dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16):
        loss = flce_ops.linear_cross_entropy(*inputs.args)
    assert loss.dtype == torch.float64
    assert error(loss, flce_ops.linear_cross_entropy(*inputs.args)) == 0


@pytest.mark.parametrize("half", HALVES)
def test_disabled_autocast_inside_an_enabled_one(device, half):
    inputs = make_inputs(device=device)
    with torch.autocast(device, half), torch.autocast(device, enabled=False):
        inner = flce_ops.linear_cross_entropy(*inputs.args)
    assert torch.equal(inner, flce_ops.linear_cross_entropy(*inputs.args))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_sums_over_given_logits_are_not_made_in_half(device, reduction, half):
    """Class weights times logits of 2000 would overflow float16."""
    logits = (2000.0 * torch.randn(7, 31, device=device)).to(half).requires_grad_()
    target = torch.arange(7, device=device)
    options = {"weight": torch.arange(900.0, 931.0, device=device), "label_smoothing": 0.1, "reduction": reduction}
    found = []
    for enabled in (True, False):
        with torch.autocast(device, half, enabled=enabled):
            loss = flce_ops.cross_entropy(logits, target, **options)
            found.append((loss, *torch.autograd.grad(loss.sum(), logits)))
    assert found[0][0].isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_derivatives_inside_autocast_of_a_loss_that_was_made_outside(device):
    inputs, found = make_inputs(device=device, bias=True), []
    leaves = tuple(inputs.leaves.values())
    for enabled in (True, False):
        loss = flce_ops.linear_cross_entropy(*inputs.args, reduction="none").square().sum()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            found.append((*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
