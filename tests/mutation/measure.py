"""Makes the map: runs every test file in a process of its own and asks which lines each test ran."""

import contextlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from .lines import AT_START, FOLDER, PACKAGE, Tests, lines_of
from .map import Map, made_of, written
from .run import Project
from .server import call

SECONDS = 900.0  # of a file
# of the repository's pages and commands, not of what the package computes
LEFT_OUT = ("package/test_benchmark", "package/test_demo", "package/test_training_runs", "package/test_packaging")


def test_files(root: Path) -> list[str]:
    names = sorted(str(path.relative_to(root)) for path in (root / "tests").glob("*/test_*.py"))
    skipped = (*(f"tests/{name}" for name in LEFT_OUT), "tests/package/test_mutation.py")
    # the folders in turn, so that a part of the list has something of each
    return sorted(
        (name for name in names if not name.startswith(skipped)),
        key=lambda name: (sum(other < name and Path(other).parent == Path(name).parent for other in names), name),
    )


def trace_file(name: str, folder: str, package: str, sample: int) -> bool:
    os.environ[FOLDER], os.environ[PACKAGE] = folder, package
    import pytest

    plugin = Tests(Path(folder), sample)
    options = ["-q", "-m", "not gpu and not multigpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*options, name], plugins=[plugin])
    return True


def measure(
    project: Project, files: list[str], out: Path, *, work: Path, jobs: int, sample: int, seconds: float
) -> int:
    """Writes `out`, which keeps what it has of other test files."""
    end = time.monotonic() + seconds
    copy = project.copied_to(work / "copy")
    (copy.root / "sitecustomize.py").write_text(AT_START)
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)

    def work_off() -> None:
        while time.monotonic() < end:
            with following.get_lock():
                index = following.value
                following.value += 1
            if index >= len(files):
                return
            begin = time.monotonic()
            folder = work / "lines" / str(index)
            folder.mkdir(parents=True)
            arguments = (files[index], str(folder), str(copy.root / copy.package), sample)
            options = {"root": copy.root, "log": folder / "log", "seconds": SECONDS, "left": end - begin}
            done = False
            with contextlib.suppress(TimeoutError):
                done = call(trace_file, *arguments, **options)
            print(f"{files[index]}: {time.monotonic() - begin:.0f} s{'' if done else ', not finished'}", flush=True)

    processes = [context.Process(target=work_off) for _ in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    content = gathered(copy, work / "lines", Map.read(out) if out.exists() else None)
    out.write_text(written(content))
    print(f"{len(content['tests'])} tests of {len({name.partition('::')[0] for name, _ in content['tests']})} files")
    return 0


def gathered(project: Project, folder: Path, before: Map | None = None) -> dict[str, Any]:
    """The map of what the tests of several files wrote, a folder each, and of the other files' tests in `before`."""
    lines: dict[str, set[tuple[str, int]]] = {}
    taken: dict[str, float] = {}
    for one in sorted(folder.iterdir()):
        if (one / "tests.json").exists():
            tests = json.loads((one / "tests.json").read_text())
            taken |= {name: test["seconds"] for name, test in tests.items()}
            lines |= lines_of(one)
    package = project.root / project.package
    if before is not None:
        again = {name.partition("::")[0] for name in lines}
        for name, found in before.lines_of_tests(package).items():
            if name.partition("::")[0] not in again:
                lines[name], taken[name] = found, before.seconds[name]
    return made_of(package, lines, taken)
