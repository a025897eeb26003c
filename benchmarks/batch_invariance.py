"""python -m benchmarks.batch_invariance: how many numbers of a token change with the other tokens of its call.

A pool of tokens is computed in one call. Further calls compute some of these tokens and differ in what must not matter:
the number of tokens, their places, the workspace, the bytes of saved logits, whether gradients are wanted, which other
tokens are ignored, and the labels of the others. The benchmark counts numbers whose bits differ from those of the first
call.

Each shape, dtype and function has its own process, because most of the time is compilation.

    python -m benchmarks.batch_invariance                  # 10^7 tokens and more on a GPU -> batch_invariance.csv
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import flce_ops

from .command import command, place, report_of
from .modes import KINDS
from .report import Environment, say
from .shapes import Shape, parse_shapes

# N tokens, D hidden, V vocabulary, K classes of a token

IGNORED = -100
METRICS = ("entropy", "lse", "log_sum_sq_probs", "mean_logit", "argmax", "is_top1")
TOPK = 4
# the pool, the dtype, and the number of tokens of a large call
PROBLEMS = {
    "cuda": (
        ("4096x4096x128256", torch.bfloat16, 2),
        ("70000x64x512", torch.bfloat16, 48),
        ("70000x64x512", torch.float16, 48),
    )
}


class Pool(NamedTuple):
    """What is known of each token, and the heads."""

    input: Tensor  # (N, D)
    teacher_input: Tensor  # (N, D)
    target: Tensor  # (N,)
    topk: Tensor  # (N, K)
    advantages: Tensor  # (N,)
    old_log_probs: Tensor  # (N,)
    linear_weight: Tensor  # (V, D)
    teacher_weight: Tensor  # (V, D)

    def of(self, tokens: Tensor) -> Pool:
        return Pool(*(values[tokens] for values in self[:6]), *self[6:])

    def wanting_gradients(self) -> Pool:
        leaves = {name: getattr(self, name).detach().requires_grad_() for name in ("input", "linear_weight")}
        return self._replace(**leaves)


def draw_pool(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Pool:
    tokens, hidden, classes = shape
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def labels(*size: int) -> Tensor:
        return torch.randint(classes, size, generator=generator, device=device)

    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    return Pool(
        randn(tokens, hidden).to(dtype),
        randn(tokens, hidden).to(dtype),
        labels(tokens),
        labels(tokens, TOPK),
        randn(tokens).to(accumulate),
        (randn(tokens) - 6.0).to(accumulate),
        (3.0 * hidden**-0.5 * randn(classes, hidden)).to(dtype),
        (3.0 * hidden**-0.5 * randn(classes, hidden)).to(dtype),
    )


# ---------------------------------------------------------------- results of a token

Results = dict[str, Tensor]  # (N,) or (N, K) by name


def log_probs(pool: Pool) -> Results:
    found, metrics = flce_ops.linear_log_probs(
        pool.input, pool.linear_weight, pool.target, entropy=True, argmax=True,
        return_metrics=("log_sum_sq_probs", "mean_logit"),
    )  # fmt: skip
    of_rows = {name: getattr(found, name) for name in ("log_probs", "lse", "entropy", "argmax")}
    return of_rows | metrics


def log_probs_of_topk(pool: Pool) -> Results:
    found = flce_ops.linear_log_probs(pool.input, pool.linear_weight, pool.topk, tail=True)
    return {"log_probs of K classes": found.log_probs, "tail_log_prob": found.tail_log_prob}


def losses(pool: Pool) -> Results:
    found, metrics = flce_ops.linear_cross_entropy(
        pool.input, pool.linear_weight, pool.target, reduction="none", z_loss=1e-3, return_metrics=METRICS
    )
    return {"losses": found} | {f"{name} of losses": values for name, values in metrics.items()}


def metrics_of_a_mean(pool: Pool) -> Results:
    names = tuple(name for name in METRICS if name != "entropy")
    _, metrics = flce_ops.linear_cross_entropy(pool.input, pool.linear_weight, pool.target, return_metrics=names)
    return {f"{name} of a mean": values for name, values in metrics.items()}


def entropies_of_one_pass(pool: Pool) -> Results:
    """The one-pass kernels have other sums than a forward without gradients."""
    with torch.enable_grad():
        call = pool.wanting_gradients()
        _, metrics = flce_ops.linear_cross_entropy(call.input, call.linear_weight, call.target, return_metrics=METRICS)
    return {f"{name} of one pass": values for name, values in metrics.items()}


def policy_losses(pool: Pool) -> Results:
    call = (pool.input, pool.linear_weight, pool.target, pool.advantages, pool.old_log_probs)
    per_token = flce_ops.linear_policy_loss(*call, reduction="none")
    in_one_pass = flce_ops.linear_policy_loss(*call, reduction="sum")
    return {
        "policy losses": per_token.loss,
        "policy ratios": (per_token.log_probs - pool.old_log_probs).exp(),
        "log_probs of a policy's sum": in_one_pass.log_probs,
    }


def divergences(pool: Pool) -> Results:
    pairs = (pool.input, pool.linear_weight, pool.teacher_input, pool.teacher_weight)
    options = {"target": pool.target, "reduction": "none"}
    return {f"divergence, {kind}": flce_ops.linear_kl_div(*pairs, kind=kind, **options) for kind in KINDS}


def input_gradients(pool: Pool) -> Results:
    """On request: what the other tokens of a call leave as they are with batch_invariant=True alone."""
    found = {}

    def rows(name: str, function: Callable[..., Tensor]) -> None:
        input = pool.input.detach().requires_grad_()
        with torch.enable_grad():
            (found[f"grad_input of {name}"],) = torch.autograd.grad(function(input).sum(), input)

    y, w = pool.target, pool.linear_weight.detach().requires_grad_()
    option = {"batch_invariant": True}
    rows("a sum", lambda x: flce_ops.linear_cross_entropy(x, w, y, reduction="sum", **option))
    rows("losses", lambda x: flce_ops.linear_cross_entropy(x, w, y, reduction="none", **option))
    rows("log_probs", lambda x: flce_ops.linear_log_probs(x, w, y, **option).log_probs)
    policy = (y, pool.advantages, pool.old_log_probs)
    rows("a policy", lambda x: flce_ops.linear_policy_loss(x, w, *policy, reduction="sum", **option).loss)
    teacher = (pool.teacher_input, pool.teacher_weight)
    rows("a divergence", lambda x: flce_ops.linear_kl_div(x, w, *teacher, target=y, reduction="sum", **option))
    return found


ASKED = (log_probs, log_probs_of_topk, losses, metrics_of_a_mean, entropies_of_one_pass, policy_losses, divergences)


# ---------------------------------------------------------------- what must not matter


@dataclass
class Calling:
    """One way to compute the numbers of some tokens."""

    name: str
    tokens: Tensor  # indices into the pool, in the order of the call
    judged: Tensor | None = None  # places in the call whose numbers are compared; None: all
    target: Tensor | None = None  # targets of the call, if they differ from the pool's
    workspace: int | None = None
    retained: int | None = None
    gradients: bool = False

    def run(self, pool: Pool, asked: Callable[[Pool], Results]) -> Results:
        call = pool.of(self.tokens)
        if self.target is not None:
            ignored = (self.target == IGNORED)[:, None]
            call = call._replace(target=self.target, topk=call.topk.masked_fill(ignored, IGNORED))
        with contextlib.ExitStack() as stack:
            if self.workspace is not None or self.retained is not None:
                stack.enter_context(flce_ops.workspace(self.workspace, retained=self.retained))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            return asked(call.wanting_gradients() if self.gradients else call)


def callings(pool: Pool, large: int, seed: int) -> Iterator[Calling]:
    """Yields sizes of every residue modulo 16, first small ones, then `large` ones up to the whole pool; then the other
    ways.
    """
    device, most, classes = pool.input.device, pool.input.shape[0], pool.linear_weight.shape[0]
    draw, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)

    def some(count: int) -> Tensor:
        return torch.randperm(most, generator=generator, device=device)[:count]

    for count in (*range(1, 18), *(draw.randrange(2, min(400, most // 16)) * 16 + residue for residue in range(16))):
        yield Calling("N", some(min(count, most)))
    for k in range(large):
        residue = k % 16
        count = draw.randrange(most // 2, most - 15) // 16 * 16 + residue
        yield Calling("N", some(count))
        yield Calling("N, gradients", some(count), gradients=True)
    everything = torch.arange(most, device=device)
    yield Calling("the same again", everything)
    yield Calling("position", everything.flip(0))
    yield Calling("position", everything[5:])
    for gradients in (False, True):
        for nbytes, count in ((1 << 16, min(most, 700)), (3 << 20, most // 4), (64 << 20, most - 3)):
            yield Calling("workspace", some(count), workspace=nbytes, gradients=gradients)
    for retained in (0, most // 3 * classes * 2):
        yield Calling("retained", some(most - 7), retained=retained, gradients=True)
    for share in (0.02, 0.5, 0.99):
        tokens = some(most - 1)
        ignored = torch.rand(tokens.shape, generator=generator, device=device) < share
        ignored[0] = False
        target = pool.target[tokens].masked_fill(ignored, IGNORED)
        for gradients in (False, True):
            yield Calling("ignored share", tokens, (~ignored).nonzero()[:, 0], target, gradients=gradients)
    tokens, target = everything, pool.target.clone()
    target[1::2] = target[1::2].flip(0)
    yield Calling("labels elsewhere", tokens, tokens[::2], target)


class Found(NamedTuple):
    tokens: int  # over all calls
    values: int  # numbers that were compared
    differ: int


def bits(values: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.detach().view(kinds[values.element_size()]) if values.is_floating_point() else values


def walk(pool: Pool, ways: Iterator[Calling], asked: Sequence[Callable[[Pool], Results]] = ASKED) -> dict:
    """The findings, by (calling, name of the number)."""
    most = pool.input.shape[0]
    whole = Calling("", torch.arange(most, device=pool.input.device))
    first = {function: whole.run(pool, function) for function in asked}
    counts: dict[tuple[str, str], list[tuple[int, int, Tensor]]] = defaultdict(list)
    for way in ways:
        judged = way.tokens if way.judged is None else way.tokens[way.judged]
        for function in asked:
            for name, values in way.run(pool, function).items():
                values = values if way.judged is None else values[way.judged]
                differ = bits(values) != bits(first[function][name][judged])
                counts[way.name, name].append((judged.shape[0], differ.numel(), differ.sum()))
    return {
        key: Found(sum(c[0] for c in found), sum(c[1] for c in found), int(torch.stack([c[2] for c in found]).sum()))
        for key, found in counts.items()
    }


# ---------------------------------------------------------------- rows


@dataclass
class InvarianceRow(Environment):
    N: int  # tokens of the pool
    D: int
    V: int
    dtype: str
    calling: str  # in what the calls differ
    number: str
    tokens: int
    values: int
    differ: int


def rows_of(problem: int, function: int, device: torch.device, seed: int, here: Environment) -> list[InvarianceRow]:
    """Of one of PROBLEMS and one of ASKED."""
    text, dtype, large = PROBLEMS["cuda"][problem]
    (shape,) = parse_shapes(text)
    pool = draw_pool(shape, dtype, device, seed)
    found = walk(pool, callings(pool, large, seed), (ASKED[function],))
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, str(dtype).removeprefix("torch."))
    return [InvarianceRow(*machine, *names, *counts) for names, counts in found.items()]


def main(argv: Sequence[str] | None = None) -> Path:
    parser = command("batch_invariance", __doc__, processes=14, seed=0)
    options = parser.parse_args(argv)
    device, here = place(options)
    report = report_of("batch_invariance", options)
    tasks = itertools.product(range(len(PROBLEMS["cuda"])), range(len(ASKED)))
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(rows_of, *task, device, options.seed, here): task for task in tasks}
        for done in as_completed(pending):
            problem, function = pending[done]
            rows = done.result()
            report.add(rows)
            differ, values = sum(row.differ for row in rows), sum(row.values for row in rows)
            text, dtype, _ = PROBLEMS["cuda"][problem]
            say(f"{text} {dtype} {ASKED[function].__name__}: {differ:,} of {values:,} numbers differ")
            for row in rows:
                if row.differ:
                    say(f"        {row.calling}: {row.number}: {row.differ:,} of {row.values:,}")
    return report.path


if __name__ == "__main__":
    main()
