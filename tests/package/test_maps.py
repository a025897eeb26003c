"""Each folder's map, the docstring of its `__init__.py`, names every file of the folder once, and no other file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "flce_ops/*",
    "flce_ops/integrations/*",
    "flce_ops/triton/*",
    "tests/fuzz",
    "tests/mutation",
)  # flce_ops itself: DESIGN.md, test_layers.py
MAPS = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(f"{folder}/__init__.py"))


@pytest.mark.parametrize("name", MAPS)
def test_a_folders_map_names_its_files(name):
    folder = (ROOT / name).parent
    docstring = ast.get_docstring(ast.parse((ROOT / name).read_text()))
    named = re.findall(r"(?<![\w/])(\w+\.py(?!')|\w+/(?=\s))", docstring)
    files = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
    folders = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
    assert sorted(named) == sorted(files + folders)


def test_the_folders_of_tests_are_named():
    docstring = ast.get_docstring(ast.parse((ROOT / "tests/conftest.py").read_text()))
    folders = {path.name for path in (ROOT / "tests").iterdir() if list(path.glob("*.py"))}
    assert set(re.findall(r"(?<![\w/])(\w+)/(?=\s)", docstring)) == folders
