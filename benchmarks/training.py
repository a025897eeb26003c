"""`python -m benchmarks.training --out DIR`: trains a small GPT with exact and with sparse gradients of its head.

    python -m benchmarks.training --gpus 3 --compile --text FOLDER FILE       # 21 runs of 1,600 steps: eight minutes
    python -m benchmarks.training --compile --settings exact,unbiased_10 --seeds 0

training.csv            a run: its losses on held-out text, of all tokens and of rare ones, and the time of a step
training_curves.csv     a point of a run every 20 steps: the training loss. Some points have held-out losses, and how
                        many entries of a row of softmax - onehot an unbiased gradient would keep at 2^-8, 2^-10, 2^-12

The text is encoded once. Then each GPU takes one run after the other, with all settings of a seed before the next seed.
Each run is a separate process; one that dies becomes a row with a reason. The CSVs are written after every run. When
--budget-s is over, running ones stop early and the remaining runs are left out, both with their reason. --operands
writes what the head meets before and after the first run, for `python -m benchmarks --data trained:FILE`.

B sequences of T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .command import command, place, report_of
from .corpus import tokens_of
from .llama import LlamaSize
from .report import Environment, reason_of, say
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


class Reports:
    def __init__(self, options: argparse.Namespace) -> None:
        self.runs, self.curves = (report_of(name, options) for name in ("training", "training_curves"))
        self.here, self.lock = vars(place(options)[1]), threading.Lock()

    def add(self, chosen: Run, points: list[dict], end: dict, reason: str) -> None:
        which, size = self.here | {"setting": chosen.setting, "seed": chosen.seed}, chosen.size
        of_model = {"D": size.dim, "V": size.vocab, "layers": size.depth, "step_tokens": size.sequences * size.context}
        row = RunRow(**which, **of_model, **end, reason=reason)
        with self.lock:
            self.runs.add([row])
            self.curves.add(CurveRow(**which, **point) for point in points)
        say(f"{chosen.setting}, seed {chosen.seed}: held-out loss {row.held_out_loss}, rare {row.rare_loss} {reason}")


def take(chosen: Run, device: torch.device, deadline: float) -> tuple[list[dict], dict, str]:
    """Returns the points of the curve, the results of the run, and a reason if there are none."""
    left = deadline - time.monotonic()
    if left < 2 * LAST_S:
        return [], {}, "time budget spent"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            points, end = process.submit(run, chosen, device, left - LAST_S).result()
        except Exception as error:
            return [], {}, reason_of(error)
    return points, end, "" if end["steps"] == chosen.steps else "stopped early: time budget spent"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = {"settings": ",".join(SETTINGS), "seeds": "0,1,2", "gpus": 1, "megabytes": 200.0, "vocabulary": 50304}
    sizes = {"hidden": 1024, "layers": 4, "context": 512, "sequences": 32, "steps": 1600, "rate": 6e-4, "evaluate": 200}
    parser = command("training", __doc__, **defaults, **sizes)
    parser.add_argument("--text", type=Path, nargs="+", default=None, help="files and folders; Python's sources")
    parser.add_argument("--held-out", type=int, default=2**20, help="tokens, at most")
    parser.add_argument("--operands", type=Path, default=None, help="folder for the head's operands in the first run")
    parser.add_argument("--operand-rows", type=int, default=8192)
    parser.add_argument("--budget-s", type=float, default=1800, help="of the whole command")
    parser.add_argument("--compile", action="store_true", help="the model's blocks by torch.compile")
    options = parser.parse_args(argv)
    options.settings, options.seeds = options.settings.split(","), [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(options.settings) - set(SETTINGS):
        parser.error(f"expected settings of {', '.join(SETTINGS)}, got {', '.join(sorted(unknown))}")
    return options


def size_of(options: argparse.Namespace) -> LlamaSize:
    heads, mlp = max(1, options.hidden // 64), max(64, options.hidden * 8 // 3 // 64 * 64)
    return LlamaSize(options.hidden, options.layers, heads, mlp, options.vocabulary, options.context, options.sequences)


def main(argv: Sequence[str] | None = None) -> Path:
    from safetensors.torch import save_file

    options = parse(argv)
    deadline = time.monotonic() + options.budget_s
    reports, devices = Reports(options), queue.SimpleQueue()
    for index in range(options.gpus):
        devices.put(torch.device("cuda", index) if options.device == "cuda" else torch.device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.safetensors"
        text = tokens_of(options.text, megabytes=options.megabytes, vocabulary=options.vocabulary, seed=0)
        save_file(text._asdict(), tokens)
        how = {name: getattr(options, name) for name in ("steps", "rate", "evaluate", "held_out", "compile")}
        how |= {"tokens": tokens, "size": size_of(options), "operand_rows": options.operand_rows}
        which = itertools.product(options.seeds, options.settings)
        runs = [Run(setting, seed, **how, operands=None) for seed, setting in which]
        runs[0] = runs[0]._replace(operands=options.operands)

        def work(chosen: Run) -> None:
            device = devices.get()
            reports.add(chosen, *take(chosen, device, deadline))
            devices.put(device)

        with ThreadPoolExecutor(options.gpus) as workers:
            list(workers.map(work, runs))
    say(f"{len(runs)} runs -> {reports.runs.path}")
    return reports.runs.path


if __name__ == "__main__":
    main()
