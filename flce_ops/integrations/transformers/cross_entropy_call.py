"""A forward that computes its own loss: `CrossEntropyLoss()(logits.view(-1, vocab_size), labels.view(-1))`.

No name in the model's module can be replaced for this, so the forward is compiled again with that expression replaced:

    self.flce_cross_entropy(logits, labels.view(-1), vocab_size)

It keeps its globals, decorators and line numbers.
"""

import __future__

import ast
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import cast

from torch import nn

from .definition import is_named
from .instance_forward import has_another_forward


@dataclass(frozen=True)
class CrossEntropy:
    """The loss that the call computes."""

    ignore_index: int = -100
    module: str | None = None  # the attribute of the model that computes it, whose ignore_index is used

    def check(self, model: nn.Module) -> None:
        if self.module is None:
            return
        loss = getattr(model, self.module)
        plain = type(loss) is nn.CrossEntropyLoss and loss.weight is None
        if not plain or loss.reduction != "mean" or loss.label_smoothing != 0:
            raise NotImplementedError(
                f"{type(model).__name__}: expected self.{self.module} to be nn.CrossEntropyLoss() without class "
                f"weights and label smoothing, got {loss!r}; leave the model unpatched"
            )
        if has_another_forward(loss, nn.CrossEntropyLoss.forward):
            raise NotImplementedError(
                f"{type(model).__name__}: expected self.{self.module} to be nn.CrossEntropyLoss() without class "
                "weights and label smoothing, got one with a forward of its own; leave the model unpatched"
            )

    def modules_of(self, model: nn.Module) -> list[nn.Module]:
        loss = None if self.module is None else getattr(model, self.module)
        return [loss] if isinstance(loss, nn.Module) else []

    def ignore_index_of(self, model: nn.Module) -> int:
        return self.ignore_index if self.module is None else getattr(model, self.module).ignore_index


def flattened_logits(call: ast.Call) -> ast.Name | None:
    """`logits` of a call `...(logits.view(-1, vocab_size), labels)`."""
    if len(call.args) != 2 or call.keywords:
        return None
    view = call.args[0]
    if not (isinstance(view, ast.Call) and isinstance(view.func, ast.Attribute) and len(view.args) == 2):
        return None
    flattens = view.func.attr in ("view", "reshape") and ast.unparse(view.args[0]) == "-1" and not view.keywords
    logits = view.func.value
    if not flattens or not isinstance(logits, ast.Name):
        return None
    size = view.args[1]
    if is_own_size(size, logits.id) or not any(is_named(node, logits.id) for node in ast.walk(size)):
        return logits
    return None


def is_own_size(size: ast.expr, logits: str) -> bool:
    return ast.unparse(size) in (f"{logits}.size(-1)", f"{logits}.shape[-1]")


def global_object(expression: ast.expr, names: dict[str, object]) -> object:
    """The object that a dotted global name such as nn.CrossEntropyLoss stands for, or None."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(global_object(expression.value, names), expression.attr, None)
    return None


def with_loss_of_self(forward: Callable, function: ast.FunctionDef, loss_call: ast.Call) -> Callable | None:
    """`forward` with `loss_call`, a node of its definition, replaced; None if that cannot be done."""
    undecorated, decorators = forward, []
    while hasattr(undecorated, "__wrapped__"):
        decorators.append(undecorated)
        undecorated = undecorated.__wrapped__
    if not isinstance(undecorated, FunctionType) or undecorated.__code__.co_freevars:
        return None
    replaced = compiled(undecorated, function, loss_call)
    for decorator in reversed(decorators):
        replaced = redecorated(decorator, replaced)
        if replaced is None:
            return None
    return replaced


def compiled(original: FunctionType, function: ast.FunctionDef, loss_call: ast.Call) -> FunctionType:
    view, target = loss_call.args
    logits, vocab_size = flattened_logits(loss_call), cast(ast.Call, view).args[1]
    if is_own_size(vocab_size, logits.id):
        vocab_size = ast.Constant(None)
    loss_call.func = ast.Attribute(ast.Name("self", ast.Load()), "flce_cross_entropy", ast.Load())
    loss_call.args = [logits, target, vocab_size]
    function.decorator_list = []
    ast.fix_missing_locations(function)
    ast.increment_lineno(function, original.__code__.co_firstlineno - 1)
    # annotations are not evaluated: their names may exist for type checkers only
    flags = __future__.annotations.compiler_flag
    module = compile(ast.Module([function], []), original.__code__.co_filename, "exec", flags, dont_inherit=True)
    code = next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == original.__code__.co_name)
    return copied(original, code, None)


def redecorated(decorator: Callable, inner: FunctionType) -> FunctionType | None:
    """A copy of a decorator's wrapper that wraps `inner` instead."""
    cells = getattr(decorator, "__closure__", None) or ()
    holds = [holds_object(cell, decorator.__wrapped__) for cell in cells]  # type: ignore[attr-defined]
    if not isinstance(decorator, FunctionType) or sum(holds) != 1:
        return None
    cells = tuple(CellType(inner) if hold else cell for hold, cell in zip(holds, cells, strict=True))
    wrapper = copied(decorator, decorator.__code__, cells)
    wrapper.__wrapped__ = inner  # type: ignore[attr-defined]
    return wrapper


def holds_object(cell: CellType, held: object) -> bool:
    try:
        return cell.cell_contents is held
    except ValueError:  # the cell is empty
        return False


def copied(original: FunctionType, code: CodeType, cells: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, cells)
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__qualname__ = original.__qualname__
    copy.__dict__.update(original.__dict__)
    return copy
