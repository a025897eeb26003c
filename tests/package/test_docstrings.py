"""Docstrings, of which the API page is made: every argument, in 350 words, with links to pages that exist."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import flce_ops

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = [
    flce_ops.linear_cross_entropy,
    flce_ops.linear_log_probs,
    flce_ops.linear_policy_loss,
    flce_ops.linear_token_loss,
    flce_ops.linear_kl_div,
    flce_ops.cross_entropy,
]
DOCUMENTED = (ast.ClassDef, ast.FunctionDef)


def docstrings():
    """(file, name, docstring) of every function and class of the package."""
    for path in sorted((ROOT / "flce_ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text:
                yield path.relative_to(ROOT), node.name, text


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_docstring_of_a_public_function_has_every_argument(function):
    arguments = inspect.getdoc(function).split("Args:\n")[1].split("\n\nReturns:")[0]
    listed = re.findall(r"^    (\w+(?:, \w+)*):", arguments, re.MULTILINE)
    names = [name for line in listed for name in line.split(", ")]
    assert sorted(names) == sorted(inspect.signature(function).parameters)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_docstring_of_a_public_function_says_what_comes_out_and_where_it_is_from(function):
    text = inspect.getdoc(function)
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises", "Composability", "Source"))


def test_a_docstring_has_at_most_350_words():
    long = [(str(path), name, len(text.split())) for path, name, text in docstrings() if len(text.split()) > 350]
    assert not long


def test_pages_that_docstrings_and_messages_name_exist():
    named = [
        (str(path), page)
        for path in (ROOT / "flce_ops").rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())
    ]
    assert named and not [found for found in named if not (ROOT / found[1]).exists()]


SHARED = """softcap logit_scale temperature target_weight shift normalizer token_weight label_smoothing
    gradient_threshold gradient_mode gradient_seed gradient_class_order""".split()


@pytest.mark.parametrize("name", SHARED)
def test_the_page_of_arguments_has_what_the_docstrings_leave_out(name):
    assert name in inspect.signature(flce_ops.linear_cross_entropy).parameters
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", (ROOT / "docs" / "arguments.md").read_text())
