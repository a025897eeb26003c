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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from .client_steps import OWN, Client, transformers_client, trl_client
from .command import command, report_of
from .data import make_problem
from .memory import MIB, peak_bytes_cuda
from .report import Environment, environment, reason_of, say, table_of
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
        row.reason = row.reason or reason_of(error)


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
    columns = [
        (f"{what}_{column}", 15, form)
        for what in ("step", "head")
        for column, form in (("ms", ".2f"), ("spread", ".1%"), ("peak_MiB", ".0f"))
    ]
    columns += [(name, 10, ".1e") for name in ("err_loss", "err_dx", "err_dw")] + [("equal", 7, "")]
    return table_of(rows, columns, heading="provider", width=29, name_of=lambda row: row.provider)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("clients", __doc__, rounds=3, ms=200.0)
    parser.add_argument("--cases", default=",".join(CASES), help="client:loss or client:loss:dtype of the weights")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args(argv)
    device, report = torch.device(options.device), report_of("clients", options)
    start = time.perf_counter()
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
