"""The objectives that `python -m benchmarks.objective_errors` compares, each as a call of this package and as a formula
on logits.

N tokens, D hidden, V vocabulary, K classes of a token. Results are (), (N,), or (N, K) for the classes of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops

from .data import Problem
from .kl_div import divergence, teacher_of
from .modes import CAP, KINDS, SMOOTHING
from .policy import BETA, HIGH, LOW, loss_of_log_probs, tokens_of
from .soft import targets_of

Results = tuple[Tensor, ...]  # differentiable


class Objective(NamedTuple):
    name: str
    ours: Callable[[Tensor, Tensor], Results]  # of input (N, D) and linear_weight (V, D)
    dense: Callable[[Tensor], Results]  # of logits (N, V), float32 or float64
    takes_shards: bool = True


class Teaching(NamedTuple):
    """A problem's teacher. Its tensors are DTensors if the problem's operands are."""

    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    probs: Tensor  # (N, V) float32, plain


def teaching_of(problem: Problem) -> Teaching:
    input, linear_weight = teacher_of(problem)
    return Teaching(input, linear_weight, (input @ linear_weight.T).float().softmax(-1))


def masked(numbers: Tensor, problem: Problem) -> Tensor:
    """The numbers, with 0 for ignored tokens."""
    valid = problem.valid
    return torch.where(valid if numbers.dim() == 1 else valid[:, None], numbers, 0)


def at_classes(log_p: Tensor, classes: Tensor) -> Tensor:  # (N, V), (N, K) -> (N, K)
    return log_p.gather(1, classes.clamp(min=0))


def of_class_indices(name: str, problem: Problem, reduction: str = "mean", **options: Any) -> Objective:
    def ours(x: Tensor, w: Tensor) -> Results:
        return (flce_ops.linear_cross_entropy(x, w, problem.target, reduction=reduction, **options),)

    def dense(z: Tensor) -> Results:
        cap = options.get("softcap")
        z = cap * (z / cap).tanh() if cap else z
        smoothing = options.get("label_smoothing", 0.0)
        return (F.cross_entropy(z, problem.target, reduction=reduction, label_smoothing=smoothing),)

    return Objective(name, ours, dense)


def of_soft_targets(problem: Problem) -> Objective:
    classes, weight = targets_of(problem)

    def ours(x: Tensor, w: Tensor) -> Results:
        return (flce_ops.linear_cross_entropy(x, w, classes, target_weight=weight),)

    def dense(z: Tensor) -> Results:
        losses = -(weight * at_classes(z.log_softmax(-1), classes)).sum(1)
        return (masked(losses, problem).sum() / problem.valid.sum(),)

    return Objective("64 soft targets", ours, dense)


def of_class_probabilities(problem: Problem, probs: Tensor) -> Objective:
    def ours(x: Tensor, w: Tensor) -> Results:
        return (flce_ops.linear_cross_entropy(x, w, probs),)

    def dense(z: Tensor) -> Results:
        return (F.cross_entropy(z, probs.to(z.dtype)),)

    return Objective("class probabilities", ours, dense, takes_shards=False)


def of_log_probs(problem: Problem) -> Objective:
    def ours(x: Tensor, w: Tensor) -> Results:
        found = flce_ops.linear_log_probs(x, w, problem.target, entropy=True)
        return found.log_probs, found.entropy

    def dense(z: Tensor) -> Results:
        log_p = z.log_softmax(-1)
        of_target = at_classes(log_p, problem.target[:, None])[:, 0]
        return masked(of_target, problem), masked(-(log_p.exp() * log_p).sum(-1), problem)

    return Objective("log-probabilities, entropies", ours, dense)


def of_classes(problem: Problem) -> Objective:
    classes, _ = targets_of(problem)

    def ours(x: Tensor, w: Tensor) -> Results:
        found = flce_ops.linear_log_probs(x, w, classes, tail=True)
        return found.log_probs, found.tail_log_prob

    def dense(z: Tensor) -> Results:
        log_p = z.log_softmax(-1)
        others = log_p.scatter(1, classes.clamp(min=0), float("-inf")).logsumexp(-1)
        return masked(at_classes(log_p, classes), problem), masked(others, problem)

    return Objective("log-probabilities of 64 classes and of the tail", ours, dense)


def of_policy(problem: Problem, objective: str) -> Objective:
    advantages, old, ref = tokens_of(problem)

    def ours(x: Tensor, w: Tensor) -> Results:
        options = {"objective": objective, "clip_low": LOW, "clip_high": HIGH, "beta": BETA}
        return (flce_ops.linear_policy_loss(x, w, problem.target, advantages, old, ref, **options).loss,)

    def dense(z: Tensor) -> Results:
        log_probs = at_classes(z.log_softmax(-1), problem.target[:, None])[:, 0]
        if objective == "ppo":
            return (loss_of_log_probs(log_probs, problem),)
        clipped, distance = torch.exp(log_probs - old).clamp(1 - LOW, 1 + HIGH).detach(), log_probs - ref
        losses = BETA * (torch.exp(-distance) + distance - 1) - clipped * advantages * log_probs
        return (masked(losses, problem).sum() / problem.valid.sum(),)

    return Objective(f"policy, {objective} and KL", ours, dense)


def of_divergence(kind: str, teaching: Teaching, *, given: bool) -> Objective:
    def ours(x: Tensor, w: Tensor) -> Results:
        if given:
            return (flce_ops.linear_kl_div(x, w, teacher_probs=teaching.probs, kind=kind),)
        return (flce_ops.linear_kl_div(x, w, teaching.input, teaching.linear_weight, kind=kind),)

    def dense(z: Tensor) -> Results:
        log_p = teaching.probs.to(z.dtype).log()
        if not given:  # rounded to the operands' dtype, except for the reference
            exact = torch.float64 if z.dtype == torch.float64 else teaching.input.dtype
            log_p = (teaching.input.to(exact) @ teaching.linear_weight.to(exact).T).to(z.dtype).log_softmax(-1)
        return (divergence(z.log_softmax(-1), log_p, kind) / z.shape[0],)

    return Objective(f"divergence, {kind}" + ", of probabilities" * given, ours, dense, takes_shards=not given)


def objectives_of(problem: Problem, place: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[Objective]:
    """The objectives of a problem. `place` turns a teacher's operands into what this package's calls take; formulas
    take plain tensors.
    """
    yield of_class_indices("class indices", problem)
    yield of_class_indices("label smoothing", problem, **SMOOTHING)
    yield of_class_indices("softcap", problem, **CAP)
    yield of_class_indices("label smoothing, softcap", problem, **SMOOTHING, **CAP)
    yield of_class_indices("losses per token", problem, reduction="none")
    yield of_soft_targets(problem)
    yield of_log_probs(problem)
    yield of_classes(problem)
    for objective in ("ppo", "cispo"):
        yield of_policy(problem, objective)
    teaching = teaching_of(problem)
    yield of_class_probabilities(problem, teaching.probs)
    for kind in KINDS:
        for given in (False, True):
            plain = of_divergence(kind, teaching, given=given)
            placed = of_divergence(kind, Teaching(*place(*teaching[:2]), teaching.probs), given=given)
            yield plain._replace(ours=placed.ours)


@torch.no_grad()
def metrics_of_dense(z: Tensor, problem: Problem) -> dict[str, Tensor]:
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    return {
        "lse": lse,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logit": z.mean(-1),
        "z_loss": 1e-4 * lse.square(),
        "is_top1": (z.argmax(-1) == problem.target).to(z.dtype),
    }


@torch.no_grad()
def metrics_of_ours(x: Tensor, w: Tensor, problem: Problem) -> dict[str, Tensor]:
    names = ("lse", "entropy", "log_sum_sq_probs", "mean_logit", "z_loss", "is_top1")
    _, found = flce_ops.linear_cross_entropy(x, w, problem.target, z_loss=1e-4, return_metrics=names)
    return {name: found[name] for name in names}
