"""Trains a small GPT on real text twice, side by side: with the operator as its head, and with F.cross_entropy.

    python -m examples.train_gpt [--steps 120] [--device cpu|cuda] [--out demo_output]

Both models start from the same weights and see the same batches. Each is compiled as one graph, from tokens to loss.
The exit code is 1 unless the captured graph contains the operator and the two loss curves agree.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import flce_ops
from examples import report
from examples.batches import Batches
from examples.captured_graph import RecordingBackend, inductor_or_without
from examples.gpt import GPT, HeadLoss, operator_head, plain_head
from examples.peak_memory import temporary_mib
from examples.text import byte_pair_encode, python_reference

# B sequences of T tokens a step, D hidden, V vocabulary

OPERATOR = "torch.ops.flce.linear_cross_entropy"
HEADS: dict[str, HeadLoss] = {"flce_ops.linear_cross_entropy": operator_head, "F.cross_entropy(F.linear)": plain_head}


@dataclass(frozen=True)
class Setting:
    vocab_size: int
    dim: int
    depth: int
    heads: int
    context: int
    batch: int
    steps: int
    workspace: int  # bytes of temporary memory that the operator may use
    tolerance: float  # largest allowed difference between the two losses at any step
    autocast: torch.dtype | None = None  # None: float32
    learning_rate: float = 1e-3


# (B T) x V = 1024 x 8192: logits of 32 MiB, beside 8 MiB of linear_weight
CPU = Setting(8192, 256, 4, 4, context=128, batch=8, steps=120, workspace=8 << 20, tolerance=1e-3)
# 16384 x 8192: logits of 256 MiB in bfloat16. The plain head rounds its logits, so over hundreds of steps the runs
# diverge.
CUDA = Setting(
    8192, 512, 6, 8, context=256, batch=64, steps=300, workspace=64 << 20, tolerance=3e-2, autocast=torch.bfloat16
)


class Run:
    """One model, its optimizer, and its measurements."""

    def __init__(self, head: HeadLoss, setting: Setting, vocab_size: int, device: torch.device, backend: str) -> None:
        torch.manual_seed(0)
        self.setting, self.device = setting, device
        self.model = GPT(vocab_size, setting.dim, setting.depth, setting.heads, setting.context, head).to(device)
        self.backend = RecordingBackend(backend)
        self.compiled = torch.compile(self.model, fullgraph=True, backend=self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.learning_rate, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, target: Tensor) -> None:
        started = time.perf_counter()
        with autocast(self.device, self.setting.autocast):
            loss = self.compiled(tokens, target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - started)

    def tokens_per_second(self) -> float:
        """The speed of the median step. The first fifth is left out, because it compiles and warms up."""
        seconds = statistics.median(self.seconds[len(self.seconds) // 5 :])
        return self.setting.batch * self.setting.context / seconds


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def head_memory(head: HeadLoss, setting: Setting, vocab_size: int, device: torch.device, backend: str) -> float:
    """Temporary memory of the compiled head alone at the training shape, forward and backward, in MiB."""
    hidden = torch.randn(setting.batch, setting.context, setting.dim, device=device, requires_grad=True)
    linear_weight = torch.randn(vocab_size, setting.dim, device=device).mul_(0.02).requires_grad_()
    target = torch.randint(vocab_size, (setting.batch, setting.context), device=device)
    compiled = torch.compile(head, fullgraph=True, backend=backend)

    def forward_backward() -> tuple[Tensor, ...]:
        with autocast(device, setting.autocast):
            loss = compiled(hidden, linear_weight, target)
        return torch.autograd.grad(loss, (hidden, linear_weight))

    forward_backward()  # compiles
    return temporary_mib(forward_backward, device)


class Demo:
    """Both runs over the same batches, with occasional lines of progress."""

    def __init__(self, setting: Setting, device: torch.device, backend: str, heads: dict[str, HeadLoss]) -> None:
        self.started = time.perf_counter()
        self.setting, self.device, self.backend, self.heads = setting, device, backend, heads
        text = python_reference()
        ids, pieces = byte_pair_encode(text, setting.vocab_size)
        self.vocab_size = len(pieces)
        self.batches = Batches(ids, setting.batch, setting.context, device)
        self.runs = {name: Run(head, setting, self.vocab_size, device, backend) for name, head in heads.items()}
        self.say(f"text: the Python reference, {len(text):,} characters, {len(ids):,} tokens of {len(pieces):,} kinds")

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.1f} s] {line}", flush=True)

    def train(self) -> None:
        setting = self.setting
        shape = f"{setting.batch * setting.context} tokens, D = {setting.dim}, V = {self.vocab_size}"
        dtype = setting.autocast or torch.float32
        self.say(f"{setting.steps} steps of {shape}, {dtype} on {self.device}; compiling with {self.backend}")
        for step in range(1, setting.steps + 1):
            batch = self.batches.next()
            for name, run in self.runs.items():
                run.step(*batch)
                if step == 1:
                    self.say(f"{name}: compiled, and ran its first step, in {run.seconds[0]:.1f} s")
            if step % max(1, setting.steps // 10) == 0:
                first, second = (run.losses[-1] for run in self.runs.values())
                self.say(f"step {step:4d}  loss {first:.4f} and {second:.4f}, {abs(first - second):.1e} apart")

    def write(self, out: Path) -> None:
        self.say("measuring the memory of the two heads")
        per_head = [
            {
                "head": name,
                "tokens_per_s": run.tokens_per_second(),
                "temporary_MiB": head_memory(
                    self.heads[name], self.setting, self.vocab_size, self.device, self.backend
                ),
            }
            for name, run in self.runs.items()
        ]
        by_step = zip(*(run.losses for run in self.runs.values()), strict=True)
        losses = [{"step": step, **dict(zip(self.runs, pair, strict=True))} for step, pair in enumerate(by_step, 1)]
        report.write_csv(out / report.HEADS_CSV, per_head)
        report.write_csv(out / report.LOSS_CSV, losses)
        plot = report.plot(out) or f"{out} (no plot without matplotlib)"
        self.say(f"wrote {plot}, {report.LOSS_CSV} and {report.HEADS_CSV} beside it\n")

    def problems(self) -> list[str]:
        found = []
        with_operator, plain = self.runs.values()
        graphs = with_operator.backend.graphs
        if len(graphs) != 1 or OPERATOR.removeprefix("torch.ops.") not in graphs[0]:
            found.append(f"expected one graph with {OPERATOR}, captured {graphs}")
        worst = max(abs(a - b) for a, b in zip(with_operator.losses, plain.losses, strict=True))
        if not worst <= self.setting.tolerance:  # written so that nan fails, too
            found.append(f"the loss curves are {worst:.1e} apart, more than {self.setting.tolerance:.0e}")
        return found


def main(
    setting: Setting, device: torch.device, out: Path, *, backend: str, heads: dict[str, HeadLoss] | None = None
) -> int:
    """Runs the demo. Returns the exit code."""
    with flce_ops.workspace(setting.workspace):
        demo = Demo(setting, device, backend, heads or HEADS)
        demo.train()
        path = flce_ops.last_path()
        demo.write(out)
    print(report.table(out))
    print(f"\nthe operator's last call: {path}")
    found = demo.problems()
    for problem in found:
        print(f"FAILED: {problem}", file=sys.stderr)
    if not found:
        print(f"OK: one graph with {OPERATOR}; the losses agree within {setting.tolerance:.0e} at every step")
    return 1 if found else 0


def command_line() -> tuple[Setting, torch.device, Path]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help=f"training steps (default: {CPU.steps}, on CUDA {CUDA.steps})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder for the plot and the CSV files")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    setting = CUDA if device.type == "cuda" else CPU
    if arguments.steps is not None:
        if arguments.steps < 1:
            parser.error(f"--steps: expected 1 or more, got {arguments.steps}")
        setting = replace(setting, steps=arguments.steps)
    return setting, device, arguments.out


if __name__ == "__main__":
    setting, device, out = command_line()
    sys.exit(main(setting, device, out, backend=inductor_or_without(device)))
