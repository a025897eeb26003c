"""Reads from a forward's source what the model does between lm_head and loss.

Language models in Transformers end alike, with optional lines in the middle:

    logits = self.lm_head(hidden_states)                          head         "lm_head"
    logits = logits + self.final_logits_bias                      bias         "final_logits_bias"
    logits = logits / self.config.logits_scaling                  factors      1 / config.logits_scaling
    if self.config.final_logit_softcapping is not None:
        logits = logits / self.config.final_logit_softcapping
        logits = torch.tanh(logits)                               softcap      config.final_logit_softcapping
        logits = logits * self.config.final_logit_softcapping
    loss = self.loss_function(logits=logits, labels=labels, ...)

or, without a shift, in masked language models and encoder-decoders:

    loss = CrossEntropyLoss()(logits.view(-1, vocab_size), labels.view(-1))

Every use of the logits must be one of these, otherwise the model is refused. So no transformation is lost, even in
models and versions that did not exist when this was written.
"""

import ast
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from .cross_entropy_call import (
    CrossEntropy,
    flattened_logits,
    global_object,
    with_loss_of_self,
)
from .definition import (
    NotUnderstood,
    check_self,
    definition_of,
    first_line,
    is_named,
    is_only_target,
    parents_in,
    statement_of,
    without_casts,
)
from .logit_steps import TANH, Head, Step, ordered, softcap_in
from .operand import Names, Operand, Path, path_of


def read_head(forward: Callable) -> Head:
    """The head of a forward. Raises NotUnderstood."""
    return read(forward)[0]


@functools.cache
def read(forward: Callable) -> tuple[Head, Callable]:
    """Returns the head, and a forward that calls self.loss_function or self.flce_cross_entropy for its loss."""
    function, inner = definition_of(forward)
    if "labels" not in [argument.arg for argument in function.args.args]:
        raise NotUnderstood("its forward takes no labels")
    reader = _Reader(function, inner.__globals__)
    head = reader.head()
    if head.cross_entropy is None:
        return head, forward
    rewritten = with_loss_of_self(forward, function, reader.loss_call)
    if rewritten is None:
        raise NotUnderstood("its forward is decorated, or closes over names, in a way that hides its loss")
    return head, rewritten


