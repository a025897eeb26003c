"""Numbers that a forward reads from its model, such as `self.config.get_text_config().final_logit_softcapping`.

They are parsed from the source as paths, and looked up on the model when a loss is computed:

    self.config.logits_scaling                    ("config", "logits_scaling")
    self.config.get_text_config().cap             ("config", "get_text_config()", "cap")
    getattr(self.config, "cap", None)             ("config", "cap?")
    cap = self.config.cap; ... cap                ("config", "cap")
"""

import ast
import math
from typing import Any

from torch import nn

Path = tuple[str, ...]
Operand = Path | float


def lookup(model: nn.Module, operand: Operand) -> Any:
    if not isinstance(operand, tuple):
        return operand
    value = model
    for step in operand:
        if step.endswith("()"):
            value = getattr(value, step[:-2])()
        elif step.endswith("?"):
            value = getattr(value, step[:-1], None)
        else:
            value = getattr(value, step)
    return value


def number(model: nn.Module, operand: Operand) -> float:
    value = lookup(model, operand)
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value == 0:
        raise NotImplementedError(
            f"{type(model).__name__}: expected {written(operand)}, a scale of its logits, to be a finite number "
            f"other than 0, got {value!r}; leave the model unpatched"
        )
    return value


def written(operand: Operand) -> str:
    return f"self.{'.'.join(operand)}" if isinstance(operand, tuple) else repr(operand)


class Names:
    """The local names of a forward that stand for such paths. Each is assigned once, before any branch.

    A walrus in the test of a top-level `if` counts, because it runs as often as the test itself.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        stored = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and is_stored(node)]
        stored += [argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)]
        self.paths: dict[str, Path] = {}
        for statement in function.body:
            for name, value in assignments_of(statement):
                path = self.path_of(value)
                if path is not None and stored.count(name) == 1:
                    self.paths[name] = path

    def path_of(self, expression: ast.expr) -> Path | None:
        if isinstance(expression, ast.Name):
            return self.paths.get(expression.id)
        if isinstance(expression, ast.NamedExpr):
            return self.path_of(expression.value)
        if isinstance(expression, ast.Attribute):
            return self.longer(expression.value, expression.attr)
        if isinstance(expression, ast.Call) and not expression.keywords:
            called, arguments = expression.func, expression.args
            if isinstance(called, ast.Attribute) and called.attr.startswith("get_") and not arguments:
                return self.longer(called.value, called.attr + "()")
            if isinstance(called, ast.Name) and called.id == "getattr" and len(arguments) == 3:
                name = arguments[1].value if isinstance(arguments[1], ast.Constant) else None
                if isinstance(name, str) and is_none(arguments[2]):
                    return self.longer(arguments[0], f"{name}?")
        return None

    def longer(self, owner: ast.expr, step: str) -> Path | None:
        if isinstance(owner, ast.Name) and owner.id == "self":
            return (step,)
        path = self.path_of(owner)
        return None if path is None else (*path, step)

    def operand_of(self, expression: ast.expr) -> Operand | None:
        if isinstance(expression, ast.Constant) and isinstance(expression.value, (int, float)):
            return float(expression.value)
        return self.path_of(expression)

    def checked_for_none(self, test: ast.expr) -> Path | None:
        """x, if the test is `x is not None`."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot):
            if is_none(test.comparators[0]):
                return self.path_of(test.left)
        return None

    def compared_with_zero(self, test: ast.expr) -> Path | None:
        """x, if the test is `x > 0`."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Gt):
            compared = test.comparators[0]
            if isinstance(compared, ast.Constant) and compared.value == 0:
                return self.path_of(test.left)
        return None


def assignments_of(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return [(statement.targets[0].id, statement.value)]
    if isinstance(statement, ast.If):
        test = statement.test.left if isinstance(statement.test, ast.Compare) else statement.test
        if isinstance(test, ast.NamedExpr):
            return [(test.target.id, test.value)]
    return []


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, (ast.Store, ast.Del))


def is_none(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is None


def path_of(expression: ast.AST) -> Path | None:
    """For example ("config", "logits_scaling") for self.config.logits_scaling."""
    names = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    return tuple(reversed(names)) if isinstance(expression, ast.Name) and expression.id == "self" and names else None
