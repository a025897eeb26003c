"""What a head computes instead of its logits: softcap tanh(scale (x W^T + bias) / softcap), and its cross-entropy.

`Loss` is what the model asks of the head: the steps that it applies to the logits, and the options of its
cross-entropy. `Affine` is what the head has: its input and its weight. A step changes scale, bias, softcap or weight.

A head that is more than nn.Linear runs its own forward on `Hidden`, its input, for which F.linear makes an `Affine`. So
PEFT's adapters are what PEFT computes:

    base_layer(x) + lora_B(lora_A(dropout(x))) * scaling       inputs beside each other: [x, s A x], [W, B]
    F.linear(x, W with rows replaced)                          trainable tokens
    (m - 1) * F.linear(x, W) + m * lora_B(lora_A(x))           DoRA: a scale of each class, in copies of the weights
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...distributed import any_dtensor
from ...functional import linear_cross_entropy
from ..sparse_options import sparse_options
from .output_metrics import Metrics

# D hidden, V vocabulary

Step = tuple[str, tuple[Any, ...]]  # the name of a method of Affine, and its arguments


class Loss:
    """The steps between head and cross-entropy, and its options. No container: hooks that cast or copy arguments leave
    it alone.
    """

    def __init__(
        self,
        steps: tuple[Step, ...],
        classes: int,  # after the steps
        metrics: Metrics,
        gradient_threshold: float,
        options: dict[str, Any],  # of linear_cross_entropy
    ) -> None:
        self.steps, self.classes, self.metrics = steps, classes, metrics
        self.gradient_threshold, self.options = gradient_threshold, options

    def after(self, steps: tuple[Step, ...]) -> "Loss":
        """The same loss of logits that get these steps first."""
        return Loss((*steps, *self.steps), self.classes, self.metrics, self.gradient_threshold, self.options)

    def of(self, logits: "Affine", target: Tensor) -> Tensor:
        for name, args in self.steps:
            logits = getattr(logits, name)(*args)
        if logits.inside_tanh is not None:
            refuse("a tanh that is not part of a softcap")
        if logits.weight.shape[0] != self.classes:
            raise ValueError(f"expected the head to have {self.classes} classes, got {tuple(logits.weight.shape)}")
        names, input = self.metrics.names, plain(logits.input)
        of_head: Callable[..., Any] = linear_cross_entropy
        result = of_head(
            input,
            logits.weight,
            target,
            logits.bias,
            softcap=logits.softcap,
            logit_scale=logits.scale,
            **self.options,
            **sparse_options(self.gradient_threshold, input.device),
            **({"return_metrics": names} if names else {}),
        )
        if not names:
            return result
        self.metrics.put(result[1])
        return result[0]


class Affine:
    """softcap tanh(scale (input @ weight.T + bias) / softcap)"""

    def __init__(
        self,
        input: Any,  # (..., D), perhaps Hidden
        weight: Tensor,  # (V, D)
        bias: Tensor | None = None,  # (V,)
        scale: float | Tensor = 1.0,
        softcap: float | None = None,
        divided: tuple[float, float | Tensor] | None = None,  # by the last step: the divisor, the scale before
        inside_tanh: float | None = None,  # the divisor under a tanh that is not multiplied yet
    ) -> None:
        self.input, self.weight, self.bias, self.scale = input, weight, bias, scale
        self.softcap, self.divided, self.inside_tanh = softcap, divided, inside_tanh

    shape = property(lambda self: (*self.input.shape[:-1], self.weight.shape[0]))
    dtype = property(lambda self: self.input.dtype)
    device = property(lambda self: self.input.device)

    def to(self, *args: Any, **options: Any) -> "Affine":
        return self

    float = contiguous = to

    def with_(self, **changes: Any) -> "Affine":
        kept = {name: getattr(self, name) for name in ("input", "weight", "bias", "scale", "softcap", "inside_tanh")}
        return Affine(**kept | changes)

    def multiply(self, factor: Any) -> "Affine":
        if self.inside_tanh is not None:
            if isinstance(factor, Tensor) or factor != self.inside_tanh:
                refuse(f"tanh(logits / {self.inside_tanh}) * {factor}, which is no softcap")
            return self.with_(softcap=factor, inside_tanh=None)
        if self.softcap is not None:
            refuse("a scale after a softcap")
        if isinstance(factor, Tensor) and factor.numel() > 1:
            return self.scaled_classes(factor)
        return self.with_(scale=self.scale * checked_scale(factor))

    def scaled_classes(self, factor: Tensor) -> "Affine":  # (V,) or (1, ..., V)
        if factor.numel() != self.weight.shape[0] or factor.shape[-1] != factor.numel():
            refuse(f"a factor of shape {tuple(factor.shape)}")
        if any_dtensor(self.weight):
            refuse("a factor of each class on a sharded weight")
        factor = factor.flatten()
        weight = (self.weight * factor[:, None]).to(self.weight.dtype)
        return self.with_(weight=weight, bias=None if self.bias is None else self.bias * factor)

    def divide(self, divisor: Any) -> "Affine":
        if isinstance(divisor, Tensor):
            return self.multiply(1 / divisor)
        quotient = self.multiply(1 / checked_scale(divisor))
        return quotient.with_(scale=self.scale / divisor, divided=(divisor, self.scale))

    def tanh(self) -> "Affine":
        if self.divided is None:
            refuse("a tanh that is not part of a softcap")
        divisor, scale = self.divided
        return self.with_(scale=scale, inside_tanh=divisor)

    def add(self, other: Any) -> "Affine":
        if self.softcap is not None or self.inside_tanh is not None:
            refuse("a sum after a softcap")
        if isinstance(other, Affine):
            return self.beside(other)
        classes = self.weight.shape[0]
        if not isinstance(other, Tensor) or other.numel() != classes or other.shape[-1] != classes:
            refuse(f"a sum with {tuple(other.shape) if isinstance(other, Tensor) else other!r}")
        if isinstance(self.scale, Tensor) or self.scale != 1:
            other = other / self.scale
        other = other.flatten().to(self.input.device, self.input.dtype)
        return self.with_(bias=other if self.bias is None else self.bias + other)

    def beside(self, other: "Affine") -> "Affine":
        """The sum of both: of their weights if their inputs are one, otherwise of a product of all features."""
        if other.softcap is not None or other.inside_tanh is not None:
            refuse("a sum after a softcap")
        if any_dtensor(self.input, self.weight, other.input, other.weight):
            raise NotImplementedError("linear_cross_entropy: an adapter on a sharded head is not implemented")
        bias, scale = self.bias, other.scale / self.scale
        if other.bias is not None:
            bias = other.bias * scale if bias is None else bias + other.bias * scale
        weight = other.weight.to(self.weight.dtype)
        if other.input is self.input:
            return self.with_(weight=self.weight + weight * scale, bias=bias)
        left = plain(self.input)
        right = (plain(other.input) * scale).to(left.dtype)
        return self.with_(input=torch.cat([left, right], -1), weight=torch.cat([self.weight, weight], 1), bias=bias)

    def first_classes(self, count: int) -> "Affine":
        return self.with_(weight=self.weight[:count], bias=None if self.bias is None else self.bias[:count])

    def compute(self) -> Tensor:
        """The product. For adapters, where it is an input of another one."""
        return F.linear(plain(self.input), self.weight, self.bias) * self.scale

    __mul__ = __rmul__ = multiply
    __truediv__, __add__, __radd__ = divide, add, add

    def __sub__(self, other: Any) -> "Affine":
        return self.add(-other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return product(*args, **(kwargs or {}))
        if len(args) == 2 and func in (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul):
            return args[1].multiply(args[0])
        if len(args) == 2 and func in (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add):
            return args[1].add(args[0])
        refuse(f"`{getattr(func, '__name__', func)}`")


def product(input: Any, weight: Tensor, bias: Tensor | None = None) -> Affine:
    if isinstance(input, Affine):  # of an adapter's first matrix
        input = input.compute()
    return Affine(input, weight, bias)


class Hidden:
    """The input of a head, for which F.linear only writes its arguments down."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        return (lambda *args, **kwargs: hidden(found(*args, **kwargs))) if callable(found) else found

    def __mul__(self, factor: Any) -> "Hidden":
        return Hidden(self.value * factor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return product(*args, **(kwargs or {}))
        return hidden(func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()}))


def hidden(value: Any) -> Any:
    return Hidden(value) if isinstance(value, Tensor) else value


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Hidden) else value


def checked_scale(factor: Any) -> Any:
    if isinstance(factor, Tensor):
        return factor.reshape(())
    if isinstance(factor, Real) and 0 < abs(float(factor)) < math.inf:  # also numpy's numbers
        return float(factor)
    return refuse(f"a scale that is no finite number other than 0: {factor!r}")


def refuse(what: str) -> Any:
    raise NotImplementedError(f"{what} between head and loss: not implemented without logits; leave it unpatched")