class _Reader:
    """Reads the statements of one forward, in the order of its lines."""

    def __init__(self, function: ast.FunctionDef, names: dict[str, object]) -> None:
        self.function = function
        self.globals = names
        self.names = Names(function)
        self.parent = parents_in(function)

    def head(self) -> Head:
        check_self(self.function)
        self.loss_call, cross_entropy = self.find_loss()
        assigned = self.head_assignment()
        name = path_of(self.head_call.func)[0]
        self.check_only_called(name)
        steps = self.steps_in(assigned.value) + self.steps_before_loss(assigned)
        unless = self.check_uses()
        bias, factors, softcap = ordered(steps)
        if bias is not None and self.uses_of_attribute(bias) > 1:
            raise NotUnderstood(f"it uses self.{bias} for something else than its logits")
        return Head(name, factors, softcap, bias, cross_entropy, unless)

    def find_loss(self) -> tuple[ast.Call, CrossEntropy | None]:
        calls = self.calls_of("loss_function")
        if len(calls) == 1:
            self.logits = self.name_of_logits(calls[0])
            return calls[0], None
        found = [] if calls else [(call, self.cross_entropy_of(call)) for call in self.all_calls()]
        found = [(call, cross_entropy) for call, cross_entropy in found if cross_entropy is not None]
        if len(found) != 1:
            raise NotUnderstood(
                "it computes its loss by other means than one self.loss_function(logits, labels, ...) or one "
                "CrossEntropyLoss()(logits.view(-1, ...), labels.view(-1))"
            )
        self.logits = flattened_logits(found[0][0]).id
        return found[0]

    def cross_entropy_of(self, call: ast.Call) -> CrossEntropy | None:
        if flattened_logits(call) is None or not any(is_named(node, "labels") for node in ast.walk(call.args[1])):
            return None
        path = path_of(call.func)
        if path is not None:  # an attribute of the model, which is checked when there is a model
            return CrossEntropy(module=path[0]) if len(path) == 1 else None
        if global_object(call.func, self.globals) is F.cross_entropy:
            return CrossEntropy()
        constructed = call.func
        if isinstance(constructed, ast.Name):
            constructed = self.only_assigned(constructed.id)
        if not isinstance(constructed, ast.Call) or constructed.args:
            return None
        options = {keyword.arg: keyword.value for keyword in constructed.keywords}
        try:
            ignore_index = ast.literal_eval(options.pop("ignore_index", ast.Constant(-100)))
        except ValueError:
            return None
        if options or global_object(constructed.func, self.globals) is not nn.CrossEntropyLoss:
            return None
        return CrossEntropy(ignore_index=ignore_index)

    def only_assigned(self, name: str) -> ast.expr | None:
        stored = [n for n in ast.walk(self.function) if is_named(n, name) and isinstance(n.ctx, ast.Store)]
        statement = self.parent[stored[0]] if len(stored) == 1 else None
        return statement.value if isinstance(statement, ast.Assign) else None

    def all_calls(self) -> list[ast.Call]:
        return [node for node in ast.walk(self.function) if isinstance(node, ast.Call)]

    def calls_of(self, attribute: str) -> list[ast.Call]:
        return [call for call in self.all_calls() if path_of(call.func) == (attribute,)]

    def name_of_logits(self, loss_call: ast.Call) -> str:
        given = [keyword.value for keyword in loss_call.keywords if keyword.arg == "logits"] + loss_call.args[:1]
        if not given or not isinstance(given[0], ast.Name):
            raise self.refusal("it gives its loss something else than plain logits", loss_call)
        return given[0].id

    def head_assignment(self) -> ast.Assign:
        """The assignment `logits = self.lm_head(...)`. If there are several, the last: before it, the name held another
        tensor.
        """
        last = None
        for statement in self.function.body:
            if statement.lineno > self.loss_call.lineno:
                break
            if isinstance(statement, ast.Assign) and is_only_target(statement.targets, self.logits):
                call = head_call_in(statement.value)
                if call is not None:
                    last, self.head_call = statement, call
        if last is None:
            first = self.statement_of(self.uses()[0])
            raise self.refusal("its logits do not come from one call of a head", first)
        return last

    def check_only_called(self, name: str) -> None:
        if len(self.calls_of(name)) != 1:
            raise NotUnderstood(f"it calls self.{name} more than once")
        harmless: list[Path] = [(name, "weight", "dtype"), (name, "weight", "device")]
        for node in ast.walk(self.function):
            if isinstance(node, ast.Attribute) and path_of(node) == (name,) and node is not self.head_call.func:
                whole = self.parent[self.parent[node]]
                if path_of(whole) not in harmless:
                    raise self.refusal(f"it uses self.{name} for something else", node)

    def uses_of_attribute(self, name: str) -> int:
        return sum(isinstance(node, ast.Attribute) and path_of(node) == (name,) for node in ast.walk(self.function))

    def steps_before_loss(self, assigned: ast.Assign) -> list[Step]:
        steps: list[Step] = []
        for statement in self.function.body:
            if assigned.lineno < statement.lineno and self.loss_call not in ast.walk(statement):
                if statement.lineno > self.loss_call.lineno:
                    break
                if self.mentions_logits(statement):
                    steps += self.steps_of(statement)
        return steps

    def steps_of(self, statement: ast.stmt) -> list[Step]:
        if isinstance(statement, ast.If) and not statement.orelse:
            steps = [step for inner in statement.body for step in self.steps_of(inner)]
            checked = self.names.checked_for_none(statement.test)
            if checked is not None and softcap_in(steps) == checked:
                return steps
            if checked is not None and steps in ([("*", checked)], [("/", checked)]):
                return [(steps[0][0] + "?", checked)]
        if isinstance(statement, ast.Assign) and is_only_target(statement.targets, self.logits):
            return self.steps_in(statement.value)
        raise self.refusal("it does something to its logits that is neither a scale nor a softcap", statement)

    def steps_in(self, expression: ast.expr) -> list[Step]:
        """The steps that `expression` applies to the logits, innermost first."""
        expression = without_casts(expression)
        if self.is_logits(expression):
            return []
        if isinstance(expression, ast.Call) and len(expression.args) == 1 and not expression.keywords:
            if global_object(expression.func, self.globals) in (torch.tanh, F.tanh):
                return [*self.steps_in(expression.args[0]), TANH]
        if isinstance(expression, ast.BinOp):
            left, right = expression.left, expression.right
            if isinstance(expression.op, (ast.Mult, ast.Add)) and self.operand_of(left) is not None:
                left, right = right, left
            operand = self.operand_of(right)
            if operand is not None and isinstance(expression.op, (ast.Mult, ast.Div)):
                return [*self.steps_in(left), ("*" if isinstance(expression.op, ast.Mult) else "/", operand)]
            if isinstance(operand, tuple) and len(operand) == 1 and isinstance(expression.op, ast.Add):
                return [*self.steps_in(left), ("+", operand)]
        raise self.refusal("it does something to its logits that is neither a scale nor a softcap", expression)

    def operand_of(self, expression: ast.expr) -> Operand | None:
        return self.names.operand_of(without_casts(expression))

    def check_uses(self) -> tuple[Path, ...]:
        """Checks the uses of the logits. Besides the loss, they may only go into the output, or be used if some number
        is above 0. Returns these numbers.
        """
        loss_statement, unless = self.statement_of(self.loss_call), []
        for use in self.uses():
            outer = self.parent[use]
            if self.is_asked_where(use):
                continue
            if use.lineno <= self.loss_call.end_lineno and self.outermost(use) is not self.outermost(loss_statement):
                continue  # head_assignment and steps_before_loss have read these
            if outer is self.loss_call or self.parent[outer] is self.loss_call or self.flattens_for_loss(use):
                continue
            if isinstance(outer, ast.keyword) and outer.arg == "logits" and self.is_returned(self.parent[outer]):
                continue
            if self.only_without_return_dict(use):
                continue
            switch = self.only_above_zero(use)
            if switch is None:
                raise self.refusal("it uses its logits beside the loss", use)
            unless.append(switch)
        return tuple(dict.fromkeys(unless))

    def flattens_for_loss(self, use: ast.Name) -> bool:
        """Whether the use is in `logits.view(-1, logits.size(-1))`, the loss's first argument, which flattened_logits
        has read.
        """
        return flattened_logits(self.loss_call) is not None and use in ast.walk(self.loss_call.args[0])

    def is_returned(self, node: ast.AST) -> bool:
        """Whether the code is `return node`, or `name = node` and then only `return name`."""
        outer = self.parent[node]
        if isinstance(outer, ast.Assign) and len(outer.targets) == 1 and isinstance(outer.targets[0], ast.Name):
            named = [n for n in ast.walk(self.function) if is_named(n, outer.targets[0].id)]
            return len(named) == 2 and isinstance(self.parent[named[1]], ast.Return)
        return isinstance(outer, ast.Return)

    def only_above_zero(self, node: ast.AST) -> Path | None:
        """The number of an `if number > 0` around node, or None."""
        paths = map(self.names.compared_with_zero, self.conditions_of(node))
        return next((path for path in paths if path is not None), None)

    def only_without_return_dict(self, node: ast.AST) -> bool:
        return any(ast.unparse(condition) == "not return_dict" for condition in self.conditions_of(node))

    def conditions_of(self, node: ast.AST) -> Iterator[ast.expr]:
        """The tests of the `if`s around node, from the inside out."""
        while node is not self.function:
            inner, node = node, self.parent[node]
            if isinstance(node, ast.If) and inner in node.body:
                yield node.test

    def uses(self) -> list[ast.Name]:
        names = [n for n in ast.walk(self.function) if is_named(n, self.logits)]
        return sorted(names, key=lambda name: (name.lineno, name.col_offset))

    def is_logits(self, node: ast.AST) -> bool:
        return node is self.head_call or is_named(node, self.logits)

    def mentions_logits(self, node: ast.AST) -> bool:
        return any(self.is_logits(inner) and not self.is_asked_where(inner) for inner in ast.walk(node))

    def is_asked_where(self, logits: ast.AST) -> bool:
        outer = self.parent[logits]
        return isinstance(outer, ast.Attribute) and outer.attr in ("device", "dtype")

    def statement_of(self, node: ast.AST) -> ast.stmt:
        return statement_of(node, self.parent)

    def outermost(self, node: ast.AST) -> ast.AST:
        while self.parent[node] is not self.function:
            node = self.parent[node]
        return node

    def refusal(self, reason: str, node: ast.AST) -> NotUnderstood:
        return NotUnderstood(f"{reason}: `{first_line(self.statement_of(node))}`")


def head_call_in(expression: ast.expr) -> ast.Call | None:
    """The outermost call of an attribute of self in the expression, such as `self.lm_head(hidden)`."""
    for call in ast.walk(expression):  # ast.walk yields outer calls first
        if isinstance(call, ast.Call) and len(path_of(call.func) or ()) == 1:
            return call if len(call.args) == 1 and not call.keywords else None
    return None
