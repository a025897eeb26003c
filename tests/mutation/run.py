"""Draws mutants, runs each against the tests that run its line, writes a row of a CSV for each."""

import compileall
import csv
import multiprocessing
import random
import resource
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from .faults import Fault, faults_of
from .map import Map, function_at, functions_of
from .server import call

FIELDS = ("file", "line", "function", "operator", "before", "after", "result", "by", "tests", "seconds", "reason")
OPEN = ("survived", "not run", "unfinished")
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "site", "demo_output")
GIB = 1 << 30
MEMORY = 24 * GIB  # addresses of a process: a mutant may ask for more than there is
PATIENCE = 30.0, 4.0  # CPU seconds, and times what its tests took unmutated: more is a hang
FIRST = 6  # so many tests run alone at first: collecting the files of all of them takes longer than most kills
ALL_CASES = 150.0  # CPU seconds for the cases that the map leaves out, of the tests that it names


@dataclass(frozen=True)
class Project:
    root: Path
    package: str = "flce_ops"

    def source(self, file: str) -> str:
        return (self.root / self.package / file).read_text()

    def files(self, areas: list[str]) -> list[str]:
        folder = self.root / self.package
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
        return [name for name in names if not areas or any(name.startswith(area) for area in areas)]

    def copied_to(self, folder: Path) -> "Project":
        shutil.copytree(self.root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
        # by contents, not by time: a mutant may be of the second in which the file was restored, and as long
        compileall.compile_dir(folder / self.package, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        return Project(folder, self.package)

    def cloned_to(self, folder: Path) -> "Project":
        """A copy of a copy, with what is compiled there."""
        return Project(Path(shutil.copytree(self.root, folder)), self.package)


@dataclass(frozen=True)
class Mutant:
    file: str  # in the package
    function: str
    first: int  # line of the function
    fault: Fault

    def row(self) -> dict[str, Any]:
        fault = self.fault
        before, after = (" ".join(text.split()) for text in (fault.before, fault.after))
        row = {"file": self.file, "line": fault.line, "function": self.function, "operator": fault.operator}
        return {**row, "before": before, "after": after, "reason": ""}

    def tests(self, tests: Map) -> list[tuple[str, float]]:
        offsets = [self.fault.line - self.first, self.fault.statement - self.first]
        return tests.tests_of(self.file, self.function, offsets)


def mutants_of(project: Project, file: str) -> list[Mutant]:
    source = project.source(file)
    functions = functions_of(source)
    return [Mutant(file, *function_at(functions, fault.line), fault) for fault in faults_of(source)]


def draw(project: Project, areas: list[str], count: int, seed: int) -> list[Mutant]:
    """Files by how many statements they have, then an operator, then one of its faults: none twice."""
    chance = random.Random(seed)
    left = {file: mutants_of(project, file) for file in project.files(areas)}
    weights = {file: len({mutant.fault.statement for mutant in mutants}) for file, mutants in left.items()}
    drawn = []
    while len(drawn) < count and any(left.values()):
        files = [file for file, mutants in left.items() if mutants]
        (file,) = chance.choices(files, [weights[name] for name in files])
        operator = chance.choice(sorted({mutant.fault.operator for mutant in left[file]}))
        mutant = chance.choice([mutant for mutant in left[file] if mutant.fault.operator == operator])
        left[file].remove(mutant)
        drawn.append(mutant)
    return drawn


def again(project: Project, rows: Path) -> list[Mutant]:
    """Those of a CSV that no test killed, found by their text where lines have moved. Some may be gone."""
    found, files = [], set(project.files([]))
    for row in read(rows):
        if row["result"] in OPEN and row["file"] in files:
            same = [mutant for mutant in mutants_of(project, row["file"]) if _key(mutant.row()) == _key(row)]
            found += sorted(same, key=lambda mutant: abs(mutant.fault.line - int(row["line"])))[:1]
    return found


def read(rows: Path) -> list[dict[str, Any]]:
    with open(rows, newline="") as file:
        return list(csv.DictReader(file))


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


def merged(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`before` with what was found since; its reasons stay."""
    found = {_key(row): row for row in rows} | {(row["line"], *_key(row)): row for row in rows}
    return [
        found.get((row["line"], *_key(row)), found.get(_key(row), row)) | {"reason": row["reason"]}
        if row["result"] in OPEN
        else row
        for row in before
    ]


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("file", "function", "operator", "before", "after"))


class InOrder:
    """Keeps the tests that are named, in the order of their names, and remembers the one that fails."""

    def __init__(self, names: list[str], wrong: list[str], running: Path) -> None:
        self.names, self.wrong, self.running = names, wrong, running
        self.failed: str | None = None
        self.passed = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        place = {name: number for number, name in enumerate(self.names)}
        whole = [name for name in self.names if "::" not in name]
        for item in items:
            function = item.nodeid.partition("[")[0]
            if item.nodeid not in place and (function in place or function.partition("::")[0] in whole):
                place[item.nodeid] = place.get(function, len(place))
        kept = [item for item in items if item.nodeid in place and item.nodeid not in self.wrong]
        items[:] = sorted(kept, key=lambda item: place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.write_text(nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        self.passed += report.passed and report.when == "call"


def run_tests(package: str, names: list[str], wrong: list[str], running: str) -> dict[str, Any]:
    """In a process of its own, without `wrong`. `failed`: the first test that fails."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        __import__(package)
    except Exception:
        return {"failed": f"import {package}", "passed": 0}
    import pytest

    plugin = InOrder(names, wrong, Path(running))
    files = [file for file in dict.fromkeys(name.partition("::")[0] for name in names) if Path(file).exists()]
    if not files:
        return {"failed": None, "passed": 0}
    marks = "not gpu and not multigpu"
    options = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    status = pytest.main([*options, *files], plugins=[plugin])
    if plugin.failed is None and status not in (0, 1, 5):
        return {"failed": f"pytest: {status!s}", "passed": plugin.passed}
    return {"failed": plugin.failed, "passed": plugin.passed}


class Worker:
    def __init__(self, project: Project, folder: Path, tests: Map, end: float, budget: float | None = None) -> None:
        self.project, self.folder, self.tests = project.cloned_to(folder / "copy"), folder, tests
        self.end, self.budget = end, budget
        self.right: dict[str, bool] = {}  # does a test pass where nothing is mutated?
        self.killers: dict[str, Counter[str]] = defaultdict(Counter)  # of a file: tests that killed mutants of it

    def answer(self, names: list[str], seconds: float) -> dict[str, Any]:
        running = self.folder / "running"
        running.write_text("")
        wrong = [name for name, right in self.right.items() if not right]
        arguments = (self.project.package, names, wrong, str(running))
        left = max(0.0, self.end - time.monotonic())
        options = {"root": self.project.root, "log": self.folder / "log", "seconds": seconds, "left": left}
        found, hangs = None, False
        try:
            found = call(run_tests, *arguments, **options)
        except TimeoutError:
            hangs = True
        if found is None:  # it hangs, or the process died
            found = {"failed": running.read_text() or f"import {self.project.package}", "passed": 0, "hangs": hangs}
        return found

    def answer_mutated(self, mutant: Mutant, tests: list[tuple[str, float]]) -> dict[str, Any]:
        """Of the first tests; if these pass, of the others; if these pass, of all cases, as long as ALL_CASES allow."""
        path = self.project.root / self.project.package / mutant.file
        source, passed = path.read_text(), 0
        path.write_text(mutant.fault.applied_to(source))
        try:
            for some in (tests[:FIRST], tests[FIRST:]):
                seconds = PATIENCE[0] + PATIENCE[1] * sum(taken for _, taken in some)
                found = self.answer([name for name, _ in some], seconds) if some else {"failed": None}
                passed += found.get("passed", 0)
                if found["failed"] is not None:
                    break
            else:
                names = list(dict.fromkeys(name.partition("[")[0] for name, _ in tests if "[" in name))
                every = self.answer(names, ALL_CASES) if names and self.budget is None else found
                found = found if every.get("hangs") else every
        finally:
            path.write_text(source)
        return found | {"passed": passed}

    def passes_unmutated(self, failed: str, names: list[str]) -> bool:
        """The test that failed; of another failure (an import, pytest's own) the first test."""
        if failed not in self.right:
            name = failed.removeprefix("import of ")
            tried = name if "::" in name or name.endswith(".py") else names[0]
            self.right[failed] = self.answer([tried], PATIENCE[0] * 2)["failed"] is None
        return self.right[failed]

    def examine(self, mutant: Mutant, named: list[tuple[str, float]] | None) -> dict[str, Any]:
        """The row of a mutant. A test that fails without it too is left out."""
        begin = time.monotonic()
        killers = self.killers[mutant.file]
        tests = sorted(named or mutant.tests(self.tests), key=lambda test: -killers[test[0]])  # else quickest first
        if self.budget is not None:
            tests = within(self.budget, tests)
        row = mutant.row()
        while True:
            tests = [test for test in tests if self.right.get(test[0], True)]
            names = [name for name, _ in tests]
            if not names:
                row |= {"result": "not run", "by": ""}
                break
            found = self.answer_mutated(mutant, tests)
            failed = found["failed"]
            if failed is None:
                survived = "survived" if self.budget is None else "unfinished"
                row |= {"result": survived if found["passed"] else "not run", "by": ""}
                break
            right = self.passes_unmutated(failed, names)
            if time.monotonic() >= self.end:
                row |= {"result": "unfinished", "by": failed}
                break
            if right:
                row |= {"result": "hangs" if found.get("hangs") else "killed", "by": failed}
                killers[failed] += 1
                break
            # fails without the mutant: that test is left out, or the file that cannot be imported, or all
            file = failed.removeprefix("import of ")
            wrong = [failed] if "::" in failed else [name for name in names if name.startswith(file)] or names
            self.right |= dict.fromkeys(wrong, False)
        return row | {"tests": len(names), "seconds": round(time.monotonic() - begin, 1)}


def within(budget: float, tests: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The first tests, of `budget` seconds altogether; at least one."""
    kept: list[tuple[str, float]] = []
    for name, seconds in tests:
        if not kept or sum(taken for _, taken in kept) + seconds <= budget:
            kept.append((name, seconds))
    return kept


def run(
    project: Project,
    mutants: list[Mutant],
    tests: Map,
    out: Path,
    *,
    work: Path,
    jobs: int = 1,
    seconds: float = float("inf"),
    named: list[tuple[str, float]] | None = None,
    budget: float | None = None,
) -> list[dict[str, Any]]:
    """The rows in the order in which they came; `out` has each as soon as it is known.

    A mutant that no process began in time is unfinished.
    """
    end = time.monotonic() + seconds
    write(out, [])
    copy = project.copied_to(work / "unmutated")
    context = multiprocessing.get_context("fork")  # torch is imported once
    following, lock = context.Value("i", 0), context.Lock()

    def work_off(number: int) -> None:
        worker = Worker(copy, work / str(number), tests, end, budget)
        while time.monotonic() < end:
            with following.get_lock():
                index = following.value
                following.value += 1
            if index >= len(mutants):
                return
            row = worker.examine(mutants[index], named)
            with lock, open(out, "a", newline="") as file:
                csv.DictWriter(file, FIELDS).writerow(row)
            place = f"{row['file']}:{row['line']} {row['operator']}: {row['before']} -> {row['after']}"
            print(f"{row['result']:>10} {row['seconds']:>6} s  {place}  {row['by']}", flush=True)

    processes = [context.Process(target=work_off, args=(number,)) for number in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = read(out)
    rows += [mutant.row() | {"result": "unfinished"} for mutant in mutants[min(following.value, len(mutants)) :]]
    write(out, rows)
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """Mutants by area and by result. What hangs is killed; what is equivalent counts neither way."""
    count: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        area = row["file"].partition("/")[0] if "/" in row["file"] else "."
        for name in (area, "all"):
            count[name]["killed" if row["result"] == "hangs" else row["result"]] += 1
    results = ("killed", "survived", "equivalent", "not run", "unfinished", "void")
    lines = ["| area | mutants | " + " | ".join(results) + " |", "|---|" + "---|" * (len(results) + 1)]
    for area in sorted(count, key=lambda name: (name == "all", name)):
        cells = [sum(count[area].values()), *(count[area][result] for result in results)]
        lines.append(f"| {area} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
