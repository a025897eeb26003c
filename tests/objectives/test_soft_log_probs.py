"""Log-probabilities of several classes for each token, and of all other classes together (the tail)."""

# N tokens, K classes of each, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import dense_logits, error
from test_soft_targets import D, N, V, leaves_of, make_call

import flce_ops


def rows_of(input, linear_weight, target, linear_bias, **options):
    """The dense formula: log_probs, lse, and the tail's log-probability."""
    counts = target != -100
    valid = counts.any(-1)
    z = dense_logits(torch.where(valid[..., None], input, 0.0), linear_weight, linear_bias, **options)
    z = z if z.dtype == torch.float64 else z.float()
    log_p, column = z.log_softmax(-1), torch.where(counts, target, 0)
    named = torch.zeros_like(z).scatter_add(-1, column, counts.to(z.dtype)) > 0
    tail = log_p.masked_fill(named, -torch.inf).logsumexp(-1)
    log_probs = torch.where(counts, log_p.gather(-1, column), 0.0)
    return log_probs, torch.where(valid, z.logsumexp(-1), 0.0), torch.where(valid, tail, 0.0)


def log_probs(input, linear_weight, target, linear_bias, **options):
    found = flce_ops.linear_log_probs(input, linear_weight, target, linear_bias, tail=True, **options)
    return found.log_probs, found.lse, found.tail_log_prob


def run_rows(function, call, dtype=None, **options):
    call, leaves = leaves_of(call, dtype)
    rows = function(call["input"], call["linear_weight"], call["target"], call["linear_bias"], **options)
    objective = sum((row * torch.linspace(-1, 1, row.numel()).to(row).view(row.shape)).sum() for row in rows)
    return [*(row.detach() for row in rows), *torch.autograd.grad(objective, leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "temperature": 0.7}], ids=["plain", "softcap"])
def test_log_probs_of_several_classes_and_of_their_tail(device, options, dtype, poisoned_memory):
    call = make_call(device, dtype, (252, 64, 509), 5)
    call["linear_bias"].zero_()  # without a bias plain torch rounds the same half logits
    exact = run_rows(rows_of, call, torch.float64, **options)
    found, plain = run_rows(log_probs, call, **options), run_rows(rows_of, call, **options)
    slack = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 0.0)
    for result in (found, plain, exact) if dtype.itemsize == 2 else ():  # or one token's tail outweighs all others
        result[2] = torch.where(exact[2] == 0.0, 0.0, result[2] / exact[2])
    for k, (ours_, theirs, truth) in enumerate(zip(found, plain, exact, strict=True)):
        # the bias's gradient is a sum in which one number outweighs others, too: up to 1.27 in 300 draws, 0.9 in 297
        assert error(ours_, truth) < (1.4 if k == 5 else 1.2) * error(theirs, truth) + slack


def test_a_tail_of_almost_nothing_and_of_almost_everything(device):
    """In float32, for masses down to 1e-6. The tail's probability is never below eps, and has no gradient there."""
    for largest in (0.0, 6.0, 12.0, 40.0):
        bias = torch.zeros(V, device=device)
        bias[:4] = largest
        call = (torch.zeros(1, D, device=device), torch.zeros(V, D, device=device))
        target = torch.tensor([[0, 1, 2, 3, 3]], device=device)
        bias.requires_grad_()
        found = flce_ops.linear_log_probs(*call, target, bias, tail=True)
        exact = bias.detach().double().log_softmax(0)[4:].logsumexp(0)
        if largest == 40.0:
            assert (
                error(found.tail_log_prob, torch.tensor([torch.finfo(torch.float32).eps], device=device).log()) < 1e-6
            )
        else:
            assert (found.tail_log_prob.exp().double() - exact.exp()).abs() < 5e-7  # 2.5e-7 was seen
        (grad,) = torch.autograd.grad(found.tail_log_prob.sum(), bias)
        assert grad.isfinite().all() and (largest < 40.0 or not grad.any())
    everything = torch.arange(V, device=device).unsqueeze(0)
    call = (torch.randn(1, D, device=device), torch.randn(V, D, device=device))
    tail = flce_ops.linear_log_probs(*call, everything, tail=True).tail_log_prob
    assert tail.isfinite().all() and tail < -15


def test_a_tail_beside_classes_that_are_switched_off(device):
    """The first token names only such classes: all probability is in its tail, and the gradients stay numbers."""
    call = make_call(device, torch.float64, (N, D, V), 3)
    call["target"][0] = torch.tensor([0, 1, 1], device=device)
    call["target"][1] = torch.tensor([0, 1, 5], device=device)
    call["target"][2] = torch.tensor([1, -100, -100], device=device)
    call["input"][:3].normal_()
    call["linear_bias"][:2] = -torch.inf
    found, exact = run_rows(log_probs, call), run_rows(rows_of, call)
    assert abs(found[2][0]) < 1e-15 and abs(found[2][2]) < 1e-15
    for ours_, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours_, truth, rtol=1e-12, atol=1e-12)


def test_a_tail_of_one_class(device):
    inputs = make_inputs((N, D, V), device=device, dtype=torch.float64, requires_grad=False)
    found = flce_ops.linear_log_probs(*inputs.args, tail=True)
    expected = torch.log1p(-found.log_probs.exp()).where(inputs.target != -100, 0.0)
    assert error(found.tail_log_prob, expected) < 1e-13
