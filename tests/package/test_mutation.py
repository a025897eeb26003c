"""tests/mutation finds what it is to find: planted faults in a package of one file are killed, or survive."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.faults import faults_of
from tests.mutation.map import SECONDS, Map, choose, function_at, functions_of

ROOT = Path(__file__).parents[2]

FORMULAS = '''"""Two formulas."""
import torch
import triton
import triton.language as tl


def mean(values, weight=None):
    """sum_i w_i x_i / sum_i w_i"""
    if weight is None:
        return values.sum(dim=-1) / values.shape[-1]
    return (weight * values).sum(dim=-1) / weight.sum(dim=-1)


def slow(n):
    while n > 0:
        n -= 1
    return n


@triton.jit
def kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0) * 2.0, mask=i < n)


def double(x):
    out = torch.empty_like(x)
    kernel[(1,)](out, x, x.shape[0], BLOCK=8)
    return out
'''

TESTS = """import pytest, torch
from toy.formulas import double, mean, slow

X = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])

@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0])
def test_mean(scale):
    assert torch.equal(mean(scale * X), scale * torch.tensor([3.0, 1.0]))

def test_mean_runs_with_weights():
    mean(X, X)

def test_slow():
    assert slow(3) == 0

def test_double():
    assert torch.equal(double(torch.ones(8)), 2 * torch.ones(8))

def test_is_wrong_here():
    mean(X)
    assert False
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "project"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy/__init__.py").write_text("")
    (folder / "toy/formulas.py").write_text(FORMULAS)
    (folder / "tests/all").mkdir(parents=True)
    (folder / "tests/all/test_toy.py").write_text(TESTS)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: ", "multigpu: "]\n')
    return folder


SCRIPT = """
import json, sys
from pathlib import Path
from tests.mutation import measure, run, server
from tests.mutation.map import Map

server.IMPORTED = ("torch", "triton", "pytest")
server.prepare()
folder, work = Path(sys.argv[1]), Path(sys.argv[1]).with_name("work")
project = run.Project(folder, "toy")
tests = ["tests/all/test_toy.py"]
measure.measure(project, tests, folder / "map.json", work=work, jobs=1, sample=2, seconds=600.0)
wanted = json.loads(sys.argv[2])
mutants = [m for m in run.mutants_of(project, "formulas.py") if [m.fault.before, m.fault.after] in wanted]
run.PATIENCE = 20.0, 1.0
rows = run.run(project, mutants, Map.read(folder / "map.json"), folder / "out.csv", work=work, jobs=2)
print(run.summary(rows))
(first,) = run.run(
    project,
    run.again(project, folder / "out.csv"),
    Map.read(folder / "map.json"),
    folder / "first.csv",
    work=work / "first",
    budget=0.0,
)
assert first["result"] == "unfinished", first
run.write(folder / "first.csv", [*rows, first | {"file": "gone.py"}])
(left,) = run.again(project, folder / "first.csv")
named = [("tests/all/test_toy.py", 1.0)]  # with its test that fails everywhere
found = run.run(project, [left], None, folder / "again.csv", work=work / "again", named=named)
run.write(folder / "again.csv", run.merged(rows, found))
"""

PLANTED = {
    ("values.sum(dim=-1)", "(values.sum(dim=0))"): ("killed", "test_mean["),
    ("values.sum(dim=-1) / values.shape[-1]", "(values.sum(dim=-1) * values.shape[-1])"): ("killed", "test_mean["),
    ("weight * values", "(weight / values)"): ("survived", ""),  # its test asserts nothing
    ("n -= 1", "pass"): ("hangs", "test_slow"),
    ("tl.load(x + i, mask=i < n, other=0.0) * 2.0", "(tl.load(x + i, mask=i < n, other=0.0) / 2.0)"): (
        "killed",
        "test_double",
    ),
    ("weight is None", "(not weight is None)"): ("killed", "test_mean"),
}


