"""The definition of a forward as a syntax tree, and questions about it that do not depend on the model."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import TypeGuard


class NotUnderstood(Exception):
    """Why this forward cannot run without logits."""


def definition_of(forward: Callable) -> tuple[ast.FunctionDef, Callable]:
    """Returns the definition, and the function inside its decorators."""
    inner = inspect.unwrap(forward)
    try:
        source = textwrap.dedent(inspect.getsource(inner))
    except (OSError, TypeError) as error:
        raise NotUnderstood(f"the source of its forward cannot be read ({error})") from error
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        raise NotUnderstood("its forward is not a plain function")
    return function, inner


def check_self(function: ast.FunctionDef) -> None:
    """Checks that forward only reads attributes of self, because it will see a stand-in."""
    parent = parents_in(function)
    for node in ast.walk(function):
        if is_named(node, "super"):
            raise NotUnderstood("its forward calls super()")
        if is_named(node, "self"):
            outer = parent[node]
            if not (isinstance(outer, ast.Attribute) and isinstance(outer.ctx, ast.Load)):
                line = first_line(statement_of(node, parent))
                raise NotUnderstood(f"its forward passes on or changes self: `{line}`")


def without_casts(expression: ast.expr) -> ast.expr:
    """Removes casts and moves: the operator computes in float32 anyway, and a move to the logits' own device changes
    nothing.
    """
    while isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) and not expression.keywords:
        arguments = [argument.attr for argument in expression.args if isinstance(argument, ast.Attribute)]
        plain = expression.func.attr in ("float", "contiguous") and not expression.args
        moved = expression.func.attr == "to" and arguments == ["device"]
        if not plain and not moved:
            break
        expression = expression.func.value
    return expression


def parents_in(function: ast.FunctionDef) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}


def statement_of(node: ast.AST, parent: dict[ast.AST, ast.AST]) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = parent[node]
    return node


def first_line(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0]


def is_only_target(targets: list[ast.expr], name: str) -> bool:
    return len(targets) == 1 and is_named(targets[0], name)


def is_named(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name
