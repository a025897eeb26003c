"""What a model's forward does between lm_head and loss, read from its source.

Causal language models of Transformers end alike, with lines of their own in the middle:

    logits = self.lm_head(hidden_states)                          head         "lm_head"
    logits = logits / self.config.logits_scaling                  factors      1 / config.logits_scaling
    if self.config.final_logit_softcapping is not None:
        logits = logits / self.config.final_logit_softcapping
        logits = torch.tanh(logits)                               softcap      config.final_logit_softcapping
        logits = logits * self.config.final_logit_softcapping
    loss = self.loss_function(logits=logits, labels=labels, ...)

Every place that uses the logits is either one of these or makes the model be refused, so no transformation is lost,
also in models and versions that did not exist when this was written.
"""

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

Operand = tuple[str, ...] | float  # ("config", "logits_scaling") stands for self.config.logits_scaling
TANH = "tanh"
Step = str | tuple[str, Operand]  # TANH, ("*", operand) or ("/", operand)


@dataclass(frozen=True)
class Head:
    """logits = softcap * tanh(factors * self.<name>(hidden) / softcap)."""

    name: str
    factors: tuple[Step, ...] = ()
    softcap: Operand | None = None

    def logit_scale(self, model: nn.Module) -> float:
        scale = 1.0
        for operation, operand in self.factors:
            value = number(model, operand)
            scale = scale * value if operation == "*" else scale / value
        return scale

    def softcap_of(self, model: nn.Module) -> float | None:
        if self.softcap is None or lookup(model, self.softcap) is None:
            return None
        return number(model, self.softcap)


def lookup(model: nn.Module, operand: Operand) -> object:
    if not isinstance(operand, tuple):
        return operand
    value = model
    for attribute in operand:
        value = getattr(value, attribute)
    return value


def number(model: nn.Module, operand: Operand) -> float:
    value = lookup(model, operand)
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value == 0:
        raise NotImplementedError(
            f"{type(model).__name__}: expected self.{'.'.join(operand)}, a scale of its logits, to be a finite number "
            f"other than 0, got {value!r}; leave the model unpatched"
        )
    return value


class NotUnderstood(Exception):
    """Why this forward cannot run without logits."""


