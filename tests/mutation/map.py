"""The map from lines of the package to the tests that run them, quickest first: `map.json`, made by `--map`.

    tests    [[name, seconds], ...]                       those that some set names
    sets     [[n, ...], ...]                              n into `tests`
    lines    {file: {function: {"k": [offset, ...]}}}     k into `sets`, offset from the function's first line

Counting lines within their function keeps the map of a file true for the functions that did not change. Tests that run
the same line are kept evenly from the quickest to the slowest, OF_A_FILE of a test file, MOST altogether, those beyond
SECONDS left out: the quickest alone are about errors and empty inputs.
"""

import ast
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

OF_A_FILE = 8
MOST = 64
SECONDS = 120.0  # together


def functions_of(source: str) -> list[tuple[str, int, int]]:
    """(qualified name, first line, last line) of every function and class, the outer ones first."""
    found = []

    def walk(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{outer}.{child.name}".lstrip(".")
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((name, first, child.end_lineno))
            walk(child, name)

    walk(ast.parse(source), "")
    return found


def function_at(functions: list[tuple[str, int, int]], line: int) -> tuple[str, int]:
    """(name, first line) of the innermost one; ("", 0) at module level."""
    inside = [(name, first) for name, first, last in functions if first <= line <= last]
    return inside[-1] if inside else ("", 0)


def evenly(names: list[str], count: int) -> list[str]:
    count = min(count, len(names))
    return [names[place * len(names) // count] for place in range(count)]


def choose(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """Quickest first."""
    of_file: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tests, key=lambda test: (seconds[test], test)):
        of_file[name.partition("::")[0]].append(name)
    some = [name for names in of_file.values() for name in evenly(names, OF_A_FILE)]
    chosen = evenly(sorted(some, key=lambda test: (seconds[test], test)), MOST)
    while len(chosen) > 1 and sum(seconds[name] for name in chosen) > SECONDS:
        chosen.pop()
    return chosen


def made_of(package: Path, lines: dict[str, set[tuple[str, int]]], seconds: dict[str, float]) -> dict[str, Any]:
    """`lines`: those that a test runs, by test."""
    tests_of: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name, found in lines.items():
        for at in found:
            tests_of[at].add(name)
    numbers: dict[str, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    files: dict[str, Any] = {}
    functions = {file: functions_of((package / file).read_text()) for file in sorted({file for file, _ in tests_of})}
    for (file, line), tests in sorted(tests_of.items()):
        function, first = function_at(functions[file], line)
        if function:  # else what importing runs
            chosen = tuple(numbers.setdefault(name, len(numbers)) for name in choose(tests, seconds))
            of_tests = files.setdefault(file, {}).setdefault(function, {})
            of_tests.setdefault(str(sets.setdefault(chosen, len(sets))), []).append(line - first)
    return {"tests": [[name, round(seconds[name], 2)] for name in numbers], "sets": list(sets), "lines": files}


def written(content: dict[str, Any]) -> str:
    """JSON with a line a test, a set and a function."""

    def short(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    def lines_of(functions: dict[str, Any]) -> str:
        return ",\n".join(f"{short(name)}:{short(lines)}" for name, lines in functions.items())

    tests, sets = (",\n".join(map(short, content[name])) for name in ("tests", "sets"))
    files = ",\n".join(f"{short(file)}:{{\n{lines_of(functions)}}}" for file, functions in content["lines"].items())
    return f'{{"tests":[\n{tests}],\n"sets":[\n{sets}],\n"lines":{{\n{files}}}}}\n'


class Map:
    def __init__(self, content: dict[str, Any]) -> None:
        self.tests = [name for name, _ in content["tests"]]
        self.seconds = dict(content["tests"])
        self.sets = content["sets"]
        self.lines = content["lines"]

    @classmethod
    def read(cls, path: Path) -> "Map":
        return cls(json.loads(path.read_text()))

    def lines_of_tests(self, package: Path) -> dict[str, set[tuple[str, int]]]:
        """(file, line) that each test runs, of the files and functions that `package` still has."""
        found: dict[str, set[tuple[str, int]]] = {name: set() for name in self.tests}
        for file, functions in self.lines.items():
            if (package / file).exists():
                first = {name: line for name, line, _ in functions_of((package / file).read_text())}
                for function, of_sets in functions.items():
                    for place, offsets in of_sets.items() if function in first else ():
                        for test in self.sets[int(place)]:
                            found[self.tests[test]] |= {(file, first[function] + offset) for offset in offsets}
        return found

    def tests_of(self, file: str, function: str, offsets: list[int]) -> list[tuple[str, float]]:
        """(test, seconds), quickest first: of a line of `function`, else of the function, else of the file.

        A line that runs at import (a signature, a constant) has the tests of what stands around it. [] where no test
        runs any of it.
        """
        functions = self.lines.get(file, {})
        for offset in offsets:
            for place, lines in functions.get(function, {}).items():
                if offset in lines:
                    return [(self.tests[n], self.seconds[self.tests[n]]) for n in self.sets[int(place)]]
        inner = [lines for name, lines in functions.items() if name == function or name.startswith(f"{function}.")]
        around = inner or list(functions.values())
        some = {self.tests[n] for lines in around for place in lines for n in self.sets[int(place)]}
        return [(name, self.seconds[name]) for name in choose(some, self.seconds)]
