"""Inputs that resemble a language model's instead of randn's, or those of a trained model, from a file.

N tokens, D hidden, V vocabulary. The logits are a Zipf prior over the vocabulary (log p_k = -log k) plus context noise.
Targets are drawn from the softmax, so the loss is its entropy: 4.2 at V = 32k, 5.4 at 256k.

The prior is shuffled over the token ids ("shuffled"), or ordered by them: tokenizers number tokens as they merge them,
frequent ones first, so whole tiles of rare tokens have gradients near 0. The prior may also be flat: with little noise,
the logits are then those of a model before training.

    input  = randn (N, D) + u                      every entry of u is 1/2
    weight = sigma / sqrt(D) randn (V, D) + log_prior (V, 1) u / |u|^2
    logits = input @ weight.T = sigma * noise + log_prior + (small)

A file of `python -m benchmarks.trained` holds input (N, D), linear_weight (V, D) and target (N,) from held-out text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import Shape

# deviation of the context noise: it lowers the entropy by about sigma^2 / 2 from the prior's 8 nats at V = 128k
SIGMA = 3.0
OFFSET = 0.5
IGNORED = 0.02  # share of the tokens
PRIORS = ("shuffled", "ordered", "flat")
TRAINED = "trained"  # in place of a prior: the operands come from a file
IGNORE_INDEX = -100
LOSS_SCALE = {torch.float16: 4096.0}  # multiplies the loss before backward, as GradScaler does
CHUNK_ELEMENTS = 2**27  # float32 logits held at a time: 512 MiB


class SoftTargets(NamedTuple):
    """(N, K) each: what the mode "soft64" uses instead of the target."""

    classes: Tensor  # int64
    weight: Tensor  # float32


class PolicyTokens(NamedTuple):
    """(N,) float32 each: what the mode "policy" knows of each token."""

    advantages: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor


class Teacher(NamedTuple):
    """What the modes "kl_..." use instead of the target: another head, of the student's sizes."""

    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)


@dataclass
class Problem:
    shape: Shape
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (N,) int64, IGNORE_INDEX if ignored
    cotangent: Tensor  # (N,) float32: the gradient of per-token losses; random, so that a wrong order shows
    seed: int
    soft: SoftTargets | None = None  # drawn when first needed: soft.py
    policy: PolicyTokens | None = None  # drawn when first needed: policy.py
    teacher: Teacher | None = None  # drawn when first needed: kl_div.py

    def clear_gradients(self) -> None:
        self.input.grad = None
        self.linear_weight.grad = None

    @property
    def entropy_cotangent(self) -> Tensor:  # (N,)
        """The gradient of entropies beside log-probabilities: a tenth as large, in another order."""
        return 0.1 * self.cotangent.flip(0)

    @property
    def loss_scale(self) -> float:
        return LOSS_SCALE.get(self.input.dtype, 1.0)

    @property
    def grad_output(self) -> Tensor | None:  # ()
        """The gradient of a scalar loss that backward gets: None for 1."""
        return None if self.loss_scale == 1.0 else torch.tensor(self.loss_scale, device=self.input.device)

    @property
    def valid(self) -> Tensor:  # (N,) bool
        return self.target != IGNORE_INDEX

    def row_chunks(self) -> Iterator[slice]:
        """Slices of tokens whose logits fit in CHUNK_ELEMENTS."""
        rows = max(1, CHUNK_ELEMENTS // self.shape.V)
        for start in range(0, self.shape.N, rows):
            yield slice(start, min(start + rows, self.shape.N))


def make_problem(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    ignored: float = IGNORED,
    prior: str = PRIORS[0],
    sigma: float = SIGMA,
) -> Problem:
    generator = torch.Generator(device=device).manual_seed(seed)
    options = {"device": device, "generator": generator}
    n, d, v = shape

    log_prior = -torch.arange(1, v + 1, device=device, dtype=torch.float32).log()
    if prior == "shuffled":
        log_prior = log_prior[torch.randperm(v, **options)]
    elif prior == "flat":
        log_prior = torch.zeros_like(log_prior)
    weight = torch.randn(v, d, **options).mul_(sigma * d**-0.5)
    weight.add_((log_prior - log_prior.mean())[:, None] / (OFFSET * d))
    weight = weight.to(dtype)
    input = torch.randn(n, d, **options).add_(OFFSET).to(dtype)

    target = torch.empty(n, dtype=torch.int64, device=device)
    cotangent = _random_cotangent(n, options) * LOSS_SCALE.get(dtype, 1.0)
    problem = Problem(shape, input, weight, target, cotangent, seed)
    for rows in problem.row_chunks():
        probabilities = (input[rows] @ weight.T).float().softmax(-1)
        # Gumbel's trick: the first of V exponential clocks with rates p_j is j with probability p_j.
        clocks = torch.empty_like(probabilities).exponential_(generator=generator)
        target[rows] = probabilities.div_(clocks).argmax(-1)
    _ignore(problem, ignored, options)
    return problem


def load_problem(
    path: Path, *, dtype: torch.dtype, device: torch.device, seed: int, ignored: float = IGNORED
) -> Problem:
    """Reads what benchmarks/trained.py wrote. The seed draws the cotangent and which tokens are ignored."""
    from safetensors import safe_open

    options = {"device": device, "generator": torch.Generator(device=device).manual_seed(seed)}
    with safe_open(path, framework="pt", device=str(device)) as file:
        input, weight, target = (file.get_tensor(name) for name in ("input", "linear_weight", "target"))
    shape = Shape(*input.shape, weight.shape[0])
    cotangent = _random_cotangent(shape.N, options) * LOSS_SCALE.get(dtype, 1.0)
    problem = Problem(shape, input.to(dtype), weight.to(dtype), target, cotangent, seed)
    _ignore(problem, ignored, options)
    return problem


def shape_of(path: Path) -> Shape:
    """The shape of the operands in the file, without loading them."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        (n, d), (v, _) = (file.get_slice(name).get_shape() for name in ("input", "linear_weight"))
    return Shape(n, d, v)


def first_tokens(problem: Problem, tokens: int) -> Problem:
    """The problem of the first tokens. Its input is another leaf, which wants a gradient if the problem's does."""
    input = problem.input.detach()[:tokens].requires_grad_(problem.input.requires_grad)
    vectors = {name: getattr(problem, name)[:tokens] for name in ("target", "cotangent")}
    return replace(problem, shape=problem.shape._replace(N=tokens), input=input, **vectors)


def _random_cotangent(tokens: int, options: dict) -> Tensor:  # (N,)
    return torch.rand(tokens, **options).add_(0.5).div_(tokens)


def _ignore(problem: Problem, share: float, options: dict) -> None:
    left_out = torch.rand(problem.shape.N, **options) < share
    left_out[0] = False  # the mean over no token would be nan
    problem.target[left_out] = IGNORE_INDEX


def is_usual(row: dict[str, str]) -> bool:
    """Whether a row of a CSV has the default data. A CSV without such columns has only default data."""
    return float(row.get("ignored") or IGNORED) == IGNORED and (row.get("prior") or PRIORS[0]) == PRIORS[0]
