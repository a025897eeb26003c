"""Trainers' heads over the support that was sampled from: TRL's GRPO and verl's PPO, against dense float64 logits."""

# B sequences of T tokens, K ids of each, D hidden, V vocabulary

import pytest
import torch
from reference_loss import error
from reference_support import allowed, as_csr, draw

import flce_ops

B, T, D, V, K = 4, 11, 16, 127, 9
TEMPERATURE = 0.7


def sampled():
    """Hidden states (B, T, D), head, sampled tokens with a prompt that is ignored, and what top-p left of each."""
    inputs, ids = draw((B * T, D, V), K, dtype=torch.float64, ignored=0.0)
    tokens = inputs.target.view(B, T).clone()
    tokens[:, :3] = -100
    leaves = inputs.input.detach().view(B, T, D).requires_grad_(), inputs.linear_weight.detach().requires_grad_()
    ids = ids.view(B, T, -1)
    ids[:, :3] = -1
    return leaves, tokens, ids


def masked_logits(hidden, weight, ids, temperature=TEMPERATURE):
    """Logits of the sampler: divided by the temperature, a number or one of each token; -inf outside of the support."""
    temperature = torch.as_tensor(temperature, dtype=torch.float64)[..., None]
    return (hidden @ weight.T / temperature).masked_fill(~allowed(ids, V), -torch.inf)


def temperatures(of_tokens):  # (B, T), or a number
    return torch.linspace(0.5, 1.5, B * T, dtype=torch.float64).view(B, T) if of_tokens else TEMPERATURE


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves)


def assert_equal(ours, theirs):
    for mine, right in zip(ours, theirs, strict=True):
        assert error(mine, right) < 1e-11


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_log_probs_of_trls_grpo(ragged, of_tokens):
    """selective_log_softmax of the sampler's logits, and the loss of GRPOTrainer: token_weight 1 / length."""
    utils = pytest.importorskip("trl.trainer.utils")
    (hidden, weight), tokens, ids = sampled()
    completion = (tokens >= 0).double()
    advantages = torch.tensor([1.2, -0.3, -1.1, 0.2], dtype=torch.float64)[:, None].expand(B, T)
    temperature = temperatures(of_tokens)
    log_probs = utils.selective_log_softmax(masked_logits(hidden, weight, ids, temperature), tokens.clamp(min=0))
    old = (log_probs + 0.2 * torch.randn(B, T)).detach()
    ratio = (log_probs - old).exp()
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    per_token = torch.where(tokens >= 0, per_token, 0.0)
    loss = (per_token.sum(1) / completion.sum(1)).mean()
    support = as_csr(ids) if ragged else ids
    options = {"temperature": temperature, "support": support}
    found = flce_ops.linear_log_probs(hidden, weight, tokens, **options)
    assert error(found.log_probs, log_probs.where(tokens >= 0, 0.0)) < 1e-13
    weighed = completion / completion.sum(1, keepdim=True)
    call = hidden, weight, tokens, advantages, old
    ours = flce_ops.linear_policy_loss(*call, **options, token_weight=weighed, normalizer=B)
    assert (ours.loss - loss).abs() < 1e-13 * (per_token.abs().sum(1) / completion.sum(1)).mean()  # terms may cancel
    assert_equal(gradients(ours.loss, (hidden, weight)), gradients(loss, (hidden, weight)))


def test_the_ratio_of_an_unchanged_policy_is_1_with_the_samplers_set_alone():
    (hidden, weight), tokens, ids = sampled()
    engine = masked_logits(hidden, weight, ids).log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None]).squeeze(-1)
    ratios = []
    for support in (ids, None):
        options = {"temperature": TEMPERATURE, "support": support}
        found = flce_ops.linear_log_probs(hidden, weight, tokens, **options).log_probs
        ratios.append((found - engine)[tokens >= 0].exp())
    assert error(ratios[0], torch.ones_like(ratios[0])) < 1e-13
    assert ratios[1].median() < 0.98


@pytest.mark.parametrize("of_tokens", [False, True])
def test_head_of_verls_ppo(of_tokens):
    """FusedLinearForPPO returns log-probabilities and entropies of packed sequences, both with gradients."""
    (hidden, weight), tokens, ids = sampled()
    packed = tokens.flatten() >= 0  # without the prompt
    rows = hidden.reshape(B * T, D)[packed]
    target, support = tokens.flatten()[packed], as_csr(ids.flatten(0, 1)[packed])
    temperature = temperatures(of_tokens)
    if of_tokens:
        temperature = temperature.flatten()[packed][None]
    logits = masked_logits(rows[None], weight, ids.flatten(0, 1)[packed][None], temperature)[0]
    log_p = logits.log_softmax(-1)
    finite = log_p.masked_fill(log_p.isneginf(), 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    expected = log_p.gather(-1, target[:, None]).squeeze(-1), entropy
    found = flce_ops.linear_log_probs(
        rows[None], weight, target[None], temperature=temperature, entropy=True, support=support
    )
    assert_equal((found.log_probs[0], found.entropy[0]), expected)
    cotangents = torch.randn(2, len(target), dtype=torch.float64)
    losses = [(cotangents[0] * a + cotangents[1] * b).sum() for a, b in ((found.log_probs, found.entropy), expected)]
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for loss in losses)
    assert_equal(first, second)
