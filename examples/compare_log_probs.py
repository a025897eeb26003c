"""Compares two sets of log-probabilities of the same tokens, a trainer's and an engine's: do they agree, and where do
they differ?

    python -m examples.compare_log_probs trainer.pt engine.pt     # from torch.save: (N,) or (B, T), nan for no token
    python -m examples.compare_log_probs                          # a toy head, whose engine rounds its logits

Positions are columns of (B, T). The pattern of the differences shows their cause:

    of one sign, the engine's larger        the engine renormalised over top-k or top-p, the trainer uses all classes
    proportional to the log-probability     another temperature
    growing along the sequence              not the head: attention or the cache, or a token with another id
    around 0 everywhere                     rounding: logits in bfloat16 are off by 1e-2, in float32 by 1e-5
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops

# B sequences, T tokens of each, D hidden, V vocabulary

PARTED = 1e-3  # nats: more than float32 logits differ by, less than bfloat16 logits do
RATIOS = (0.9, 1.1)  # of probabilities; a policy loss clips at wider bounds
SIGN = 0.9  # share of the differences of one sign that is no accident
GROWTH = 3.0  # of the mean difference, from the first to the last quarter
ROUNDING = 0.1  # nats


@dataclass
class Comparison:
    """Statistics of engine - trainer, in nats, over the tokens that both have."""

    tokens: int
    equal: float  # share of the tokens with identical bits
    mean: float  # mean absolute difference
    largest: float
    outside: float  # share of the tokens whose ratio of probabilities is outside of RATIOS
    above: float  # share of the nonzero differences that are positive
    slope: float  # regression of the engine's on the trainer's, through 0: the trainer's temperature over the engine's
    left: float  # mean absolute difference from that regression
    growth: float  # mean absolute difference of the last quarter of positions, relative to the first
    first: tuple[int, ...] | None  # index of the first token that differs by more than PARTED


def compare(trainer: Tensor, engine: Tensor) -> Comparison:
    """(N,) or (B, T) each."""
    if trainer.shape != engine.shape:
        raise ValueError(f"expected two tensors of one shape, got {tuple(trainer.shape)} and {tuple(engine.shape)}")
    ours, theirs = trainer.double(), engine.double()
    there = ours.isfinite() & theirs.isfinite()
    if not there.any():
        raise ValueError("no token has a finite log-probability in both")
    apart = torch.where(there, theirs - ours, 0.0)
    differences, x, y = apart[there], ours[there], theirs[there]
    size, moved = differences.abs(), differences[differences != 0.0]
    slope = ((x * y).sum() / (x * x).sum().clamp(min=1e-300)).item()
    ratios = differences.exp()
    parted = (apart.abs() > PARTED).nonzero()
    quarter = max(trainer.shape[-1] // 4, 1)
    ends = [apart[..., part][there[..., part]].abs() for part in (slice(quarter), slice(-quarter, None))]
    early, late = (end.mean().item() if end.numel() else 0.0 for end in ends)
    return Comparison(
        tokens=int(there.sum()),
        equal=(differences == 0.0).double().mean().item(),
        mean=size.mean().item(),
        largest=size.max().item(),
        outside=((ratios < RATIOS[0]) | (ratios > RATIOS[1])).double().mean().item(),
        above=(moved > 0.0).double().mean().item() if moved.numel() else 0.5,
        slope=slope,
        left=(y - slope * x).abs().mean().item(),
        growth=late / early if early else 1.0,
        first=tuple(parted[0].tolist()) if parted.numel() else None,
    )


def reading(found: Comparison) -> str:
    """The usual cause of such differences."""
    if found.largest == 0.0:
        return "the same bits"
    if found.largest <= PARTED:
        return "both have float32 logits of the same hidden states, or nearly the same"
    if found.left < 0.1 * found.mean:
        return f"another temperature: one is {found.slope:.4g} times the other"
    if found.above > SIGN:
        return "the engine's are larger: it renormalised over the classes that top-k or top-p left"
    if found.growth > GROWTH:
        return "the hidden states part along the sequence: attention, the cache, or other token ids"
    if found.largest < ROUNDING:
        return "rounding: one of the two has logits in bfloat16 or float16"
    return "more than a head's rounding: other weights, other token ids, or positions that are shifted by one"


def report(found: Comparison) -> str:
    first = "nowhere" if found.first is None else f"first at {', '.join(map(str, found.first))}"
    return "\n".join(
        (
            f"{found.tokens} tokens, {found.equal:.1%} with the same bits",
            f"difference in nats: mean {found.mean:.2e}, largest {found.largest:.2e}, above {PARTED:g} {first}",
            f"ratios outside of {RATIOS[0]} to {RATIOS[1]}: {found.outside:.2%} of the tokens",
            f"the engine's larger: {found.above:.1%} of what differs; last quarter over first: {found.growth:.2f}",
            reading(found),
        )
    )


def toy() -> tuple[Tensor, Tensor]:
    """(B, T) each: linear_log_probs on a float32 copy of bfloat16 operands, and a head that rounds its logits."""
    B, T, D, V = 4, 64, 256, 4000
    hidden, weight = torch.randn(B, T, D).bfloat16(), (0.25 * torch.randn(V, D)).bfloat16()
    tokens = torch.randint(V, (B, T))
    trainer = flce_ops.linear_log_probs(hidden.float(), weight.float(), tokens).log_probs
    engine = F.log_softmax(F.linear(hidden, weight).float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return trainer, engine


def main(argv: Sequence[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser("python -m examples.compare_log_probs", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="two files of torch.save: the trainer's, the engine's")
    options = parser.parse_args(argv)
    if len(options.files) not in (0, 2):
        parser.error("expected two files, or none for a toy head")
    trainer, engine = (torch.load(file, weights_only=True) for file in options.files) if options.files else toy()
    found = compare(trainer, engine)
    print(report(found))
    return found


if __name__ == "__main__":
    main()
