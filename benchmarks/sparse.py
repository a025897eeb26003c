"""`python -m benchmarks.sparse`: a sparse gradient for different data: time, errors, and how many entries it keeps.

    python -m benchmarks.sparse                                      # 14 problems, two shapes
    python -m benchmarks.sparse --data trained:trained.safetensors   # first with a trained model's hidden states
    python -m benchmarks.sparse --shapes 8x8x300 --device cpu --providers 'ours*'

The context noise of data.py decides the loss, and so the number of entries. The three values stand for a model early in
training, a later one, and text that the model nearly knows. A flat prior stands for a model before training. The
results go to results/GPU/sparse.csv, which is complete after every problem.

N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import providers, run
from .__main__ import trained
from .command import command, place, report_of
from .data import PRIORS, TRAINED, shape_of
from .modes import MODES
from .report import Row, say
from .run import one_compilation_per_shape
from .shapes import Shape, parse_shapes

SHAPES = "8192x4096x128256,8192x1024x50304"
NOISE = (1.75, 6.0, 16.0)  # for losses of about 6.6, 2.0 and 0.5
FLAT = 1.0
PROVIDERS = "floor,ours,ours_sparse_*,ours_drop_12,torch_compile,cce,cce_kahan_full_c"
SAMPLE = 512  # tokens whose entries are counted


@dataclass
class SparseRow(Row):
    # mean number of entries that a token keeps, with independent draws, at 2^-10; and at 2^-12
    entries_10: float | None = None
    entries_12: float | None = None


@torch.no_grad()
def entries_kept(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (n,)
    threshold: float,
) -> float:
    """How many entries of a row of G = softmax - onehot an unbiased sparse gradient keeps: the mean over rows and draws
    of sum_j min(|G_ij| / threshold, 1). Holds all (n, V) logits at once.
    """
    gradient = (input @ linear_weight.T).float().softmax(1)
    gradient[torch.arange(len(target), device=target.device), target] -= 1.0
    return float((gradient.abs_() / threshold).clamp_(max=1.0).sum(1).mean())


def problems(options: argparse.Namespace) -> list[tuple[Shape, dict]]:
    """The shapes and the data's settings, the most common ones first, in case the time runs out."""
    found: list[tuple[Shape, dict]] = [(shape_of(path), {"trained": path, "prior": TRAINED}) for path in options.data]
    shapes = parse_shapes(options.shapes)
    for prior in (PRIORS[1], PRIORS[0]):
        found += [(shape, {"prior": prior, "sigma": sigma}) for sigma in NOISE for shape in shapes]
    flat = [(shape, {"prior": "flat", "sigma": FLAT}) for shape in shapes]
    return found[: len(options.data)] + flat + found[len(options.data) :]


def main(argv: Sequence[str] | None = None) -> Path:
    defaults = {"shapes": SHAPES, "providers": PROVIDERS, "rounds": 2, "ms": 150.0, "dtype": "bfloat16"}
    parser = command("sparse", __doc__, **defaults)
    parser.add_argument("--data", type=trained, action="append", default=[], help="trained:PATH, measured first")
    parser.add_argument("--budget-s", type=float, default=140)
    parser.add_argument("--seed", type=int, default=None, help="of the data; fresh when not given")
    options = parser.parse_args(argv)
    one_compilation_per_shape()
    (device, here), report, started = place(options), report_of("sparse", options), time.time()

    def spent() -> float:
        return time.time() - started

    for shape, data in problems(options):
        if spent() > options.budget_s:
            say(f"time budget spent, left out: {shape} {data}")
            continue
        seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        dtype = getattr(torch, options.dtype)
        settings = run.Settings(device, dtype, options.rounds, options.ms, seed, **data)
        say(f"\n{spent():.0f} s: {shape} {data['prior']}", end=", ")
        rows = run.measure(
            shape,
            MODES["fwd_bwd"],
            providers.choose(options.providers),
            settings,
            here,
            out_of_time=lambda: spent() > options.budget_s,
        )
        problem = run.problem_of(shape, settings)
        some = problem.valid.nonzero()[:SAMPLE, 0]
        sample = problem.input.detach()[some], problem.linear_weight.detach(), problem.target[some]
        entries = [entries_kept(*sample, 2.0**exponent) for exponent in (-10, -12)]
        say("entries a token: {:.0f} at 2^-10, {:.0f} at 2^-12".format(*entries))
        report.add([SparseRow(**row.__dict__, entries_10=entries[0], entries_12=entries[1]) for row in rows])
    say(f"\n{len(report.rows)} rows in {spent():.0f} s -> {report.path}")
    return report.path


if __name__ == "__main__":
    main()
