"""PROMISES.md links every promise of README, and of the pages beside it, to an existing test."""

import ast
import re
from pathlib import Path

import pytest
from test_documents import anchors_of

TESTS = Path(__file__).resolve().parents[1]
README = TESTS.parent / "README.md"
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (TESTS / "PROMISES.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| promise")
]
# each row of these tables is a promise
TABLES = [("README.md", "What composes"), ("docs/paths.md", "Which path runs"), ("docs/paths.md", "GEMM passes")]


def sections_of(file: Path) -> dict[str, str]:
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    return dict(re.findall(r"^#+ (.*)\n((?:(?!#+ ).*\n?)*)", text, re.M))


def places() -> list[tuple[str, str, str]]:
    """Returns (section, file, anchor) of each row."""
    return [re.fullmatch(r"\[(.*)\]\(\.\./(.*)#(.*)\)", section).groups() for _, section, _ in ROWS]


def functions_of(file: str) -> set[str]:
    return {
        node.name for node in ast.parse(next(TESTS.rglob(file)).read_text()).body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_promise_names_tests_that_exist(row):
    promise, section, tests = row
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("`") / 2 > 0
    assert not [name for file, name in named if name not in functions_of(file)]


def test_every_section_of_the_readme_has_its_promises_in_their_order():
    sections = [section for section, file, _ in places() if file == "README.md"]
    says_something = [name for name, text in sections_of(README).items() if text.strip()]
    assert list(dict.fromkeys(sections)) == says_something
    assert sections == sorted(sections, key=says_something.index)


def test_the_sections_that_rows_lead_to_exist():
    assert not [
        (file, anchor) for _, file, anchor in places() if anchor not in anchors_of((README.parent / file).read_text())
    ]


@pytest.mark.parametrize(("file", "section"), TABLES)
def test_every_row_of_a_table_of_promises_is_one(file, section):
    text = sections_of(README.parent / file)[section]
    _, *table = re.findall(r"^\|(.*?)(?: \[\^\d+\])? *\|", text, re.MULTILINE)
    cells = [cell.strip() for cell in table if not cell.startswith("---")]
    listed = [row[0] for row, place in zip(ROWS, places()) if place[:2] == (section, file)]
    assert cells == [promise for promise in listed if promise in cells]


def test_every_limit_has_a_row():
    limits = sections_of(README)["Limits"].count("\n- ")
    assert sum(place[:2] == ("Limits", "README.md") for place in places()) >= limits
