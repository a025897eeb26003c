"""The package runs under another name and in another namespace of operators: its code names neither."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "flce_ops"
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def found(what):
    """Lines that hold a node for which `what(node)` is true, docstrings left out."""
    lines = []
    for file, tree in FILES.items():
        nodes = list(ast.walk(tree))
        docstrings = {
            id(node.body[0].value) for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
        }
        lines += [f"{file}:{node.lineno}" for node in nodes if id(node) not in docstrings and what(node)]
    return lines


def text_of(node) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_imports_inside_the_package_are_relative():
    def imports_by_name(node):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module)
        return "flce_ops" in {name.split(".")[0] for name in names}

    assert found(imports_by_name) == []


def test_no_text_of_the_code_is_a_module_of_the_package():
    """importlib.import_module takes ".ops.paths" and the package's name."""
    assert found(lambda node: re.fullmatch(r"flce_ops(\.\w+)+(:\w+)?", text_of(node))) == []


def test_one_file_names_the_namespace_of_the_operators():
    def names_it(node):
        attribute = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.flce"
        return attribute or re.search(r"^flce$|\bflce::|ops\.flce\b", text_of(node))

    assert [line.split(":")[0] for line in found(names_it)] == ["_ops.py"]
