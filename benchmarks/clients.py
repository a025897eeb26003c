"""python -m benchmarks.clients: training steps of TRL and of Transformers, with their own heads and with this
package's.

client_steps.py has the clients, their models and their batch.

    step    what a user waits for: forward, backward, optimizer; peak_MiB beyond parameters and the optimizer's state
    head    the same call with the trunk's hidden states given: forward and backward of the head and the loss
            err_...: errors of the loss and of the gradients of hidden states and weight, relative to dense float32

A row is one loss and one provider. `own` is the client's default head: TRL's Triton kernels, Transformers' logits.
`flce_ops_retaining` keeps all logits for backward, RETAINED bytes at most. It differs from `flce_ops` only for losses
per token: those of all TRL trainers except SFT's nll. `equal` says that no error of the row is above TOLERANCE, nor
above SLACK times that of the client's own head.
"""

import argparse
import contextlib
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .client_steps import OWN, Client, transformers_client, trl_client
from .data import make_problem
from .memory import MIB, peak_bytes_cuda
from .report import Environment, Report, environment, say
from .shapes import Shape
from .timing import time_steps

# B sequences of T tokens, N = B T, D hidden, V vocabulary

TOLERANCE, SLACK = 2e-2, 1.25  # relative, for bfloat16 products
CASES = ("trl:SFT nll", "transformers:labels", "trl:DPO", "trl:GRPO", "trl:SFT nll:float32", "trl:SFT dft")


@dataclass
class ClientRow(Environment):
    client: str
    version: str
    transformers: str
    loss: str
    weights: str  # dtype of the weights; all compute in bfloat16, by autocast if the weights are float32
    B: int
    T: int
    D: int
    V: int
    layers: int
    provider: str
    step_ms: float | None = None
    step_spread: float | None = None
    step_peak_MiB: float | None = None
    head_ms: float | None = None
    head_spread: float | None = None
    head_peak_MiB: float | None = None
    err_loss: float | None = None
    err_dx: float | None = None
    err_dw: float | None = None
    tolerance: float = TOLERANCE
    equal: bool | None = None
    reason: str = ""


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def measure(case: str, options: argparse.Namespace, device: torch.device) -> list[ClientRow]:
    client_name, loss, *weights = case.split(":")
    dtype = getattr(torch, weights[0] if weights else "bfloat16")
    shape = Shape(options.sequences * options.tokens, options.hidden, options.vocabulary)
    problem = make_problem(shape, dtype=dtype, device=device, seed=0)
    # the token before a position predicts that position's label
    labels = problem.target.view(options.sequences, options.tokens).roll(1, 1)
    hidden = problem.input.view(options.sequences, options.tokens, -1)
    make = transformers_client if client_name == "transformers" else partial(trl_client, loss)
    client = make(options, dtype, labels)
    here = environment(device, options.commit)
    facts = (here.gpu, here.torch, here.triton, here.commit, client_name, version(client_name))
    size = (options.sequences, options.tokens, options.hidden, options.vocabulary, options.layers)
    rows = {
        name: ClientRow(*facts, version("transformers"), loss, str(dtype).split(".")[1], *size, name)
        for name in client.providers
    }
    # a reference model whose logits differ by a few hundredths
    operands = (hidden, (hidden.float() + 0.02 * torch.randn_like(hidden, dtype=torch.float32)).to(dtype))
    operands = (*operands, problem.linear_weight)
    with client.given(*(operand.float() for operand in operands)), client.dense():
        exact = client.gradients()
    with client.given(*operands):
        for name, row in rows.items():
            with working(row), client.providers[name]():
                row.err_loss, row.err_dx, row.err_dw = map(relative, client.gradients(), exact)
                own = rows[OWN]
                errors = zip((row.err_loss, row.err_dx, row.err_dw), (own.err_loss, own.err_dx, own.err_dw))
                row.equal = all(ours <= TOLERANCE and ours <= max(SLACK * theirs, 1e-5) for ours, theirs in errors)
        del exact
        time_and_peak(rows, client, client.head, "head", options, device)
    time_and_peak(rows, client, client.step, "step", options, device)
    return list(rows.values())


@contextlib.contextmanager
def working(row: ClientRow) -> Iterator[None]:
    """If a provider fails, its reason goes into the row."""
    try:
        yield
    except Exception as error:
        row.reason = row.reason or f"{type(error).__name__}: {error}".splitlines()[0][:120]


def time_and_peak(
    rows: dict[str, ClientRow],
    client: Client,
    step: Callable[[], Any],
    what: str,
    options: argparse.Namespace,
    device: torch.device,
) -> None:
    times: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name in list(rows)[:: 1 if number % 2 else -1]:
            row = rows[name]
            if row.reason:
                continue
            with working(row), client.providers[name]():
                step()
                if number == 0 and device.type == "cuda":
                    setattr(row, f"{what}_peak_MiB", peak_bytes_cuda(step) / MIB)

                def failed(_: str, failure: Exception) -> None:
                    raise failure

                timing = time_steps({name: step}, device=device, rounds=1, ms=options.ms, on_failure=failed)[name]
                times.setdefault(name, []).append(timing.ms)
    for name, found in times.items():
        middle = statistics.median(found)
        setattr(rows[name], f"{what}_ms", middle)
        setattr(rows[name], f"{what}_spread", (max(found) - min(found)) / middle)


def table(rows: Sequence[ClientRow]) -> str:
    lines = [
        f"{'provider':29}{'step ms':>10}{'+-':>7}{'MiB':>8}{'head ms':>10}{'+-':>7}{'MiB':>8}"
        f"{'err loss':>10}{'dX':>9}{'dW':>9}  equal to {TOLERANCE:g} and {SLACK:g} of own"
    ]
    for row in rows:
        cells = (
            *((row.step_ms, "10.2f"), (row.step_spread, "7.1%"), (row.step_peak_MiB, "8.0f")),
            *((row.head_ms, "10.2f"), (row.head_spread, "7.1%"), (row.head_peak_MiB, "8.0f")),
            *((row.err_loss, "10.1e"), (row.err_dx, "9.1e"), (row.err_dw, "9.1e")),
        )
        text = "".join(" " * int(re.match(r"\d+", form)[0]) if v is None else f"{v:{form}}" for v, form in cells)
        lines.append(f"{row.provider:29}{text}  {row.equal}  {row.reason}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="client:loss or client:loss:dtype of the weights")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=200, help="back-to-back time of a provider in a round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    start = time.perf_counter()
    report = Report(options.out / environment(device).slug / "clients.csv")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        for case in options.cases.split(","):
            rows = measure(case, options, device)
            report.add(rows)
            say(f"{case} {rows[0].weights}, after {time.perf_counter() - start:.0f} s\n{table(rows)}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
