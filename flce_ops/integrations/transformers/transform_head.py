"""A head that transforms the hidden states before its linear layer, as in masked language models:

    def forward(self, hidden_states):
        hidden_states = self.transform(hidden_states)
        return self.decoder(hidden_states)                 inner head: "decoder", plus perhaps self.bias

With targets, the head's own forward runs on a stand-in, inside the head's hooks. The stand-in's `decoder` gets the
targets, too, and so returns the loss.
"""

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .definition import (
    NotUnderstood,
    check_self,
    definition_of,
    first_line,
    is_named,
    is_only_target,
)
from .operand import path_of


@dataclass(frozen=True)
class Inner:
    name: str
    bias: str | None = None  # an attribute that is added to the inner head's result


INNER: dict[type, Inner] = {}  # for classes read so far; torch.compile cannot read sources


def inner_of(head: nn.Module) -> Inner:
    """The inner head. Raises NotUnderstood."""
    if type(head) not in INNER:
        forward = type(head).forward
        INNER[type(head)] = read_inner(getattr(forward, "flce_original", forward))
    return INNER[type(head)]


def transform_then_loss(
    self: nn.Module,
    *args,
    target: Tensor | None = None,
    **options,
) -> Tensor:  # logits, or the loss ()
    if target is None:
        return type(self).forward(self, *args, **options)
    return type(self).forward(WithTargets(self, inner_of(self), target, options), *args)


transform_then_loss.flce_original = nn.Module.forward  # type: ignore[attr-defined]


class WithTargets:
    """Stands in for `head` during one forward."""

    def __init__(self, head: nn.Module, inner: Inner, target: Tensor, options: dict[str, object]) -> None:
        self.flce_head = head
        if inner.bias is not None:
            bias, given = getattr(head, inner.bias), options.get("logits_bias")
            options = options | {"logits_bias": bias if given is None else bias + given}
            setattr(self, inner.bias, 0.0)
        setattr(self, inner.name, functools.partial(getattr(head, inner.name), target=target, **options))

    def __getattr__(self, name: str):
        return getattr(self.flce_head, name)


@torch.compiler.disable(reason="a patched class reads a head at its first loss, which must run in eager mode")
def read_inner(forward: Callable) -> Inner:
    """The inner head of a forward that ends in `return self.decoder(hidden)`, on one line or several."""
    function, _ = definition_of(forward)
    check_self(function)
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0] is not function.body[-1] or returns[0].value is None:
        raise NotUnderstood("it does not end in the one return of a head")
    returned = returns[0].value
    for statement in reversed(function.body[:-1]):
        if not isinstance(returned, ast.Name):
            break
        if isinstance(statement, ast.Assign) and is_only_target(statement.targets, returned.id):
            returned = statement.value
        elif any(is_named(node, returned.id) for node in ast.walk(statement)):
            raise NotUnderstood(f"it does something else to what it returns: `{first_line(statement)}`")
    bias = None
    if isinstance(returned, ast.BinOp) and isinstance(returned.op, ast.Add):
        path, returned = path_of(returned.right), returned.left
        if path is None or len(path) != 1:
            raise NotUnderstood(f"it returns more than a linear layer: `{first_line(returns[0])}`")
        bias = path[0]
    path = None
    if isinstance(returned, ast.Call) and len(returned.args) == 1 and not returned.keywords:
        path = path_of(returned.func)
    if path is None or len(path) != 1:
        raise NotUnderstood(f"it returns more than a linear layer: `{first_line(returns[0])}`")
    read = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    for name in (path[0], bias):
        if name is not None and sum(path_of(node) == (name,) for node in read) != 1:
            raise NotUnderstood(f"it uses self.{name} more than once")
    return Inner(path[0], bias)
