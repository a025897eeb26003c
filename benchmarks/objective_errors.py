"""python -m benchmarks.objective_errors: every objective's error against float64, ours beside plain torch's, one table.

    python -m benchmarks.objective_errors                                      # -> results/GPU/objective_errors.md
    torchrun --standalone --nproc-per-node 2 -m benchmarks.objective_errors    # and with the vocabulary sharded

Modes, data and float64 references are those of the other benchmarks, at a small shape: ||out - truth|| / ||truth||, the
mean over DRAWS problems. Plain torch is the dense formula, eager, its logits in the operands' dtype, then float32.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

import flce_ops

from . import providers
from .data import Problem, Teacher, make_problem
from .errors import Reference, errors_of, make_reference, poison
from .modes import KINDS, METRICS, MODES, Mode, prepare
from .objectives import Unit, compile_first
from .report import environment, say
from .run import one_compilation_per_shape
from .shapes import Shape, parse_shapes

# N tokens, D hidden, V vocabulary

SHAPES = {"cpu": "256x96x1009", "cuda": "2048x1024x32003"}
DRAWS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OBJECTIVES = {
    "fwd_bwd": "class indices",
    "smoothing": "label smoothing",
    "softcap": "softcap",
    "softcap_smoothing": "label smoothing, softcap",
    "soft64": "64 soft targets",
    "policy": "policy",
    "none": "losses per token",
    "log_probs": "log-probabilities, entropies",
    **{f"kl_{kind}": f"divergence, {kind}" for kind in KINDS},
}
# path: provider, dtypes. "sharded" is `ours` on DTensors
PATHS = {
    "eager": ("ours", DTYPES),
    "logits made twice": ("ours_recompute", (torch.bfloat16,)),
    "compiled": ("ours_compiled", (torch.bfloat16,)),
    "sharded": ("ours", (torch.bfloat16,)),
}
VALUES = tuple(name for name in METRICS if name not in ("token_accuracy", "is_top1", "argmax"))
Errors = tuple[float, ...]  # of loss, dX, dW


def local_rank() -> int | None:
    """None without torchrun."""
    rank = os.environ.get("LOCAL_RANK")
    return None if rank is None else int(rank)


# ---------------------------------------------------------------- a step's errors


def errors_in(provide: Callable[[], Callable], problem: Problem, reference: Reference, whole: Callable) -> Errors:
    step = provide()
    problem.clear_gradients()
    poison(problem.linear_weight.device)
    loss = whole(step())
    leaves = {name: getattr(problem, name) for name in ("input", "linear_weight")}
    found = SimpleNamespace(**{name: SimpleNamespace(grad=whole(leaf.grad)) for name, leaf in leaves.items()})
    problem.clear_gradients()
    return tuple(errors_of(loss, found, reference))


def sharded(problem: Problem) -> Problem:
    """The vocabulary over all ranks, each of which has all tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(problem.input.device.type, (dist.get_world_size(),))

    def placed(tensor: Tensor, placement: Shard | Replicate) -> Tensor:
        return distribute_tensor(tensor.detach(), mesh, [placement])

    teacher = problem.teacher
    if teacher is not None:
        teacher = Teacher(placed(teacher.input, Replicate()), placed(teacher.linear_weight, Shard(0)))
    return replace(
        problem,
        input=placed(problem.input, Replicate()),
        linear_weight=placed(problem.linear_weight, Shard(0)),
        cotangent=placed(problem.cotangent, Replicate()),
        teacher=teacher,
    )


def draws(path: str, dtype: torch.dtype, mode: Mode, shape: Shape, device: torch.device) -> tuple[Errors, Errors]:
    """Mean errors, ours and plain torch's."""
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(DRAWS):
        problem = make_problem(shape, dtype=dtype, device=device, seed=seed)
        prepare(problem, mode)
        reference = make_reference(problem, mode)  # which draws the teacher, and what a policy knows

        def whole(tensor: Tensor) -> Tensor:
            return tensor

        placed = problem
        if path == "sharded":
            placed = sharded(problem)
            prepare(placed, mode)

            def whole(tensor: Tensor) -> Tensor:
                return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

        for row, on, provider, as_whole in (
            (0, placed, PATHS[path][0], whole),
            (1, problem, "torch_eager", lambda tensor: tensor),
        ):
            sums[row] += torch.tensor(
                errors_in(lambda on=on, p=provider: providers.provide(p, on, mode), on, reference, as_whole)
            )
    mine, plain = (sums / DRAWS).tolist()
    return tuple(mine), tuple(plain)


