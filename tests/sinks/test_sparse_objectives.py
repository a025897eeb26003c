"""Sparse gradients of every objective: the exact logit gradient, its small entries sampled, and two matrix products."""

# N tokens, K classes, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import dense_logits, error, reference_loss
from reference_policy import token_losses
from test_sparse_gradient import sparse

import flce_ops
from flce_ops.math.sparse_gradient import SparseGradient, keep_entries

SHAPE = (23, 9, 4500)  # three tiles of classes, the last one partial
N, K = SHAPE[0], 3


def of_token(*shape):
    """Weights of tokens, as a user might give them: of both signs, and a 0."""
    values = torch.randn(N, *shape, dtype=torch.float64)
    values[3] = 0.0
    return values


def loss_of_logits(z, target, **options):
    identity = torch.eye(z.shape[1], dtype=z.dtype)
    return reference_loss(z, identity, target, **options)


class Case:
    """An objective: by the operator, by dense logits z, and its slope l with respect to each row's lse."""

    def __init__(self, ours, dense, slope, **logits):
        self.ours, self.dense, self.slope, self.logits = ours, dense, slope, logits


def losses_case(reduction, grad_output=None, **options):
    """A loss of linear_cross_entropy. The `slope` of a token is (1 - eps) w_y + eps mean(w) + 2 z_loss lse."""
    logits = {name: options.pop(name) for name in ("softcap", "logit_scale") if name in options}

    def ours(inputs, **chosen):
        found = flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction, **options, **logits, **chosen)
        return found if grad_output is None else (found * grad_output).sum()

    def dense(z, inputs):
        found = loss_of_logits(z, inputs.target, reduction=reduction, **options)
        return found if grad_output is None else (found * grad_output).sum()

    def slope(z, inputs):
        valid = inputs.target != -100
        weight = options.get("weight", torch.ones(z.shape[1], dtype=z.dtype))
        own = torch.where(valid, weight[inputs.target.clamp(min=0)], 0.0)
        eps = options.get("label_smoothing", 0.0)
        of_row = (1 - eps) * own + valid * (eps * weight.mean() + 2 * options.get("z_loss", 0.0) * z.logsumexp(1))
        of_row = of_row * options.get("token_weight", 1.0) * (1.0 if grad_output is None else grad_output)
        return of_row / own.sum() if reduction == "mean" else of_row

    return Case(ours, dense, slope, **logits)


def log_probs_case(of_lse=False, **logits):
    grad_output, of_row = of_token(), of_token()

    def ours(inputs, **chosen):
        found = flce_ops.linear_log_probs(*inputs.args, **logits, **chosen)
        return (found.log_probs * grad_output).sum() + of_lse * (found.lse * of_row).sum()

    def dense(z, inputs):
        valid, lse = inputs.target != -100, z.logsumexp(1)
        log_probs = z.gather(1, inputs.target.clamp(min=0)[:, None]).squeeze(1) - lse
        return torch.where(valid, log_probs * grad_output + of_lse * lse * of_row, 0.0).sum()

    def slope(z, inputs):
        return torch.where(inputs.target != -100, of_lse * of_row - grad_output, 0.0)

    return Case(ours, dense, slope, **logits)


def policy_case(reduction):
    advantages, old = of_token(), -8.0 + 0.1 * torch.randn(N, dtype=torch.float64)

    def ours(inputs, **chosen):
        args = (*inputs.args[:3], advantages, old, None, inputs.linear_bias)
        loss = flce_ops.linear_policy_loss(*args, reduction=reduction, **chosen).loss
        return loss if reduction == "sum" else loss.sum()

    def log_probs_of(z, inputs):
        return z.log_softmax(1).gather(1, inputs.target.clamp(min=0)[:, None]).squeeze(1)

    def dense(z, inputs):
        losses = token_losses(log_probs_of(z, inputs), advantages, old, None)
        return torch.where(inputs.target != -100, losses, 0.0).sum()

    def slope(z, inputs):
        log_probs = log_probs_of(z.detach(), inputs).requires_grad_()
        losses = torch.where(inputs.target != -100, token_losses(log_probs, advantages, old, None), 0.0)
        return -torch.autograd.grad(losses.sum(), log_probs)[0]

    return Case(ours, dense, slope)


def soft_case(reduction):
    """Soft targets; some classes of a token are equal, some are ignore_index."""
    q = torch.rand(N, K, dtype=torch.float64)

    def targets(inputs):
        others = torch.arange(2 * N).view(N, 2) % 7
        others[5, 1] = -100
        return torch.cat([inputs.target[:, None], others], 1)

    def ours(inputs, **chosen):
        args = (*inputs.args[:2], targets(inputs), inputs.linear_bias)
        return flce_ops.linear_cross_entropy(*args, reduction=reduction, target_weight=q, **chosen).sum()

    def dense(z, inputs):
        y = targets(inputs)
        log_probs = z.log_softmax(1).gather(1, y.clamp(min=0))
        return -torch.where(y == -100, 0.0, q * log_probs).sum()

    def slope(z, inputs):
        return torch.where(targets(inputs) == -100, 0.0, q).sum(1)

    return Case(ours, dense, slope)


