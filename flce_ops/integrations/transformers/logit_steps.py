"""The steps (bias, scale, softcap) that a model applies to its head's output before the loss, in the order in which the
operator applies them.
"""

from dataclasses import dataclass
from typing import cast

from torch import nn

from .cross_entropy_call import CrossEntropy
from .definition import NotUnderstood
from .operand import Operand, Path, lookup, number, written

# ("*", operand), ("/", operand), ("+", path). "*?" and "/?" do nothing if the operand is None.
Step = tuple[str, Operand]
TANH: Step = ("tanh", ())


@dataclass(frozen=True)
class Head:
    """logits = softcap * tanh(factors * (self.<name>(hidden) + self.<bias>) / softcap)."""

    name: str
    factors: tuple[Step, ...] = ()
    softcap: Operand | None = None
    bias: str | None = None
    cross_entropy: CrossEntropy | None = None  # None: self.loss_function
    unless: tuple[Path, ...] = ()  # numbers which, if above 0, add a term to the loss that needs the logits

    def logit_scale(self, model: nn.Module) -> float:
        scale = 1.0
        for operation, operand in self.factors:
            if operation.endswith("?") and lookup(model, operand) is None:
                continue
            value = number(model, operand)
            scale = scale * value if operation.startswith("*") else scale / value
        return scale

    def softcap_of(self, model: nn.Module) -> float | None:
        if self.softcap is None or lookup(model, self.softcap) is None:
            return None
        return number(model, self.softcap)

    def modules_of_loss(self, model: nn.Module) -> list[nn.Module]:
        """Modules that the model's own forward calls with logits, and that do not run without them."""
        return [] if self.cross_entropy is None else self.cross_entropy.modules_of(model)

    def check(self, model: nn.Module) -> None:
        for path in self.unless:
            if lookup(model, path) > 0:
                raise NotImplementedError(
                    f"{type(model).__name__}: {written(path)} is {lookup(model, path)}, and above 0 its loss has a "
                    "term that needs the logits; leave the model unpatched"
                )
        if self.cross_entropy is not None:
            self.cross_entropy.check(model)


def ordered(steps: list[Step]) -> tuple[str | None, tuple[Step, ...], Operand | None]:
    """Splits the steps into bias, factors and softcap. The operator adds the bias first, then scales, then caps."""
    bias = None
    if steps and steps[0][0] == "+":
        (bias,) = cast(Path, steps[0][1])
        steps = steps[1:]
    softcap = softcap_in(steps[-3:])
    factors = steps if softcap is None else steps[:-3]
    if TANH in factors:
        raise NotUnderstood("the tanh over its logits is not the last step of a softcap")
    if any(operation == "+" for operation, _ in factors):
        raise NotUnderstood("it adds to its logits after another step")
    return bias, tuple(factors), softcap


def softcap_in(steps: list[Step]) -> Operand | None:
    """c, if the steps are / c, tanh, * c."""
    if len(steps) == 3 and steps[1] == TANH and steps[0][0] == "/" and steps[2] == ("*", steps[0][1]):
        return steps[0][1]
    return None