@pytest.mark.exhaustive
def test_planted_faults_are_killed_or_survive(toy):
    wanted = json.dumps([list(fault) for fault in PLANTED])
    subprocess.run([sys.executable, "-c", SCRIPT, str(toy), wanted], cwd=ROOT, check=True, timeout=900)
    with open(toy / "out.csv", newline="") as file:
        rows = {(row["before"], row["after"]): row for row in csv.DictReader(file)}
    assert set(rows) == set(PLANTED)
    for fault, (result, test) in PLANTED.items():
        assert rows[fault]["result"] == result, rows[fault]
        assert rows[fault]["by"].startswith(f"tests/all/test_toy.py::{test}" if test else ""), rows[fault]
    with open(toy / "again.csv", newline="") as file:
        assert [row["result"] for row in csv.DictReader(file)].count("survived") == 1
    assert (toy / "toy/formulas.py").read_text() == FORMULAS
    tests = Map.read(toy / "map.json")
    assert not any("wrong" in name for name in tests.tests)
    of_kernel = tests.tests_of("formulas.py", "kernel", [3])
    assert [name.rpartition("::")[2] for name, _ in of_kernel] == ["test_double"]
    assert len([name for name in tests.tests if "test_mean[" in name]) == 2  # sampled


def operators(source):
    return [(fault.operator, fault.before, fault.after) for fault in faults_of(source)]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("x = a + b", ("arithmetic", "a + b", "(a - b)")),
        ("x = a < b", ("compare", "a < b", "(a <= b)")),
        ("x = a and b", ("boolean", "a and b", "(a or b)")),
        ("x = not a", ("not", "not a", "(a)")),
        ("x = -a", ("sign", "-a", "(a)")),
        ("x = 3", ("constant", "3", "(4)")),
        ("x = True", ("constant", "True", "(False)")),
        ("x = y.sum(0)", ("dim", "y.sum(0)", "(y.sum(1))")),
        ("x = y.sum(dim=1)", ("dim", "y.sum(dim=1)", "(y.sum(dim=0))")),
        ("x = f(a, b)", ("swapped", "f(a, b)", "(f(b, a))")),
        ("x = f(a, k=1)", ("keyword", "f(a, k=1)", "(f(a))")),
        ("x = tl.where(a, b, c)", ("where", "tl.where(a, b, c)", "(c)")),
        ("x = tl.load(p, mask=m)", ("mask", "tl.load(p, mask=m)", "(tl.load(p))")),
        ("x = max(a, 1)", ("extreme", "max(a, 1)", "(min(a, 1))")),
        ("x = a.clamp(0)", ("bound", "a.clamp(0)", "(a)")),
        ("x = a.to(d)", ("cast", "a.to(d)", "(a)")),
        ("x[0] = a", ("removed", "x[0] = a", "pass")),
        ("x += a", ("removed", "x += a", "pass")),
        ("if a:\n    raise ValueError", ("removed", "raise ValueError", "pass")),
        ("def f(a):\n    if a:\n        return 1\n    return 2", ("removed", "return 1", "pass")),
        ("if a:\n    b()", ("negated", "a", "(not a)")),
    ],
)
def test_each_operator_makes_its_fault(source, expected):
    assert expected in operators(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""1 + 2"""',
        "def f(a: Tensor | None = None) -> list[3]: ...",
        "x: Tensor | None",
        "Number = Tensor | float",
        "from a import b",
        "x = f'{a + 1}'",
        'x = "a" + b',
        "__all__ = [f(1)]",
    ],
)
def test_texts_and_types_have_no_faults(source):
    assert not operators(source)


def test_every_fault_leaves_a_file_that_parses_and_differs():
    source = (ROOT / "flce_ops/math/statistics.py").read_text()
    for fault in faults_of(source):
        mutated = fault.applied_to(source)
        compile(mutated, "mutated", "exec")
        assert mutated != source


def test_a_line_belongs_to_the_innermost_function():
    functions = functions_of("class A:\n    def f(self):\n        def g():\n            pass\n\nx = 1\n")
    assert [function_at(functions, line)[0] for line in (1, 2, 4, 6)] == ["A", "A.f", "A.f.g", ""]


def test_tests_are_chosen_from_the_quickest_to_the_slowest_of_every_file():
    seconds = {f"{file}::{number:02}": float(number) for file in "ab" for number in range(1, 17)}
    odd = [f"{file}::{number:02}" for number in range(1, 17, 2) for file in "ab"]
    total, expected = 0.0, []
    for name in odd:
        total += seconds[name]
        expected += [name] if total <= SECONDS else []
    assert choose(set(seconds), seconds) == expected
    assert choose({"a::1", "b::2"}, {"a::1": 1.0, "b::2": SECONDS}) == ["a::1"]
    assert choose({"b::2"}, {"b::2": SECONDS + 1}) == ["b::2"]
