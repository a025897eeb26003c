"""GRPO on log-probabilities of the head, without its logits.

    python -m examples.grpo [--steps 20] [--temperature 1.0]

Each step samples a group of completions for each prompt, scores them, and takes a few clipped policy-gradient steps:

    advantage  A = (reward - mean of the group) / std of the group
    ratio      r = exp(log_prob - old_log_prob)
    KL (k3)    k = exp(ref_log_prob - log_prob) - (ref_log_prob - log_prob) - 1
    loss       mean over completion tokens of  -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta k

`flce_ops.linear_log_probs` computes the three log-probabilities, at the temperature of sampling. The toy reward is the
share of a completion's tokens that are in the first half of the vocabulary.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops
from examples.decoder import Decoder

# P prompts, G completions of each, B = P G, T tokens of prompt and completion, D hidden, V vocabulary

IGNORE = -100
VOCAB = 64


def log_probs_of(model: Decoder, tokens: Tensor, prompt: int, temperature: float) -> Tensor:  # (B, T) -> (B, T - 1)
    """log p(token t + 1 | tokens up to t) for the completion, 0 for the prompt."""
    target = tokens[:, 1:].clone()
    target[:, : prompt - 1] = IGNORE
    hidden = model(tokens[:, :-1])
    return flce_ops.linear_log_probs(
        hidden, model.token.weight, target, ignore_index=IGNORE, temperature=temperature
    ).log_probs


def grpo_loss(
    log_probs: Tensor,  # (B, T - 1)
    old_log_probs: Tensor,  # (B, T - 1)
    reference_log_probs: Tensor,  # (B, T - 1)
    advantages: Tensor,  # (B,)
    completion: Tensor,  # (B, T - 1), True for tokens of the completion
    *,
    epsilon: float = 0.2,
    beta: float = 0.02,
) -> Tensor:  # ()
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    advantage = advantages[:, None]
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    difference = reference_log_probs - log_probs
    penalty = torch.exp(difference) - difference - 1
    return ((policy + beta * penalty) * completion).sum() / completion.sum()


@torch.no_grad()
def sample(model: Decoder, prompts: Tensor, length: int, temperature: float) -> Tensor:  # (B, prompt) -> (B, T)
    tokens = prompts
    for _ in range(length):
        logits = F.linear(model(tokens)[:, -1], model.token.weight) / temperature  # logits of one position: (B, V)
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return tokens


def reward_of(completions: Tensor) -> Tensor:  # (B, completion) -> (B,)
    return (completions < VOCAB // 2).float().mean(dim=1)


def group_advantages(rewards: Tensor, group: int) -> Tensor:  # (B,) -> (B,)
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-4)).flatten()


def main(steps: int = 20, *, temperature: float = 1.0, group: int = 8, updates: int = 2) -> list[float]:
    """Returns the mean reward of every step."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompt, length = 4, 12
    policy = Decoder(VOCAB).to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    rewards = []
    for step in range(1, steps + 1):
        prompts = torch.randint(VOCAB, (4, prompt), device=device).repeat_interleave(group, dim=0)
        tokens = sample(policy, prompts, length, temperature)
        reward = reward_of(tokens[:, prompt:])
        advantages = group_advantages(reward, group)
        completion = torch.arange(1, tokens.shape[1], device=device).expand(len(tokens), -1) >= prompt
        with torch.no_grad():
            old = log_probs_of(policy, tokens, prompt, temperature)
            ref = log_probs_of(reference, tokens, prompt, temperature)
        for _ in range(updates):
            loss = grpo_loss(log_probs_of(policy, tokens, prompt, temperature), old, ref, advantages, completion)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rewards.append(reward.mean().item())
        if step % 5 == 0:
            print(f"step {step:3d}  reward {rewards[-1]:.3f}  loss {loss.item():+.4f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    main(options.steps, temperature=options.temperature)
