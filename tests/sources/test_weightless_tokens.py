"""Tokens of weight 0 are left out as ignored ones are, but they count in the denominator of the mean."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from test_ignored_tokens import D, N, V, assert_same, products

import flce_ops


def weighted(share, **made):
    """Some tokens are ignored; a share of the others has weight 0."""
    inputs = make_inputs((N, D, V), dtype=torch.float64, bias=True, token_weight=True, ignored=0.2, **made)
    inputs.token_weight = inputs.token_weight.detach()
    inputs.token_weight[torch.randperm(N)[: round(share * N)]] = 0.0
    return inputs


def dense(inputs, reduction):
    logits = torch.nn.functional.linear(*inputs.args[:2], inputs.linear_bias)
    losses = torch.nn.functional.cross_entropy(logits, inputs.target, inputs.weight, reduction="none")
    losses = losses * inputs.token_weight
    if reduction == "none":
        return losses
    valid = inputs.target != -100
    counted = valid if inputs.weight is None else inputs.weight[inputs.target.clamp(min=0)] * valid
    return losses.sum() / (counted.sum() if reduction == "mean" else 1.0)


def weight_step(function, inputs, reduction):
    inputs = inputs.clone()
    value = function(inputs, reduction)
    value.sum().backward()
    return {"loss": value.detach(), **{name: leaf.grad for name, leaf in inputs.leaves.items()}}


def ours(inputs, reduction):
    return flce_ops.linear_cross_entropy(*inputs.args, **inputs.options, reduction=reduction)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tokens_of_weight_0_are_left_out_and_counted(reduction, weight, share):
    inputs = weighted(share, weight=weight)
    expected = weight_step(dense, inputs, reduction)
    inputs.input.data[(inputs.token_weight == 0) | (inputs.target == -100)] = torch.nan
    left = int(((inputs.token_weight != 0) & (inputs.target != -100)).sum())
    assert products(lambda: weight_step(ours, inputs, reduction)) == 3 * left
    compiled = torch.compile(flce_ops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for function in (ours, lambda i, r: compiled(*i.args, **i.options, reduction=r)):
        assert_same(weight_step(function, inputs, reduction), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_divergences_of_tokens_of_weight_0_are_left_out(reduction):
    inputs = weighted(0.5)
    teacher = (torch.randn(N, 5, dtype=torch.float64), torch.randn(V, 5, dtype=torch.float64))

    def ours(inputs, reduction):
        options = {"target": inputs.target, "token_weight": inputs.token_weight, "linear_bias": inputs.linear_bias}
        return flce_ops.linear_kl_div(*inputs.args[:2], *teacher, reduction=reduction, **options)

    expected = weight_step(ours, inputs, reduction)
    inputs.input.data[inputs.token_weight == 0] = torch.nan
    assert_same(weight_step(ours, inputs, reduction), expected)


def test_a_weight_that_wants_a_gradient_gets_that_of_weight_0_too():
    inputs = weighted(0.5)
    inputs.token_weight.requires_grad_()
    for reduction in ("mean", "none"):
        assert_same(weight_step(ours, inputs, reduction), weight_step(dense, inputs, reduction))
    tangent = torch.ones_like(inputs.token_weight)
    with torch.no_grad():
        _, change = torch.func.jvp(
            lambda weight: flce_ops.linear_cross_entropy(*inputs.args, token_weight=weight),
            (inputs.token_weight.detach(),),
            (tangent,),
        )
        expected = flce_ops.linear_cross_entropy(*inputs.args)
    torch.testing.assert_close(change, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_policys_log_probs_are_0_at_weight_0_whether_or_not_the_weight_wants_a_gradient(device, reduction):
    inputs = weighted(0.5, device=device)
    advantages = torch.randn(N, dtype=torch.float64, device=device)

    def log_probs(token_weight):
        return flce_ops.linear_policy_loss(
            *inputs.args[:3], advantages, linear_bias=inputs.linear_bias, token_weight=token_weight, reduction=reduction
        ).log_probs

    constant = log_probs(inputs.token_weight)
    learnt = log_probs(inputs.token_weight.clone().requires_grad_())
    left_out = (inputs.token_weight == 0.0) | (inputs.target == -100)
    assert torch.equal(constant == 0.0, left_out) and torch.equal(learnt == 0.0, left_out)
    torch.testing.assert_close(learnt, constant)
    with torch.no_grad():
        torch.testing.assert_close(log_probs(inputs.token_weight), constant)


def test_metrics_count_tokens_of_weight_0():
    inputs = weighted(0.5)
    _, with_zeros = flce_ops.linear_cross_entropy(*inputs.args, **inputs.options, return_metrics=True)
    _, without = flce_ops.linear_cross_entropy(*inputs.args, return_metrics=True)
    assert torch.equal(with_zeros.argmax, without.argmax)
    assert torch.equal(with_zeros.token_accuracy, without.token_accuracy)


def test_a_target_out_of_range_is_refused_at_weight_0_too():
    inputs = weighted(0.5)
    position = int(((inputs.token_weight == 0) & (inputs.target != -100)).nonzero()[0, 0])
    inputs.target[position] = V
    for reduction in ("mean", "none"):
        with pytest.raises(IndexError, match=f"got {V} at flat position {position}"):
            ours(inputs, reduction)
