"""The command line of a benchmark that times steps side by side: python -m benchmarks.NAME, NAME.csv."""

import argparse
from pathlib import Path

import torch


def timing_arguments(name: str, doc: str | None, *, shapes: str, rounds: int, ms: float) -> argparse.ArgumentParser:
    """With the defaults of this benchmark; it may add arguments of its own."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=doc)
    parser.add_argument("--shapes", default=shapes, help="NxDxV, with commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--ms", type=float, default=ms, help="back-to-back time of a step in a round")
    parser.add_argument("--seed", type=int, default=1, help="of the data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser
