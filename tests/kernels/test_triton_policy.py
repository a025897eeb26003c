"""The Triton kernels of linear_policy_loss on the CPU through Triton's interpreter, against float64 in plain ATen."""

# N tokens, D hidden, V vocabulary

import math

import pytest
import torch
from reference_loss import error
from reference_policy import function_of_policy, make_policy
from test_policy import KL, OBJECTIVES

from flce_ops.aten.cross_entropy import with_grad
from flce_ops.math.token_weights_and_denominator import Reduction

pytest.importorskip("triton")

from flce_ops.triton.steps.with_grad import launch_with_grad

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on log2(0) and exp2 of large numbers
]

RAGGED = (37, 35, 131)
TOLERANCE = 6e-6  # float32; twice the error that was seen: a log-probability and its ratio have the same error
OPERANDS = ("input", "linear_weight", "target", "linear_bias")


def double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check(call, options, *, row_scale=None, denominator=None, mask=(True, True, False), tolerance=TOLERANCE, **logits):
    """Compares loss, losses, three gradients and log_probs of the launcher with float64 in ATen."""
    operands, keywords = [call[name] for name in OPERANDS], {**logits, "output_mask": list(mask)}
    function, tensors = function_of_policy(call, **options)
    wide = {name: double(value) for name, value in keywords.items()}
    of_rows = [*map(double, operands), None, double(row_scale), double(denominator)]
    wide |= {"function": function, "tensors": list(map(double, tensors))}
    keywords |= {"function": function, "tensors": tensors}
    exact = with_grad(*of_rows, **wide)
    found = launch_with_grad(*operands, None, row_scale, denominator, **keywords)
    for ours, truth in zip(found[1:], exact[1:], strict=True):
        assert ours.shape == truth.shape
        assert error(ours, truth) <= tolerance
    valid = call["target"] != -100
    scale, _ = Reduction(row_scale, denominator).scale_of_tokens(valid, torch.float64)
    assert (found[0] - exact[0]).abs() <= tolerance * (scale * exact[1]).abs().sum()  # losses of both signs cancel
    return found


CASES = [
    (OBJECTIVES["clip higher"], KL[1]),
    (OBJECTIVES["dual clip"], KL[2]),
    (OBJECTIVES["unbounded"], KL[3]),
    (OBJECTIVES["cispo"], KL[3]),
    (OBJECTIVES["cispo of both bounds"], {}),
]


@pytest.mark.parametrize("objective, kl", CASES, ids=str)
def test_every_objective_and_estimator_agrees_with_float64(objective, kl, poisoned_memory):
    call = make_policy(RAGGED)
    check(call, objective | kl, row_scale=torch.rand(RAGGED[0]))


@pytest.mark.parametrize(
    "made, denominator", [({"on_policy": True}, None), ({"bias": True}, torch.tensor(7.0))], ids=["mean", "denominator"]
)
def test_means_biases_and_scaled_logits(made, denominator, poisoned_memory):
    call = make_policy(RAGGED, **made)
    logits = {"softcap": torch.tensor(4.0), "logit_scale": torch.tensor(0.7)}
    mask = (True, True, call["linear_bias"] is not None)
    check(call, {"beta": 0.1}, denominator=denominator, mask=mask, **logits)


def test_clipped_tokens_and_what_ignored_ones_hold(poisoned_memory):
    """Ratios of inf beyond the bound are clipped, too."""
    call = make_policy(RAGGED)
    ignored = call["target"] == -100
    call["advantages"] = call["advantages"].abs()
    call["old_log_probs"] = torch.full_like(call["old_log_probs"], -150.0)  # every ratio is inf
    call["old_log_probs"][::3] = 0.0
    for name in ("input", "advantages", "old_log_probs", "ref_log_probs"):
        call[name][ignored] = math.nan
    found = check(call, {}, row_scale=torch.rand(RAGGED[0]))
    clipped = torch.ones(RAGGED[0], dtype=torch.bool)
    clipped[::3] = False
    assert not found[2][clipped | ignored].any() and found[2][~clipped & ~ignored].any(1).all()
    assert not found[1][ignored].any() and not found[10][ignored].any()
