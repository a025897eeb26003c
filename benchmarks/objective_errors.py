"""python -m benchmarks.objective_errors: every objective's error against float64, of this package and of plain torch.

    python -m benchmarks.objective_errors                                      # -> results/GPU/objective_errors.csv
    torchrun --standalone --nproc-per-node 2 -m benchmarks.objective_errors    # its rows of a sharded vocabulary
    python -m benchmarks.tables                                                # docs/numerics.md, from the CSVs

The error of results and of both gradients is ||out - reference|| / ||reference||, on a problem of data.py. Plain torch
is the dense formula, eager, whose logits are rounded to the operands' dtype and then become float32. float16 has a loss
scale of 4096 (data.py). Several processes share the work, because most of the time is compilation. Each row goes into
the CSV as soon as it is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce_ops

from .command import command, place
from .data import Problem, make_problem
from .errors import poison
from .objective_formulas import Objective, Results, metrics_of_dense, metrics_of_ours, objectives_of
from .ranks import process_group
from .report import Environment, KeepingReport, say, table_of
from .run import one_compilation_per_shape
from .shapes import Shape, parse_shapes

# N tokens, D hidden, V vocabulary

SHAPES = {"cpu": "256x96x1009", "cuda": "2048x1024x32003"}
SEED = 0
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PATHS = {  # paths that run in one process, and their dtypes
    "eager": DTYPES,  # losses per token with their logits saved
    "checkpointed": (torch.bfloat16,),  # logits computed twice
    "compiled": (torch.bfloat16,),
}
SHARDED = "sharded"  # the vocabulary is sharded over all ranks, each of which has all tokens
Errors = tuple[float, float | None, float | None]  # errors of results, dX and dW
Task = tuple[int, str, torch.dtype]  # index of the objective (the last index means metrics); path; dtype
POISONED = 1 << 30  # bytes, in each process


@dataclass
class ErrorRow(Environment):
    N: int
    D: int
    V: int
    dtype: str
    objective: str
    path: str
    kernel: str  # triton or aten
    ranks: int
    err_value: float
    err_dx: float | None
    err_dw: float | None
    torch_value: float
    torch_dx: float | None
    torch_dw: float | None


def distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    found, truth = (torch.cat([part.detach().flatten().double() for part in parts]) for parts in (found, truth))
    return float((found - truth).norm() / truth.norm())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients_of(results: Results, problem: Problem, *leaves: Tensor) -> tuple[Tensor, ...]:
    """For a scalar, grad_output is the loss scale; for losses per token it has both signs."""
    total: Tensor | float = 0.0
    for result in results:
        above = problem.loss_scale
        if result.dim():
            above = problem.cotangent if result.dim() == 1 else problem.cotangent[:, None] / result.shape[1]
        total = total + (result * above).sum()
    return torch.autograd.grad(total, leaves)


def errors_in(step: Callable[..., Results], problem: Problem, x: Tensor, w: Tensor, truth: Results) -> Errors:
    poison(problem.input.device, POISONED)
    leaves = [leaf.detach().requires_grad_() for leaf in (x, w)]
    results = tuple(whole(result) for result in step(*leaves))
    found = [whole(gradient) for gradient in gradients_of(results, problem, *leaves)]
    values, *gradients = truth
    return distance(results, values), *(distance([f], [t]) for f, t in zip(found, gradients, strict=True))


def truth_of(objective: Objective, problem: Problem) -> tuple[Results, Tensor, Tensor]:
    x, w = (leaf.detach().double().requires_grad_() for leaf in (problem.input, problem.linear_weight))
    results = objective.dense(x @ w.T)
    return results, *gradients_of(results, problem, x, w)


def on_path(objective: Objective, path: str) -> Callable[..., Results]:
    if path == "checkpointed":
        return lambda x, w: checkpoint(objective.ours, x, w, use_reentrant=False)
    if path == "compiled":
        return torch.compile(objective.ours, fullgraph=True, dynamic=False)
    return objective.ours


def lines(task: Task, shape: Shape, device: torch.device, here: Environment) -> list[ErrorRow]:
    one_compilation_per_shape()
    number, path, dtype = task
    problem = make_problem(shape, dtype=dtype, device=device, seed=SEED)
    ranks = dist.get_world_size() if path == SHARDED else 1
    rows = []
    for name, kernel, ours, plain in errors_of(number, path, problem):
        of_shape = (*shape, str(dtype).removeprefix("torch."), name, path, kernel, ranks)
        rows.append(ErrorRow(here.gpu, here.torch, here.triton, here.commit, *of_shape, *ours, *plain))
    return rows


def errors_of(number: int, path: str, problem: Problem) -> Iterator[tuple[str, str, Errors, Errors]]:
    """Yields what is compared, the kernel, this package's errors and plain torch's. Yields nothing for what does not
    take this path.
    """
    x, w = problem.input, problem.linear_weight
    place = sharded if path == SHARDED else lambda *operands: operands
    objectives = list(objectives_of(problem, place))
    if number == len(objectives):
        yield from metric_errors(problem) if path == "eager" else ()
        return
    objective = objectives[number]
    if path == SHARDED and not objective.takes_shards:
        return
    truth = truth_of(objective, problem)
    ours = errors_in(on_path(objective, path), problem, *place(x, w), truth)
    kernel = flce_ops.last_path().implementation

    def dense(x: Tensor, w: Tensor) -> Results:
        return objective.dense((x @ w.T).float())

    yield objective.name, kernel, ours, errors_in(dense, problem, x, w, truth)


def metric_errors(problem: Problem) -> Iterator[tuple[str, str, Errors, Errors]]:
    x, w = problem.input.detach(), problem.linear_weight.detach()
    found = metrics_of_ours(x, w, problem)
    plain, exact = (metrics_of_dense(z, problem) for z in ((x @ w.T).float(), x.double() @ w.double().T))
    kernel, valid = flce_ops.last_path().implementation, problem.valid

    def error(values: dict[str, Tensor], name: str) -> Errors:
        return distance([values[name][valid].double()], [exact[name][valid]]), None, None

    for name in found:
        yield f"`{name}`", kernel, error(found, name), error(plain, name)


def sharded(input: Tensor, linear_weight: Tensor) -> tuple[Tensor, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(input.device.type, (dist.get_world_size(),))
    return distribute_tensor(input, mesh, [Replicate()]), distribute_tensor(linear_weight, mesh, [Shard(0)])


def measured(
    tasks: Sequence[Task], shape: Shape, device: torch.device, here: Environment, processes: int
) -> Iterator[list[ErrorRow]]:
    if not processes:
        yield from (lines(task, shape, device, here) for task in tasks)
        return
    # otherwise each process would start as many threads as there are cores
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(lines, task, shape, device, here) for task in tasks]):
            yield done.result()


def main(argv: Sequence[str] | None = None) -> Path:
    parser = command("objective_errors", __doc__)
    parser.add_argument("--shape", default=None, help="NxDxV")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 18))
    options = parser.parse_args(argv)
    if "LOCAL_RANK" in os.environ:
        with process_group(options.device == "cpu"):
            return run(options, {SHARDED: (torch.bfloat16,)}, dist.get_world_size())
    return run(options, PATHS, 1)


def run(options: argparse.Namespace, paths: dict[str, tuple[torch.dtype, ...]], ranks: int) -> Path:
    device, here = place(options)
    (shape,) = parse_shapes(options.shape or SHAPES[device.type])
    report = KeepingReport(options.out / here.slug / "objective_errors.csv", ranks=ranks)
    toy = make_problem(Shape(8, 8, 64), dtype=torch.float32, device=torch.device("cpu"), seed=SEED)
    count = 1 + len(list(objectives_of(toy, lambda *operands: operands)))
    tasks = [(number, path, dtype) for path, dtypes in paths.items() for dtype in dtypes for number in range(count)]
    columns = [(f"{who}_{what}", 11, ".1e") for what in ("value", "dx", "dw") for who in ("err", "torch")]
    for rows in measured(tasks, shape, device, here, 0 if ranks > 1 else options.processes):
        if ranks == 1 or dist.get_rank() == 0:
            report.add(rows)
            for row in rows:
                heading = f"{row.dtype} {row.path} {row.kernel}"
                say(table_of([row], columns, heading=heading, width=50, name_of=lambda row: row.objective))
    return report.path


if __name__ == "__main__":
    main()
