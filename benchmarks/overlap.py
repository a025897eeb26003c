"""Whether GEMMs can hide communication: a vocabulary-parallel step of bare GEMMs, with its sum over ranks at several
places.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.overlap
    torchrun --standalone --nproc-per-node 2 -m benchmarks.overlap --toy            # gloo on a CPU: seconds

A step divides its tokens into as many chunks as the workspace requires. Each chunk has three GEMMs: logits, d weight
(added to that of earlier chunks) and d input. The variants (overlap.csv) differ in when d input is summed over ranks:

    no_sum            never: hiding the sum cannot be faster than this
    after             one all_reduce after the last GEMM, as in the operator
    beside_chunk      an all_reduce for each chunk, beside the next chunk's GEMMs; the last one runs alone
    beside_all        the same, with the last one beside the last chunk's d weight
    scatter_after     one reduce_scatter after the last GEMM, as in the operator under sequence parallelism
    scatter_beside    the same, beside the last chunk's d weight

D hidden, N tokens, V vocabulary, v of them on this rank, n rows of a chunk.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import flce_ops
from benchmarks.ranks import Clock, common_parser, process_group, setting_of
from benchmarks.report import Environment, KeepingReport, say
from benchmarks.shapes import Shape

TOY_CHUNKS = 2


@dataclass
class OverlapRow(Environment):
    ranks: int
    N: int
    D: int
    V: int
    dtype: str
    chunks: int
    variant: str
    ms: float
    spread: float  # (slowest - fastest round) / median
    x_after: float  # relative to the variant with the same sum after the last GEMM
    sum_ms: float  # time of that sum alone


class OverlapStep:
    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        N, D, V = shape
        own = -(-V // dist.get_world_size())
        self.input = torch.randn(N, D, device=device).to(dtype)
        self.weight = torch.randn(own, D, device=device).mul_(D**-0.5).to(dtype)
        self.logits = torch.empty(rows, own, dtype=dtype, device=device)
        self.grad_input = torch.empty_like(self.input)
        self.grad_weight = torch.empty_like(self.weight)
        self.own_grad_input = self.input.new_empty(N // dist.get_world_size(), D)
        self.chunks = [slice(first, min(first + rows, N)) for first in range(0, N, rows)]

    def variants(self) -> dict[str, Callable[[], object]]:
        return {
            "no_sum": lambda: self.run(),
            "after": lambda: self.all_reduce(self.run()).wait(),
            "beside_chunk": lambda: self.run(each=self.all_reduce),
            "beside_all": lambda: self.run(each=self.all_reduce, weight_last=True),
            "scatter_after": lambda: self.reduce_scatter(self.run()).wait(),
            "scatter_beside": lambda: self.run(whole=self.reduce_scatter, weight_last=True),
        }

    def all_reduce(self, part: Tensor) -> dist.Work:
        return dist.all_reduce(part, async_op=True)

    def reduce_scatter(self, whole: Tensor) -> dist.Work:
        return dist.reduce_scatter_tensor(self.own_grad_input, whole, async_op=True)

    def run(
        self,
        *,
        each: Callable[[Tensor], dist.Work] | None = None,
        whole: Callable[[Tensor], dist.Work] | None = None,
        weight_last: bool = False,
    ) -> Tensor:  # (N, D)
        """`each` gets the rows of each chunk when they are computed, `whole` all rows before the last GEMM."""
        under_way = []
        for rows in self.chunks:
            last = rows.stop == self.input.shape[0]
            logits = self.logits[: rows.stop - rows.start]  # (n, v)
            torch.mm(self.input[rows], self.weight.T, out=logits)
            if not (last and weight_last):
                self.add_grad_weight(logits, rows)
            torch.mm(logits, self.weight, out=self.grad_input[rows])
            if each is not None:
                under_way.append(each(self.grad_input[rows]))
            if last and whole is not None:
                under_way.append(whole(self.grad_input))
            if last and weight_last:
                self.add_grad_weight(logits, rows)
        for work in under_way:
            work.wait()
        return self.grad_input

    def add_grad_weight(self, logits: Tensor, rows: slice) -> None:
        beta = 0 if rows.start == 0 else 1
        torch.addmm(self.grad_weight, logits.T, self.input[rows], beta=beta, out=self.grad_weight)


def overlap_rows(shape: Shape, clock: Clock, dtype: torch.dtype, setting: dict, toy: bool) -> list[OverlapRow]:
    N, _, V = shape
    fitting = flce_ops.get_workspace() // (dtype.itemsize * -(-V // dist.get_world_size()))
    chunks = TOY_CHUNKS if toy else -(-N // min(N, fitting))
    step = OverlapStep(shape, -(-N // chunks), dtype, clock.device)
    alone = {
        "after": lambda: step.all_reduce(step.grad_input).wait(),
        "scatter_after": lambda: step.reduce_scatter(step.grad_input).wait(),
    }
    sums = clock.time(alone)
    timed = clock.time(step.variants())
    rows = []
    for variant, (ms, spread) in timed.items():
        reference = "scatter_after" if variant.startswith("scatter") else "after"
        of_sum = {"x_after": ms / timed[reference][0], "sum_ms": sums[reference][0]}
        rows.append(OverlapRow(**setting, chunks=chunks, variant=variant, ms=ms, spread=spread, **of_sum))
    return rows


def parser() -> argparse.ArgumentParser:
    return common_parser(__doc__, rounds=5, ms=300.0)


def main() -> None:
    options = parser().parse_args()
    with process_group(options.toy) as device:
        run(options, device)


def run(options: argparse.Namespace, device: torch.device) -> None:
    found, dtype, clock, out, shapes = setting_of(options, device)
    size = dist.get_world_size()
    for shape in shapes:
        setting = {**vars(found), "ranks": size, **shape._asdict(), "dtype": str(dtype).removeprefix("torch.")}
        rows = overlap_rows(shape, clock, dtype, setting, options.toy)
        if dist.get_rank() != 0:
            continue
        KeepingReport(out / "overlap.csv", ranks=size, **shape._asdict()).add(rows)
        say(f"\n{found.gpu}, {size} ranks, {shape} in {rows[0].chunks} chunks")
        for row in rows:
            say(
                f"{row.variant:16}{row.ms:10.3f} ms {row.x_after:8.4f} x after  spread {row.spread:.1%}"
                f"  the sum alone {row.sum_ms:.3f} ms"
            )


if __name__ == "__main__":
    main()