# ---------------------------------------------------------------- by-products


@torch.no_grad()
def metric_values(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """By plain torch, of logits in the operands' dtype or in float64."""
    x, weight = problem.input, problem.linear_weight
    z = x.double() @ weight.double().T if dtype == torch.float64 else (x @ weight.T).float()
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    return {
        "lse": lse,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logit": z.mean(-1),
        "z_loss": 1e-4 * lse.square(),
    }


def metric_lines(shape: Shape, device: torch.device) -> Iterator[tuple[str, ...]]:
    for dtype in DTYPES:
        problem = make_problem(shape, dtype=dtype, device=device, seed=0)
        operands = (problem.input, problem.linear_weight, problem.target)
        found = flce_ops.linear_cross_entropy(*operands, z_loss=1e-4, return_metrics=VALUES)[1]
        plain, exact = (metric_values(problem, d) for d in (dtype, torch.float64))
        for name in VALUES:
            truth = exact[name][problem.kept]
            errors = [float((v[name][problem.kept].double() - truth).norm() / truth.norm()) for v in (found, plain)]
            yield name_of(dtype), f"`{name}`", "eager", cell(*errors), "", ""


# ---------------------------------------------------------------- the table


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cell(mine: float, plain: float) -> str:
    return f"{mine:.1e} / {plain:.1e}"


def paths() -> list[str]:
    return [path for path in PATHS if path != "sharded" or dist.is_initialized()]


def lines(shape: Shape, device: torch.device) -> Iterator[tuple[str, ...]]:
    for name, title in OBJECTIVES.items():
        for path in paths():
            for dtype in PATHS[path][1]:
                try:
                    mine, plain = draws(path, dtype, MODES[name], shape, device)
                except providers.Unavailable:
                    continue
                yield name_of(dtype), title, path, *map(cell, mine, plain)


def compile_all(shape: Shape, device: torch.device, options: argparse.Namespace) -> None:
    made = [
        Unit(dtype, MODES[name], provider)
        for name in OBJECTIVES
        for path, (provider, dtypes) in PATHS.items()
        for dtype in dtypes
        if path != "sharded"
    ]
    compile_first([shape], made, device, options)


def main(argv: Sequence[str] | None = None) -> Path | None:
    parser = argparse.ArgumentParser("python -m benchmarks.objective_errors", description=__doc__)
    parser.add_argument("--shape", default=None, help="NxDxV")
    parser.add_argument("--processes", type=int, default=10, help="that compile at a time beforehand")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)  # what they compile for
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    rank, device = local_rank(), torch.device(options.device)
    one_compilation_per_shape()
    (shape,) = parse_shapes(options.shape or SHAPES[device.type])
    if options.processes and not rank:
        compile_all(shape, device, options)
    if rank is not None:
        if device.type == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    here = environment(device, options.commit)
    table = ["| dtype | objective | path | loss or value | dX | dW |", "|---|---|---|---|---|---|"]
    for line in (*lines(shape, device), *metric_lines(shape, device)):
        table.append(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |"))
        if not rank:
            say(table[-1])
    ranks = f", {dist.get_world_size()} ranks where it is sharded" if dist.is_initialized() else ""
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank:
        return None
    head = (
        f"Errors against float64, ours / plain torch, {shape}, on {here.gpu}, torch {here.torch}{ranks}\n"
        f"(`python -m benchmarks.objective_errors`, commit {here.commit}). float16 with a loss scale of 4096.\n"
    )
    path = options.out / here.slug / "objective_errors.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join((head, *table)) + "\n")
    say(f"-> {path}")
    return path


if __name__ == "__main__":
    main()
