"""Rows of results: their columns, the CSV that they go to, and the printed table."""

from __future__ import annotations

import csv
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .providers.unavailable import Unavailable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Environment:
    """Where a row was measured: its first columns."""

    gpu: str  # or the CPU
    torch: str
    triton: str
    commit: str

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")


@dataclass
class Row(Environment):
    N: int
    D: int
    V: int
    ignored: float  # share of ignored tokens
    prior: str  # over the vocabulary, or "trained": data.py
    dtype: str
    mode: str
    provider: str
    version: str
    ms: float | None = None
    floor_ms: float | None = None
    x_floor: float | None = None
    spread: float | None = None
    tflops: float | None = None  # the floor's operations divided by the provider's time
    peak_MiB: float | None = None
    beyond_gradients_MiB: float | None = None
    loss: float | None = None  # the reference's mean over the valid tokens
    err_loss: float | None = None
    err_dx: float | None = None
    err_dw: float | None = None
    first_call_s: float | None = None
    host_us: float | None = None  # from the call of a step to its return, if that may limit the step
    host_one_thread_us: float | None = None  # the same with autograd in the calling thread
    seed: int | None = None
    reason: str = ""  # why a number is missing, or what is wrong with it


def environment(device: torch.device, commit: str | None = None) -> Environment:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    name = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    return Environment(name, torch.__version__, triton_version, commit or commit_of(REPOSITORY))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.processor() or platform.machine()])[0]


def commit_of(checkout: Path) -> str:
    """The short hash, with + if the tree has changes. FLCE_COMMIT if the sources came without .git."""
    if checkout == REPOSITORY and "FLCE_COMMIT" in os.environ:
        return os.environ["FLCE_COMMIT"]
    if not (checkout / ".git").exists():  # git would otherwise report a repository around it
        return "unknown"
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


class Report:
    """A CSV that is written as a whole after every shape, so that measured rows are safe whatever happens next."""

    def __init__(self, path: Path, *, resume: bool = False):
        self.path = path
        self.rows: list[dict[str, str]] = []
        if resume and path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def add(self, rows: Iterable[DataclassInstance]) -> None:
        self.rows += [{name: _text(value) for name, value in asdict(row).items()} for row in rows]
        if not self.rows:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        partial.replace(self.path)


class KeepingReport(Report):
    """A CSV that keeps rows of earlier runs, except those that this run replaces."""

    def __init__(self, path: Path, **replaced: object) -> None:
        super().__init__(path, resume=True)
        self.rows = [row for row in self.rows if any(row[name] != str(value) for name, value in replaced.items())]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def reason_of(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"[:200]


def _cell(value: object, form: str) -> str:
    return "" if value is None else format(value, form) if form else str(value)


Column = tuple[str, int, str]  # a row's attribute, which is the heading, too; the width; the format


def table_of(
    rows: Iterable[Any], columns: Sequence[Column], *, heading: str, width: int, name_of: Callable[[Any], str]
) -> str:
    """A line for each row: its name, the columns, and the reason why a number is missing."""
    columns = [(column, max(wide, len(column) + 1), form) for column, wide, form in columns]
    lines = [heading.ljust(width) + "".join(column.rjust(wide) for column, wide, _ in columns)]
    for row in rows:
        cells = "".join(_cell(getattr(row, column), form).rjust(wide) for column, wide, form in columns)
        lines.append(f"{name_of(row).ljust(width)}{cells}  {getattr(row, 'reason', '')}".rstrip())
    return "\n".join(lines)


COLUMNS = [
    *(("ms", 9, ".2f"), ("x_floor", 9, ".3f"), ("spread", 8, ".1%"), ("tflops", 8, ".3g"), ("peak_MiB", 10, ".5g")),
    *(("beyond_gradients_MiB", 22, ".5g"), ("err_loss", 10, ".1e"), ("err_dx", 8, ".1e"), ("err_dw", 8, ".1e")),
    ("first_call_s", 14, ".2f"),
]


def table(rows: list[Row]) -> str:
    """The fastest first; then the missing providers, grouped by reason."""
    timed = sorted((row for row in rows if row.ms is not None), key=lambda row: row.ms)
    lines = [table_of(timed, COLUMNS, heading="provider", width=22, name_of=lambda row: row.provider)]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.ms is None:
            reasons.setdefault(row.reason, []).append(row.provider)
    lines += [f"without {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines)


def say(*words: object, sep: str = " ", end: str = "\n") -> None:
    """Prints progress without buffering, because a machine may be taken away before its output is flushed."""
    print(*words, sep=sep, end=end, flush=True)
