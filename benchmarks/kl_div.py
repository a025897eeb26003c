"""python -m benchmarks.kl_div: a distillation step, forward + backward, over the four GEMMs that it cannot do without.

The floor is the bare products: logits of the teacher and of the student, both gradients of the student. Errors are of
the student's gradients, relative, against float64.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import flce_ops

from .cross_entropy import peak_of, reason_of, version_of
from .data import Problem, make_problem
from .memory import MIB
from .report import Environment, Report, environment, say
from .shapes import Shape, parse_shapes
from .timing import time_steps

# N tokens, D hidden, V vocabulary

SHAPES = "4096x2048x128256,4096x4096x151936"
KINDS = ("forward", "reverse", "jsd")
ROWS = 512  # of float64 logits at a time
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor]  # student, its weight, teacher, its weight, kind


@dataclass
class DivergenceRow(Environment):
    N: int
    D: int
    V: int
    dtype: str
    kind: str
    provider: str
    version: str
    ms: float | None = None
    floor_ms: float | None = None
    x_floor: float | None = None
    spread: float | None = None
    beyond_gradients_MiB: float | None = None
    err_dx: float | None = None
    err_dw: float | None = None
    reason: str = ""


def divergence(log_q: Tensor, log_p: Tensor, kind: str) -> Tensor:
    """Summed over rows; log_q the student's. `jsd` with weights of a half."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward":
        return (p * (log_p - log_q)).sum()
    if kind == "reverse":
        return (q * (log_q - log_p)).sum()
    log_m = (0.5 * p + 0.5 * q).log()
    return 0.5 * (p * (log_p - log_m)).sum() + 0.5 * (q * (log_q - log_m)).sum()


def dense(x: Tensor, w: Tensor, tx: Tensor, tw: Tensor, kind: str) -> Tensor:
    accumulate = torch.promote_types(x.dtype, torch.float32)
    log_q, log_p = ((a @ b.T).to(accumulate).log_softmax(-1) for a, b in ((x, w), (tx, tw)))
    return divergence(log_q, log_p, kind) / x.shape[0]


def liger(x: Tensor, w: Tensor, tx: Tensor, tw: Tensor, kind: str) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    beta = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[kind]
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
    target = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return loss(x, w, tx, tw, target)


# name: (distribution, the loss)
PROVIDERS: dict[str, tuple[str, Callable[[], Loss]]] = {
    "ours": ("flce_ops", lambda: lambda *operands: flce_ops.linear_kl_div(*operands[:4], kind=operands[4])),
    "torch_compile": ("torch", lambda: torch.compile(dense, dynamic=False)),
    "liger": ("liger_kernel", lambda: liger),
}


def step_of(loss: Loss, student: Problem, teacher: Problem, kind: str) -> Callable[[], Tensor]:
    def step() -> Tensor:
        student.clear_gradients()
        value = loss(student.input, student.linear_weight, teacher.input, teacher.linear_weight, kind)
        value.backward()
        return value.detach()

    return step


def floor_of(student: Problem, teacher: Problem) -> Callable[[], None]:
    """On the gradient of the logits that "forward" has: what the bits are decides how fast a card runs."""
    x, w, tx, tw = (t.detach() for p in (student, teacher) for t in (p.input, p.linear_weight))
    grad = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    for out, rows, of_teacher in zip(grad.split(ROWS), x.split(ROWS), tx.split(ROWS)):
        p, q = ((a @ b.T).float().softmax(-1) for a, b in ((of_teacher, tw), (rows, w)))
        out.copy_((q - p) / x.shape[0])

    def step() -> None:
        torch.mm(tx, tw.T)
        torch.mm(x, w.T)
        products = torch.mm(grad, w), torch.mm(grad.T, x)
        del products

    return step


def exact_gradients(student: Problem, teacher: Problem, kind: str) -> tuple[Tensor, Tensor]:
    w = student.linear_weight.detach().double().requires_grad_()
    tw = teacher.linear_weight.detach().double()
    grads = []
    for rows, of_teacher in zip(student.input.split(ROWS), teacher.input.split(ROWS)):
        x = rows.detach().double().requires_grad_()
        (dense(x, w, of_teacher.detach().double(), tw, kind) * (rows.shape[0] / student.shape.N)).backward()
        grads.append(x.grad)
    return torch.cat(grads), w.grad


def beyond_gradients(step: Callable[[], Tensor], student: Problem) -> float | None:
    student.clear_gradients()
    peak = peak_of(step, student.input.device)
    if peak is None:
        return None
    return peak - sum(leaf.grad.nbytes for leaf in (student.input, student.linear_weight)) / MIB


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def measure(shape: Shape, options: argparse.Namespace) -> list[DivergenceRow]:
    dtype, device, names = getattr(torch, options.dtype), torch.device(options.device), options.providers.split(",")
    student, teacher = (make_problem(shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    student.input.requires_grad_()
    student.linear_weight.requires_grad_()
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, options.dtype)
    steps: dict[str, Callable] = {"floor": floor_of(student, teacher)}
    rows: dict[str, DivergenceRow] = {}
    for kind in KINDS:
        dx, dw = exact_gradients(student, teacher, kind)
        for name in names:
            distribution, make = PROVIDERS[name]
            rows[f"{name} {kind}"] = row = DivergenceRow(*machine, kind, name, version_of(distribution))
            try:
                step = step_of(make(), student, teacher, kind)
                step()
                row.err_dx, row.err_dw = relative(student.input.grad, dx), relative(student.linear_weight.grad, dw)
                row.beyond_gradients_MiB = beyond_gradients(step, student)
                steps[f"{name} {kind}"] = step
            except Exception as failure:  # a provider's own
                row.reason = reason_of(failure)
        del dx, dw
    student.clear_gradients()

    def failed(name: str, failure: Exception) -> None:
        rows[name].reason = type(failure).__name__

    timings = time_steps(steps, device=device, rounds=options.rounds, ms=options.ms, on_failure=failed)
    floor = timings.pop("floor").ms
    for name, timing in timings.items():
        rows[name].ms, rows[name].spread = timing
        rows[name].floor_ms, rows[name].x_floor = floor, timing.ms / floor
    return list(rows.values())


def table(rows: Sequence[DivergenceRow]) -> str:
    form = partial("{:9}{:15}{:>9}{:>9}{:>7}{:>8}{:>10}{:>10}  {}".format)
    lines = [form("kind", "provider", "ms", "x floor", "+-", "MiB", "err dx", "err dw", "")]
    for row in sorted(rows, key=lambda row: (row.kind, row.ms is None, row.ms)):
        numbers = [(row.ms, ".2f"), (row.x_floor, ".3f"), (row.spread, ".1%"), (row.beyond_gradients_MiB, ".0f")]
        numbers += [(row.err_dx, ".1e"), (row.err_dw, ".1e")]
        cells = ["" if value is None else f"{value:{digits}}" for value, digits in numbers]
        lines.append(form(row.kind, row.provider, *cells, row.reason).rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.kl_div", description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="NxDxV, with commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=200, help="back-to-back time of a provider in a round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    report = Report(options.out / environment(torch.device(options.device)).slug / "kl_div.csv")
    for shape in parse_shapes(options.shapes):
        rows = measure(shape, options)
        report.add(rows)
        say(f"{shape} {options.dtype}, floor {next((row.floor_ms for row in rows if row.floor_ms), 0.0):.2f} ms")
        say(table(rows))


if __name__ == "__main__":
    main()
