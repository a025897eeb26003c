"""linear_kl_div follows the field's conventions: beta, temperature, symmetry, and teachers given as probabilities."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from reference_divergence import KINDS, RAGGED, clone, make_pair, run, run_reference
from reference_loss import error
from test_kl_div import REDUCTIONS

import flce_ops

# ---------------------------------------------------------------- usual conventions


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_beta_zero_is_forward_and_beta_one_is_reverse(device, reduction):
    pair = make_pair(device=device)
    for beta, kind in ((0.0, "forward"), (1.0, "reverse"), (0, "forward"), (1, "reverse")):
        found = run(flce_ops.linear_kl_div, pair, kind="jsd", beta=beta, reduction=reduction)
        expected = run(flce_ops.linear_kl_div, pair, kind=kind, reduction=reduction)
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


# ---------------------------------------------------------------- given probabilities


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_exact_zeros_in_teacher_probs(device, kind, reduction, dtype):
    """0 log 0 = 0, as in F.kl_div. Some rows are one-hot, which gives a cross-entropy."""
    pair = make_pair(device=device, dtype=dtype, probs=True)
    probs = pair["teacher_probs"]
    probs[:, ::3] = 0.0
    probs[::4] = F.one_hot(torch.arange(probs.shape[0])[::4] % probs.shape[1], probs.shape[1]).to(dtype)
    expected = run_reference(pair, kind=kind, reduction=reduction)
    found = run(flce_ops.linear_kl_div, pair, kind=kind, reduction=reduction)
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for name in expected:
        assert found[name].isfinite().all()
        assert error(found[name], expected[name]) < tolerance, name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_that_do_not_add_up_to_one(device, kind, reduction):
    """A truncated top-k, or probabilities rounded to bfloat16: the sums of the definition still hold, with their
    gradient.
    """
    pair = make_pair(device=device, dtype=torch.float64, probs=True)
    pair["teacher_probs"] = pair["teacher_probs"] * torch.rand(RAGGED[0], 1, device=device)
    expected = run_reference(pair, kind=kind, reduction=reduction)
    found = run(flce_ops.linear_kl_div, pair, kind=kind, reduction=reduction)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name


@pytest.mark.parametrize("bias", [-torch.inf, -2000.0], ids=["switched off", "underflow"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_that_neither_side_can_choose_is_as_if_it_were_not_there(device, kind, reduction, bias):
    """0 log (0 / 0) = 0, with a gradient of 0. The formula on logits would give nan there, from 0 * inf."""
    pair = make_pair(device=device, dtype=torch.float64, probs=True, bias=True)
    gone, V = [2, 5], pair["linear_weight"].shape[0]
    left = [j for j in range(V) if j not in gone]
    with torch.no_grad():
        pair["linear_bias"][gone] = bias
    pair["teacher_probs"][:, gone] = 0.0
    without = {
        name: tensor[left].detach().requires_grad_() if name.startswith("linear") else tensor
        for name, tensor in clone(pair).items()
    }
    without["teacher_probs"] = without["teacher_probs"][:, left]
    expected = run(flce_ops.linear_kl_div, without, kind=kind, reduction=reduction)
    found = run(flce_ops.linear_kl_div, pair, kind=kind, reduction=reduction)
    for name, ours in found.items():
        if name.startswith("linear"):
            assert not ours[gone].any()
            ours = ours[left]
        assert error(ours, expected[name]) < 1e-13, name


def test_reverse_is_infinite_where_given_probabilities_forbid_what_the_student_does(device):
    """kind="reverse" has no gradient there; "jsd" has a finite value and a gradient."""
    pair = make_pair(device=device, probs=True, target=False)
    pair["teacher_probs"][3, 5] = 0.0
    found = flce_ops.linear_kl_div(**pair, kind="reverse", reduction="none")
    assert found[3] == torch.inf
    others = torch.arange(len(found), device=device) != 3
    assert found[others].isfinite().all()
    for reduction in REDUCTIONS:
        loss = flce_ops.linear_kl_div(**pair, kind="reverse", reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), pair["input"])
        assert grad[3].isnan().all() and grad[others].isfinite().all()
        loss = flce_ops.linear_kl_div(**pair, kind="jsd", reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), pair["input"])
        assert loss.isfinite().all() and grad.isfinite().all()