CASES = {
    "none": lambda: losses_case("none", of_token()),
    "none, every number": lambda: losses_case(
        "none", of_token(), weight=torch.rand(SHAPE[2], dtype=torch.float64), z_loss=1e-2, token_weight=of_token()
    ),
    "token weights": lambda: losses_case("sum", token_weight=of_token()),
    "label smoothing": lambda: losses_case(
        "mean", label_smoothing=0.2, weight=torch.rand(SHAPE[2], dtype=torch.float64) + 0.1
    ),
    "label smoothing, none": lambda: losses_case("none", of_token(), label_smoothing=0.2),
    "softcap": lambda: losses_case("sum", softcap=3.0, logit_scale=0.7),
    "softcap, none": lambda: losses_case("none", of_token(), softcap=3.0, logit_scale=-0.7),
    "soft targets": lambda: soft_case("sum"),
    "soft targets, none": lambda: soft_case("none"),
    "log-probs": lambda: log_probs_case(logit_scale=0.7),
    "log-probs and lse": lambda: log_probs_case(of_lse=True),
    "policy": lambda: policy_case("sum"),
    "policy, none": lambda: policy_case("none"),
}


def expected_gradients(case, inputs, chosen):
    """The gradients of input, linear_weight and linear_bias, from all logits."""
    x, w, _, b = (tensor.detach() for tensor in inputs.args)
    logits = case.logits
    u = (x @ w.T + b).requires_grad_()
    z = dense_logits(u, torch.eye(u.shape[1], dtype=u.dtype), **logits)
    (exact,) = torch.autograd.grad(case.dense(z, inputs), u)
    kept = exact.clone()
    slope = case.slope(z.detach(), inputs) * logits.get("logit_scale", 1.0)
    keep_entries(kept, slope, SparseGradient(**chosen), torch.arange(N))
    changed = (kept != exact).double().mean()
    assert 0.01 < changed < 0.999, changed
    of_input, of_weight = SparseGradient(**chosen).products([True, True])
    return (kept if of_input else exact) @ w, (kept if of_weight else exact).T @ x, exact.sum(0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "gradient_sparse, mode", [("both", "unbiased"), ("linear_weight", "drop"), ("input", "unbiased")]
)
def test_gradients_are_those_of_the_exact_logit_gradient_with_its_small_entries_sampled(name, gradient_sparse, mode):
    case = CASES[name]()
    inputs = make_inputs(SHAPE, dtype=torch.float64, bias=True)
    chosen = sparse(2.0**-7, mode) | {"gradient_sparse": gradient_sparse}
    found = torch.autograd.grad(case.ours(inputs, **chosen), list(inputs.leaves.values()))
    assert "a sparse gradient" in flce_ops.last_path().reason
    for ours, expected in zip(found, expected_gradients(case, inputs, chosen), strict=True):
        assert error(ours, expected) < 1e-9


@pytest.mark.parametrize("name", ["none, every number", "soft targets"])
def test_the_mean_of_many_draws_is_off_by_what_their_variance_predicts(name):
    draws, case = 24, CASES[name]()
    inputs = make_inputs(SHAPE, dtype=torch.float64)
    leaves = list(inputs.leaves.values())
    exact = torch.autograd.grad(case.ours(inputs), leaves)
    found = [torch.autograd.grad(case.ours(inputs, **sparse(2.0**-7, seed=seed)), leaves) for seed in range(draws)]
    of_input, of_weight = map(torch.stack, zip(*found))
    variance = of_input.var(0)
    # tokens with slope 0, or whose target has all of the probability, have no variance
    drawn = variance > 1e-6 * variance.max()
    z = (of_input.mean(0) - exact[0])[drawn] / (variance[drawn] / draws).sqrt()
    assert 0.5 < z.square().mean() < 2.0
    ratio = (of_weight.mean(0) - exact[1]).square().sum() / (of_weight.var(0).sum() / draws)
    assert 0.5 < ratio < 2.0
    assert error(found[0][1], exact[1]) > 2.0 * error(of_weight.mean(0), exact[1])


def test_metrics_do_not_change_with_it():
    inputs = make_inputs(SHAPE)
    names = ["entropy", "argmax", "log_sum_sq_probs"]

    def of(**options):
        loss, metrics = flce_ops.linear_cross_entropy(*inputs.args, return_metrics=names, **options)
        return *metrics.values(), *torch.autograd.grad(loss, list(inputs.leaves.values()))

    found, exact = of(**sparse()), of()
    for ours, expected in zip(found[:3], exact[:3], strict=True):
        assert torch.equal(ours, expected)
    loss = flce_ops.linear_cross_entropy(*inputs.args, **sparse())
    for ours, expected in zip(found[3:], torch.autograd.grad(loss, list(inputs.leaves.values())), strict=True):
        assert error(ours, expected) < 1e-6
