"""What must hold exactly: a call's constant results, and the places where results are not finite."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fuzz.problem import Problem, Tensors, scored_target, valid_tokens
from tests.fuzz.run import DIFFERENTIABLE


@dataclass(frozen=True)
class Failure:
    what: str  # the result's name, or "raises"
    how: str
    ratio: float = math.inf  # error divided by the allowed error


def check_constants(problem: Problem, found: Tensors, plain: Tensors, truth: Tensors) -> Iterator[Failure]:
    case = problem.case
    labels = problem.views["target"](problem.bases["target"]).cpu()
    target, ignored = scored_target(case, labels), ~valid_tokens(case, labels)
    if "logits" in truth and "argmax" in found:
        z, largest = truth["logits"], found["argmax"]
        if largest.numel():
            none = ignored.reshape(largest.shape)
            if (largest[none] != -1).any():
                yield Failure("argmax", "a class where ignored")
                return
            if (largest[~none] < 0).any() or largest.max() >= case.V:
                yield Failure("argmax", "no class")
                return
            gap = z.amax(-1) - z.gather(-1, largest.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            gap = torch.where(plain["logits"].isfinite().all(-1) & ~none, gap, 0.0)
            rounding = (plain["logits"].double() - z).nan_to_num(0.0).abs().max() + 1e-6 * z.nan_to_num(0.0).abs().max()
            if gap.nan_to_num(0.0).max() > 2.0 * rounding:
                yield Failure("argmax", "not the largest", float(gap.nan_to_num(0.0).max() / (2.0 * rounding)))
    if "is_top1" in found and "argmax" in found and not torch.equal(found["is_top1"], right_of(found, target, ignored)):
        yield Failure("is_top1", "not the argmax's")
    if "token_accuracy" in found and "argmax" in found:
        counted = torch.stack([right_of(found, target, ignored), ~ignored]).double()
        right, valid = counted.unsqueeze(-1).flatten(2 if case.mode == "vmap" else 1).sum(-1)
        share = right / valid
        if not torch.allclose(found["token_accuracy"].double(), share, rtol=1e-6, equal_nan=True):
            yield Failure("token_accuracy", "not the argmax's")
    name = "grad of input"
    if name in found and not case.relations and not problem.is_view("input"):
        if truth[name].isfinite().all() and found[name][ignored].any():
            yield Failure(name, "not zero where ignored")


def right_of(found: Tensors, target: Tensor, ignored: Tensor) -> Tensor:
    return (found["argmax"] == target) & ~ignored


def pattern(problem: Problem, name: str, found: Tensor, plain: Tensor, truth: Tensor) -> str:
    """Describes wrong places of nan and inf; "" if all are right."""
    finite = truth.isfinite() & plain.isfinite()
    size = truth.abs()
    # a sum over chunks, or of tensors in the dtype, whose entries may cancel
    if " of " in name and name != "grad of input" and size.numel():
        size = size.nan_to_num(math.inf).max()
    finite &= size < torch.finfo(found.dtype).max / 4  # near overflow both results are right
    odd = ~truth.isfinite()
    # on a CPU, torch's own bfloat16 product spreads a row of nan to the row before it
    spread = problem.torch_device == "cpu" and problem.arithmetic_dtype() == torch.bfloat16 and odd.any()
    if not (spread or found[finite].isfinite().all()):
        return "not finite"
    if not odd.any():
        return ""
    if problem.case.normalizer == "zero":  # the sum of sure tokens' losses may be 0 or a rounding, divided by 0
        found = torch.where(found.isinf() & truth.isnan(), math.nan, found)
    if name in DIFFERENTIABLE:
        same = [
            torch.equal(found[odd].double().nan_to_num(7.0), other[odd].double().nan_to_num(7.0))
            for other in (truth, plain)
        ]
        return "" if any(same) else f"{kinds(found[odd])} for {kinds(truth[odd])}"
    # Whether a sum of nan and infinities is nan or infinite depends on its order. And an exponential that float64 can
    # represent may be 0 in the dtype; then it is 0 in plain torch, too. Documented: the Triton kernels return 0 for
    # what is below the threshold, whatever the token's factor is.
    case = problem.case
    dropped = case.sparse and problem.device != "cpu" and (case.class_weight or case.normalizer == "zero")
    if not dropped and found[odd & ~plain.isfinite()].isfinite().any():
        return f"finite for {kinds(truth[odd])}"
    return ""


def kinds(tensor: Tensor) -> str:
    found = {"nan": tensor.isnan(), "inf": tensor == math.inf, "-inf": tensor == -math.inf, "finite": tensor.isfinite()}
    return "/".join(name for name, mask in found.items() if mask.any())
