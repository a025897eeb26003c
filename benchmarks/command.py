"""The command line that benchmarks share: python -m benchmarks.NAME, results/GPU/NAME.csv."""

import argparse
from pathlib import Path

import torch

from .report import Environment, Report, environment

HELP = {
    "shapes": "NxDxV, with commas",
    "providers": "names or patterns, with commas",
    "rounds": "each in a new order",
    "ms": "back-to-back time of a step in a round",
    "seed": "of the data",
}


def command(name: str, doc: str | None, **defaults: str | float | None) -> argparse.ArgumentParser:
    """With an option for each default, and where to run and to write. A benchmark may add options of its own."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=doc, formatter_class=raw)
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", default=default, type=type(default), help=HELP.get(option))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser


def place(options: argparse.Namespace) -> tuple[torch.device, Environment]:
    device = torch.device(options.device)
    return device, environment(device, options.commit)


def report_of(name: str, options: argparse.Namespace) -> Report:
    return Report(options.out / place(options)[1].slug / f"{name}.csv")