@functools.cache
def read_head(forward: Callable) -> Head:
    """Raises NotUnderstood."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
    except (OSError, TypeError) as error:
        raise NotUnderstood(f"the source of its forward cannot be read ({error})") from error
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        raise NotUnderstood("its forward is not a plain function")
    if "labels" not in [argument.arg for argument in function.args.args]:
        raise NotUnderstood("its forward takes no labels")
    return _Reader(function).head()


class _Reader:
    """Statements of one forward, in the order of its lines."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.parent = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}

    def head(self) -> Head:
        self.check_self()
        loss_call = self.only_call_of("loss_function", "computes its loss by other means than one self.loss_function")
        self.logits = self.name_of_logits(loss_call)
        assigned = self.head_assignment()
        name = path_of(self.head_call.func)[0]
        self.check_only_called(name)
        steps = self.steps_in(assigned.value) + self.steps_before(loss_call, assigned)
        self.check_uses(loss_call)
        return factors_and_softcap(name, steps)

    def check_self(self) -> None:
        """forward sees a stand-in for self, so it may only read attributes of it."""
        for node in ast.walk(self.function):
            if isinstance(node, ast.Name) and node.id == "super":
                raise NotUnderstood("its forward calls super()")
            if isinstance(node, ast.Name) and node.id == "self":
                outer = self.parent[node]
                if not (isinstance(outer, ast.Attribute) and isinstance(outer.ctx, ast.Load)):
                    raise self.refusal("its forward passes on or changes self", node)

    def calls_of(self, attribute: str) -> list[ast.Call]:
        return [n for n in ast.walk(self.function) if isinstance(n, ast.Call) and path_of(n.func) == (attribute,)]

    def only_call_of(self, attribute: str, otherwise: str) -> ast.Call:
        calls = self.calls_of(attribute)
        if len(calls) != 1:
            raise NotUnderstood(f"it {otherwise}")
        return calls[0]

    def name_of_logits(self, loss_call: ast.Call) -> str:
        given = [keyword.value for keyword in loss_call.keywords if keyword.arg == "logits"] + loss_call.args[:1]
        if not given or not isinstance(given[0], ast.Name):
            raise self.refusal("it gives its loss something else than plain logits", loss_call)
        return given[0].id

    def head_assignment(self) -> ast.Assign:
        """`logits = self.lm_head(...)`, the first statement about the logits."""
        first = self.statement_of(self.uses()[0])
        if isinstance(first, ast.Assign) and self.parent[first] is self.function:
            for call in ast.walk(first.value):  # outer calls first
                if isinstance(call, ast.Call) and len(path_of(call.func) or ()) == 1:
                    if len(call.args) == 1 and not call.keywords:
                        self.head_call = call
                        return first
                    break
        raise self.refusal("its logits do not come from one call of a head", first)

    def check_only_called(self, name: str) -> None:
        call = self.only_call_of(name, f"calls self.{name} more than once")
        for node in ast.walk(self.function):
            if isinstance(node, ast.Attribute) and path_of(node) == (name,) and node is not call.func:
                raise self.refusal(f"it uses self.{name} for something else", node)

    def steps_before(self, loss_call: ast.Call, assigned: ast.Assign) -> list[Step]:
        steps: list[Step] = []
        for statement in self.function.body:
            if assigned.lineno < statement.lineno and loss_call not in ast.walk(statement):
                if statement.lineno > loss_call.lineno:
                    break
                if self.mentions_logits(statement):
                    steps += self.steps_of(statement)
        return steps

    def steps_of(self, statement: ast.stmt) -> list[Step]:
        if isinstance(statement, ast.If) and not statement.orelse:
            steps = [step for inner in statement.body for step in self.steps_of(inner)]
            if softcap_in(steps) is not None and len(steps) == 3 and checked_for_none(statement.test) == steps[0][1]:
                return steps
        if isinstance(statement, ast.Assign) and is_name(statement.targets, self.logits):
            return self.steps_in(statement.value)
        raise self.refusal("it does something to its logits that is neither a scale nor a softcap", statement)

    def steps_in(self, expression: ast.expr) -> list[Step]:
        """What `expression` does to the logits, innermost first."""
        expression = without_casts(expression)
        if self.is_logits(expression):
            return []
        if isinstance(expression, ast.Call) and ast.unparse(expression.func) == "torch.tanh":
            return [*self.steps_in(expression.args[0]), TANH]
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Mult, ast.Div)):
            multiplies = isinstance(expression.op, ast.Mult)
            left, right = expression.left, expression.right
            if multiplies and operand_of(left) is not None:
                left, right = right, left
            operand = operand_of(right)
            if operand is not None:
                return [*self.steps_in(left), ("*" if multiplies else "/", operand)]
        raise self.refusal("it does something to its logits that is neither a scale nor a softcap", expression)

    def check_uses(self, loss_call: ast.Call) -> None:
        """After the loss, the logits may only go into the output."""
        loss_statement = self.statement_of(loss_call)
        for use in self.uses():
            outer = self.parent[use]
            if isinstance(outer, ast.Attribute) and outer.attr in ("device", "dtype"):
                continue
            if use.lineno <= loss_call.end_lineno and self.outermost(use) is not self.outermost(loss_statement):
                continue  # head_assignment and steps_before have read these
            if outer is loss_call or self.parent[outer] is loss_call:
                continue
            if isinstance(outer, ast.keyword) and outer.arg == "logits" and self.is_returned(self.parent[outer]):
                continue
            if isinstance(outer, ast.Tuple) and self.only_without_return_dict(use):
                continue
            raise self.refusal("it uses its logits beside the loss", use)

    def is_returned(self, node: ast.AST) -> bool:
        return isinstance(self.parent[node], ast.Return)

    def only_without_return_dict(self, node: ast.AST) -> bool:
        while node is not self.function:
            node = self.parent[node]
            if isinstance(node, ast.If) and ast.unparse(node.test) == "not return_dict":
                return True
        return False

    def uses(self) -> list[ast.Name]:
        names = [n for n in ast.walk(self.function) if isinstance(n, ast.Name) and n.id == self.logits]
        return sorted(names, key=lambda name: (name.lineno, name.col_offset))

    def is_logits(self, node: ast.AST) -> bool:
        return node is self.head_call or (isinstance(node, ast.Name) and node.id == self.logits)

    def mentions_logits(self, node: ast.AST) -> bool:
        return any(self.is_logits(inner) for inner in ast.walk(node))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node

    def outermost(self, node: ast.AST) -> ast.AST:
        while self.parent[node] is not self.function:
            node = self.parent[node]
        return node

    def refusal(self, reason: str, node: ast.AST) -> NotUnderstood:
        line = ast.unparse(self.statement_of(node)).splitlines()[0]
        return NotUnderstood(f"{reason}: `{line}`")


def factors_and_softcap(name: str, steps: list[Step]) -> Head:
    """The operator scales first and caps last."""
    softcap = softcap_in(steps[-3:])
    factors = steps if softcap is None else steps[:-3]
    if TANH in factors:
        raise NotUnderstood("the tanh over its logits is not the last step of a softcap")
    return Head(name, tuple(factors), softcap)


def softcap_in(steps: list[Step]) -> Operand | None:
    """c of the three steps / c, tanh, * c."""
    if len(steps) == 3 and steps[1] == TANH and steps[0][0] == "/" and steps[2] == ("*", steps[0][1]):
        return steps[0][1]
    return None


def without_casts(expression: ast.expr) -> ast.expr:
    """Logits in float32 are what the operator computes anyway."""
    while (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Attribute)
        and expression.func.attr in ("float", "contiguous")
        and not expression.args
    ):
        expression = expression.func.value
    return expression


def path_of(expression: ast.expr) -> tuple[str, ...] | None:
    """("config", "logits_scaling") of self.config.logits_scaling."""
    names = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    return tuple(reversed(names)) if isinstance(expression, ast.Name) and expression.id == "self" and names else None


def operand_of(expression: ast.expr) -> Operand | None:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, (int, float)):
        return float(expression.value)
    return path_of(expression)


def checked_for_none(test: ast.expr) -> Operand | None:
    """x of `self.x is not None`."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and len(test.ops) == 1:
        compared = test.comparators[0]
        if isinstance(compared, ast.Constant) and compared.value is None:
            return path_of(test.left)
    return None


def is_name(targets: list[ast.expr], name: str) -> bool:
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name
