"""Which lines of a package each test runs: a pytest plugin, and a tracer for the processes that a test starts.

The number of the running test stands in a file that all processes map into memory. A process appends every line that it
runs for the first time in a test to a file of its own, so what a killed rank ran is known too.
"""

import inspect
import json
import mmap
import os
import sys
import threading
from pathlib import Path

FOLDER = "FLCE_LINES"  # the environment: where the files are
PACKAGE = "FLCE_LINES_OF"  # and the folder whose lines are recorded

# `sitecustomize.py` of the copy: Python runs it at the start of every process.
AT_START = f"""
import os
if "{FOLDER}" in os.environ:
    from tests.mutation.lines import trace
    trace()
"""


def trace() -> None:
    folder, package = Path(os.environ[FOLDER]), os.environ[PACKAGE] + os.sep
    with open(folder / "test", "rb") as file:
        running = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
    ours: dict[str, bool] = {}
    state = {"test": b"", "pid": 0, "seen": set(), "out": None}

    def begin(test: bytes) -> None:
        if state["pid"] != os.getpid():  # a fork writes a file of its own
            state["pid"] = os.getpid()
            state["out"] = open(folder / f"{os.getpid()}.lines", "a", buffering=1)
        state["test"], state["seen"] = test, set()
        state["out"].write(f"={int.from_bytes(test, 'little')}\n")

    def in_frame(frame, event, argument):
        test = running[:4]
        if test != state["test"] or state["pid"] != os.getpid():
            begin(test)
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in state["seen"]:
            state["seen"].add(line)
            state["out"].write(f"{line[0][len(package) :]}:{line[1]}\n")
        return in_frame

    def in_call(frame, event, argument):
        name = frame.f_code.co_filename
        if name not in ours:
            ours[name] = name.startswith(package)
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # what importing runs is no test's
        return in_frame(frame, event, argument) if ours[name] and is_function else None

    threading.settrace(in_call)
    sys.settrace(in_call)


class Tests:
    """The plugin: writes the running test's number, keeps the names, the seconds and what passed."""

    def __init__(self, folder: Path, sample: int) -> None:
        (folder / "test").write_bytes(bytes(4))
        self.folder, self.sample = folder, sample
        with open(folder / "test", "r+b") as file:
            self.running = mmap.mmap(file.fileno(), 4)
        self.tests: dict[str, dict] = {}

    def pytest_collection_modifyitems(self, items) -> None:
        """The first, the middle and the last of a test's parameters, up to `sample`."""
        of_function: dict[str, list] = {}
        for item in items:
            of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = set()
        for same in of_function.values():
            count = min(self.sample, len(same))
            kept |= {id(same[position * len(same) // count]) for position in range(count)}
        items[:] = [item for item in items if id(item) in kept]

    def pytest_runtest_logstart(self, nodeid) -> None:
        self.tests[nodeid] = {"seconds": 0.0, "passed": False}
        self.running[:4] = len(self.tests).to_bytes(4, "little")
        sys.settrace(None)  # Dynamo or a debugger may have taken it
        trace()

    def pytest_runtest_logreport(self, report) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        if report.when == "call":
            test["passed"] = report.passed

    def pytest_runtest_logfinish(self) -> None:
        sys.settrace(None)
        self.running[:4] = bytes(4)
        (self.folder / "tests.json").write_text(json.dumps(self.tests))


def lines_of(folder: Path) -> dict[str, set[tuple[str, int]]]:
    """The lines (file, number) of every test that passed."""
    tests = json.loads((folder / "tests.json").read_text())
    names = list(tests)
    found: dict[str, set] = {name: set() for name in names if tests[name]["passed"]}
    for file in folder.glob("*.lines"):
        name = None
        for text in file.read_text().splitlines():
            if text.startswith("="):
                number = int(text[1:])  # 0 between tests; the last one's name is not known where it was ended
                name = names[number - 1] if 0 < number <= len(names) else None
            elif name in found:
                path, _, line = text.rpartition(":")
                found[name].add((path, int(line)))
    return found
