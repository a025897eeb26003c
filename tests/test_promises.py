"""PROMISES.md leads from every promise of README to a test that is there."""

import ast
import re
from pathlib import Path

import pytest
from test_documents import anchors_of

TESTS = Path(__file__).resolve().parent
README = (TESTS.parent / "README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (TESTS / "PROMISES.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| promise")
]
SECTIONS = dict(re.findall(r"^#+ (.*)\n((?:(?!#+ ).*\n?)*)", re.sub(r"```.*?```", "", README, flags=re.DOTALL), re.M))
OF_PROMISES = ("Arguments", "What composes", "Which path runs", "Cost")  # each row of whose tables is one


def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_promise_names_tests_that_exist(row):
    promise, section, tests = row
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("`") / 2 > 0
    assert not [name for file, name in named if name not in functions_of(file)]


def test_every_section_of_the_readme_has_its_promises_in_their_order():
    sections = [re.fullmatch(r"\[(.*)\]\(\.\./README\.md#(.*)\)", section).groups() for _, section, _ in ROWS]
    assert list(dict.fromkeys(name for name, _ in sections)) == list(SECTIONS)
    assert [name for name, _ in sections] == sorted((name for name, _ in sections), key=list(SECTIONS).index)
    assert {anchor for _, anchor in sections} <= anchors_of(README)


@pytest.mark.parametrize("section", OF_PROMISES)
def test_every_row_of_a_table_of_promises_is_one(section):
    _, *table = re.findall(r"^\|(.*?)(?: \[\^\d+\])? *\|", SECTIONS[section], re.MULTILINE)
    cells = [cell.strip() for cell in table if not cell.startswith("---")]
    listed = [promise for promise, of, _ in ROWS if of.startswith(f"[{section}]")]
    assert cells == [promise for promise in listed if promise in cells]


def test_every_limit_has_a_row():
    assert sum(section.startswith("[Limits]") for _, section, _ in ROWS) >= SECTIONS["Limits"].count("\n- ")
