"""A bias of half operands is added before logits are rounded, as in F.linear."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs
from reference_loss import error

import flce_ops

SHAPE = (300, 64, 509)
LOSS_SCALE = 4096.0


def our_policy(x, w, y, b):
    return flce_ops.linear_policy_loss(x, w, y, torch.ones(len(x), device=x.device), linear_bias=b).loss


def dense_policy(z, y):
    log_probs = -F.cross_entropy(z, y, reduction="none")
    return -(log_probs - log_probs.detach()).exp().mean()


def our_divergence(x, w, y, b):
    teacher = {"teacher_input": x.detach(), "teacher_weight": w.detach(), "teacher_bias": b.detach()}
    return flce_ops.linear_kl_div(x, w, **teacher, linear_bias=b, teacher_logit_scale=0.5, reduction="none")


def dense_divergence(z, y):
    log_q, log_p = z.log_softmax(-1), (0.5 * z.detach()).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


OBJECTIVES = {  # this package's function, and the formula on logits
    "loss": (flce_ops.linear_cross_entropy, F.cross_entropy),
    "losses": (
        lambda *args: flce_ops.linear_cross_entropy(*args, reduction="none"),
        lambda z, y: F.cross_entropy(z, y, reduction="none"),
    ),
    "log-probabilities": (
        lambda *args: flce_ops.linear_log_probs(*args).log_probs,
        lambda z, y: -F.cross_entropy(z, y, reduction="none"),
    ),
    "policy": (our_policy, dense_policy),
    "divergence": (our_divergence, dense_divergence),
}


def values_and_gradients(function, leaves):
    result = function(*leaves)
    slope = torch.linspace(0.5, 1.5, result.numel(), device=result.device).view(result.shape) * LOSS_SCALE
    return result.detach(), *torch.autograd.grad((result * slope).sum(), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_bias_that_takes_back_the_product_costs_no_digits(name, dtype, device):
    """If the product were rounded before such a bias is added, its rounding error would remain in full."""
    ours, formula = OBJECTIVES[name]
    inputs = make_inputs(SHAPE, device=device, dtype=dtype, ignored=0.0)
    y, offset = inputs.target, (50 * torch.randn(SHAPE[2], device=device)).to(dtype)
    with torch.no_grad():
        inputs.linear_weight[:, 1], inputs.input[:, 1] = offset, 1.0
    leaves = [inputs.input, inputs.linear_weight, (-offset).requires_grad_()]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]

    exact = values_and_gradients(lambda *args: formula(F.linear(*args), y), doubles)
    plain = values_and_gradients(lambda *args: formula(F.linear(*args).float(), y), leaves)
    found = values_and_gradients(lambda x, w, b: ours(x, w, y, b), leaves)
    for of, mine, theirs, truth in zip(("value", "input", "weight", "bias"), found, plain, exact, strict=True):
        # both round the logit gradient and the result, in different ways; if the bias came after rounding, errors were
        # 30 times larger
        assert error(mine, truth) <= 1.5 * error(theirs, truth) + 1e-6, of
