"""Imports inside the package follow the layers of DESIGN.md, without exceptions and without cycles of files."""

import graphlib
import re
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp")

# From the user-facing layer downwards. A layer imports only those below it. Names in one line do not import each other.
LAYERS = (
    {"__main__", "check", "integrations", "parallel", "plan"},
    {"modules"},
    {"functional"},
    {"entry"},
    {"distributed"},
    {"ops"},
    {"aten", "triton"},
    {"meta"},
    {"objectives"},
    {"math"},
    {"support"},
    {"_ops", "version"},
)


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("flce_ops", cache_dir=None)


def test_every_module_has_a_layer(graph):
    assert graph.find_children("flce_ops") == {f"flce_ops.{name}" for layer in LAYERS for name in layer}


def test_the_diagram_of_the_design_is_these_layers():
    text = (Path(__file__).resolve().parents[2] / "DESIGN.md").read_text()
    (diagram,) = re.findall(r"do not import each other:\n\n(.*?)\n\n", text, re.DOTALL)
    rows = re.findall(r"^ {4}(\w+(?: \| \w+)*)", diagram, re.MULTILINE)
    assert [set(row.split(" | ")) for row in rows] == list(LAYERS)


def test_imports_only_go_down(graph):
    """Imports inside functions count, too."""
    found = graph.find_illegal_dependencies_for_layers(layers=LAYERS, containers={"flce_ops"})
    assert not [f"{route.heads} -> {route.tails}" for dependency in found for route in dependency.routes]


def test_no_circle_of_files(graph):
    """A package's __init__ imports its own files and is left out."""
    packages = {module for module in graph.modules if graph.find_children(module)}
    files = {
        module: {found for found in graph.find_modules_directly_imported_by(module) if found not in packages}
        for module in graph.modules - packages
    }
    graphlib.TopologicalSorter(files).prepare()  # raises CycleError with the cycle
