"""`python -m benchmarks.training --out DIR`: trains a small GPT with exact and with sparse gradients of its head.

    python -m benchmarks.training --gpus 3 --compile --text FOLDER FILE       # 21 runs of 1,600 steps: eight minutes
    python -m benchmarks.training --compile --settings exact,unbiased_10 --seeds 0

training.csv            a run: its losses on held-out text, of all tokens and of rare ones, and the time of a step
training_curves.csv     a point of a run every 20 steps: the training loss. Some points have held-out losses, and how
                        many entries of a row of softmax - onehot an unbiased gradient would keep at 2^-8, 2^-10, 2^-12
training_counts.csv     held-out losses of a run by how often the class occurs in the training text

The text is encoded once. Then each GPU takes one run after the other, with all settings of a seed before the next seed.
Each run is a separate process; one that dies becomes a row with a reason. The CSVs are written after every run. When
--budget-s is over, running processes are ended and the remaining runs are left out, both with their reason. The same
command with --resume continues with these.

B sequences of T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .corpus import tokens_of
from .report import Environment, Report, environment, say
from .trained import size_of
from .training_run import SETTINGS, Run, run

LAST_S = 10  # seconds reserved for the held-out losses at the end of a run


@dataclass
class RunRow(Environment):
    setting: str
    seed: int
    D: int
    V: int
    layers: int
    step_tokens: int
    parameters: int | None = None
    steps: int | None = None
    step_ms: float | None = None  # median, of the whole model's step
    loss: float | None = None  # mean over the batches of the last steps
    held_out_loss: float | None = None
    rare_loss: float | None = None  # for the classes that hold the rarest tenth of the training tokens
    rarest_loss: float | None = None  # for the rarest hundredth
    reason: str = ""  # why a number is missing


@dataclass
class CurveRow(Environment):
    setting: str
    seed: int
    step: int
    loss: float | None = None  # mean since the last point
    held_out_loss: float | None = None
    rare_loss: float | None = None
    rarest_loss: float | None = None
    entries_8: float | None = None  # entries of a row, on average
    entries_10: float | None = None
    entries_12: float | None = None


@dataclass
class CountRow(Environment):
    setting: str
    seed: int
    least_count: int  # occurrences in the training text; a group ends at ten times this
    classes: int
    tokens: int  # held out
    held_out_loss: float | None


class Reports:
    def __init__(self, folder: Path, here: Environment, *, resume: bool) -> None:
        names = ("training", "training_curves", "training_counts")
        reports = [Report(folder / here.slug / f"{name}.csv", resume=resume) for name in names]
        self.runs, self.curves, self.counts = reports
        self.here, self.lock = here.__dict__, threading.Lock()
        self.done = {(row["setting"], row["seed"]) for row in self.runs.rows if not row["reason"]}
        for report in reports:
            report.rows = [row for row in report.rows if (row["setting"], row["seed"]) in self.done]

    def add(self, chosen: Run, points: list[dict], end: dict, reason: str) -> None:
        which = self.here | {"setting": chosen.setting, "seed": chosen.seed}
        size = chosen.size
        row = RunRow(
            **which,
            D=size.dim,
            V=size.vocab,
            layers=size.depth,
            step_tokens=size.sequences * size.context,
            **{name: value for name, value in end.items() if name != "groups"},
            reason=reason,
        )
        with self.lock:
            self.runs.add([row])
            self.curves.add(CurveRow(**which, **point) for point in points)
            self.counts.add(CountRow(**which, **group) for group in end.get("groups", ()))
        found = f"held-out loss {row.held_out_loss:.4f}, rare {row.rare_loss:.4f}" if row.held_out_loss else ""
        say(f"{chosen.setting}, seed {chosen.seed}: {found} {reason}")


def serve(chosen: Run, device: torch.device, seconds: float, sender: multiprocessing.connection.Connection) -> None:
    """The process of one run."""
    try:
        run(chosen, device, seconds, sender.send)
    except Exception as error:
        sender.send({"reason": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]})


def take(chosen: Run, device: torch.device, deadline: float) -> tuple[list[dict], dict, str]:
    """Returns the points of the curve, the results of the run, and a reason if there are none."""
    left = deadline - time.monotonic()
    if left < 2 * LAST_S:
        return [], {}, "time budget spent"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(chosen, device, left - LAST_S, sender))
    process.start()
    sender.close()  # so that the pipe ends when the process does
    points: list[dict] = []
    reason = "time budget spent"
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            found = receiver.recv()
            if "groups" in found:
                return points, found, "" if found["steps"] == chosen.steps else "stopped early: time budget spent"
            if "reason" in found:
                return points, {}, found["reason"]
            points.append(found)
    except EOFError:
        process.join()
        reason = f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return points, {}, reason


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--scratch", type=Path, default=None, help="folder of the tokens; one that goes when not given")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="with commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--text", type=Path, nargs="+", default=None, help="files and folders; Python's sources")
    parser.add_argument("--megabytes", type=float, default=200, help="of text, at most")
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=32, help="of a step")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--rate", type=float, default=6e-4, help="the highest learning rate")
    parser.add_argument("--evaluate", type=int, default=200, help="steps between held-out losses, a multiple of 20")
    parser.add_argument("--held-out", type=int, default=2**20, help="tokens, at most")
    parser.add_argument("--operands", type=Path, default=None, help="folder for the head's operands in the first run")
    parser.add_argument("--operand-rows", type=int, default=8192)
    parser.add_argument("--budget-s", type=float, default=1800, help="of the whole command")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in the CSVs, but for failed ones")
    parser.add_argument("--compile", action="store_true", help="the model's blocks by torch.compile")
    parser.add_argument("--device", default=None)
    parser.add_argument("--commit", default=None, help="to note in the CSVs, where git cannot tell")
    options = parser.parse_args(argv)
    options.settings, options.seeds = options.settings.split(","), [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(options.settings) - set(SETTINGS):
        parser.error(f"expected settings of {', '.join(SETTINGS)}, got {', '.join(sorted(unknown))}")
    return options


def main(argv: Sequence[str] | None = None) -> Path:
    from safetensors.torch import save_file

    options = parse(argv)
    deadline = time.monotonic() + options.budget_s
    on_gpus = options.device != "cpu" and torch.cuda.is_available()
    devices = [torch.device("cuda", i) for i in range(options.gpus)] if on_gpus else [torch.device("cpu")]
    reports = Reports(options.out, environment(devices[0], options.commit), resume=options.resume)

    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        text = tokens_of(options.text, megabytes=options.megabytes, vocabulary=options.vocabulary, seed=0)
        save_file(text._asdict(), scratch / "tokens.safetensors")
        runs: queue.SimpleQueue[Run] = queue.SimpleQueue()
        for seed, setting in itertools.product(options.seeds, options.settings):
            if (setting, str(seed)) in reports.done:
                continue
            runs.put(
                Run(
                    setting,
                    seed,
                    tokens=scratch / "tokens.safetensors",
                    size=size_of(options),
                    steps=options.steps,
                    rate=options.rate,
                    evaluate=options.evaluate,
                    held_out=options.held_out,
                    compile=options.compile,
                    operands=options.operands if runs.empty() else None,
                    operand_rows=options.operand_rows,
                )
            )

        def work(device: torch.device) -> None:
            while True:
                try:
                    chosen = runs.get_nowait()
                except queue.Empty:
                    return
                reports.add(chosen, *take(chosen, device, deadline))

        workers = [threading.Thread(target=work, args=(device,)) for device in devices]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    say(f"{len(reports.runs.rows)} runs -> {reports.runs.path}")
    return reports.runs.path


if __name__ == "__main__":
    main()
