"""The arguments by group: operands, and what a row of logits is made of.

    u_ij  = input_i . linear_weight_j + linear_bias_j
    z_ij  = softcap tanh(logit_scale u_ij / softcap)                 LogitOptions; without softcap: logit_scale u_ij

Inside, numbers are 0-d tensors in the accumulation dtype, and None where they do nothing.
A number in a compiled graph is a constant of it: another value is another compilation. A 0-d tensor is an input.
torch.compile turns a Python float that changed between two calls into a SymFloat, and arithmetic of a tensor with a
SymFloat into an input of the graph, so that from the third value on a graph is found that fits.

    logit_scale = 30, softcap = None   ->   tensor(30.), None          None: the option is off and costs nothing
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nextafter, ulp
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import SymFloat, Tensor

from .precision import accumulation_dtype
from .sparse_gradient import SparseGradient

# N tokens, K classes, D hidden, V vocabulary (a rank's part of it where it is sharded)


CLASSES_PER_MAXIMUM = 128  # a tile of the Triton kernels has at least so many


def saved_columns(num_classes: int, dtype: torch.dtype) -> int:
    """16-bit columns of a row of saved logits, which starts on 16 bytes.

    V numbers of the operands' dtype and a float32 for each tile; what is in them is the kernels' own
    (flce_ops/triton/steps/quantized_logits.py, flce_ops/aten/chunks.py).
    """
    numbers, maxima = (num_classes + 7) // 8, (num_classes + 4 * CLASSES_PER_MAXIMUM - 1) // (4 * CLASSES_PER_MAXIMUM)
    return 4 * dtype.itemsize * (numbers + maxima)


class Operands(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (N,), or (N, K)
    linear_bias: Tensor | None = None  # (V,)
    weight: Tensor | None = None  # (V,), class weights

    @property
    def num_classes(self) -> int:
        return self.linear_weight.shape[0]

    @property
    def saved_columns(self) -> int:
        return saved_columns(self.linear_weight.shape[0], self.input.dtype)


class LowRankOperands(NamedTuple):
    """Of logits  class_scale (input @ linear_weight.T + low_rank_input @ low_rank_weight.T)  (+ linear_bias)."""

    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    low_rank_input: Tensor  # (N, r)
    low_rank_weight: Tensor  # (V, r)
    target: Tensor  # (N,)
    linear_bias: Tensor | None = None  # (V,)
    weight: Tensor | None = None  # (V,), class weights
    class_scale: Tensor | None = None  # (V,), that of DoRA

    @property
    def head(self) -> Operands:
        """Without the pair."""
        return Operands(self.input, self.linear_weight, self.target, self.linear_bias, self.weight)

    @property
    def concatenated(self) -> Operands:
        """The same logits by one product, at the price of a copy of linear_weight."""
        input = torch.cat([self.input, self.low_rank_input], -1)
        linear_weight = self.unscaled_weight
        if self.class_scale is not None:
            linear_weight = (linear_weight * self.class_scale[:, None]).to(linear_weight.dtype)
        return Operands(input, linear_weight, self.target, self.linear_bias, self.weight)

    @property
    def unscaled_weight(self) -> Tensor:  # (V, D + r)
        return torch.cat([self.linear_weight, self.low_rank_weight], 1)


class LogitOperands(NamedTuple):
    """Of a loss of logits that are given."""

    logits: Tensor  # (N, V)
    target: Tensor  # (N,)
    weight: Tensor | None = None  # (V,), class weights

    @property
    def num_classes(self) -> int:
        return self.logits.shape[1]


def changed(values: Any, change: Callable[[Tensor], Any]) -> Any:
    """A named tuple of tensors, each changed but for those that are None."""
    return type(values)(*(None if value is None else change(value) for value in values))


class LogitOptions(NamedTuple):
    """Of all tokens, or where each has a temperature of its own of every token."""

    softcap: Tensor | None = None  # () or (N,)
    logit_scale: Tensor | None = None  # () or (N,)

    def of(self, rows: slice) -> "LogitOptions":
        """For the logits of these rows: () or (n, 1)."""
        return changed(self, lambda option: option[rows].unsqueeze(1) if option.dim() else option)

    def contiguous(self) -> "LogitOptions":
        return changed(self, Tensor.contiguous)

    @property
    def by_token(self) -> bool:
        return any(option is not None and option.dim() > 0 for option in self)


class Cotangents(NamedTuple):
    """Of the three numbers of a row that the loss is a function of, (N,) each."""

    grad_target_logit: Tensor | None  # (N, K) of several classes a token
    grad_lse: Tensor | None
    grad_logit_sum: Tensor | None

    def of(self, rows: slice) -> "Cotangents":
        return changed(self, lambda grad: grad[rows])

    def masked(self, hit: Tensor, valid: Tensor, dtype: torch.dtype) -> "Cotangents":
        """0 at tokens that do not count, that of the target's logit where these classes have no target."""
        counted = (hit, valid, valid)  # hit is (N,) or (N, K), as the target
        return Cotangents(
            *(None if grad is None else torch.where(of, grad, 0.0).to(dtype) for grad, of in zip(self, counted))
        )

    def filled(self, like: Tensor) -> "Cotangents":
        """0 in place of no cotangent of lse; those of the others are added where they are."""
        return self if self.grad_lse is not None else self._replace(grad_lse=torch.zeros_like(like))


class Statistics(NamedTuple):
    """Which by-products of a row of logits are asked for, with p = softmax(z)."""

    argmax: bool = False
    lse: bool = False
    entropy: bool = False  # -sum_j p_j log p_j
    log_sum_sq_probs: bool = False  # log sum_j p_j^2
    mean_logit: bool = False  # sum_j z_j / V


class TokenStatistics(NamedTuple):
    """The same of every token, (N,) each, 0 where ignored, argmax -1 there; None where not asked for."""

    argmax: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None

    @classmethod
    def found(cls, asked: Statistics, results: Sequence[Tensor]) -> "TokenStatistics":
        """Of an operator's results, which are (0,) where not asked for."""
        if not any(asked):
            return cls()
        return cls(*(result if wanted else None for result, wanted in zip(results, asked, strict=True)))


@dataclass(eq=False)
class TokenLosses:
    """What the losses of tokens are a function of, one row a token."""

    operands: Any  # Operands, or LogitOperands where the logits are given
    ignore_index: int
    loss: Any  # LossOptions
    logits: LogitOptions
    statistics: Statistics = Statistics()
    main_grad: Tensor | None = None  # (V, D), that grad_linear_weight is added to
    target_weight: Tensor | None = None  # (N, K), of a target (N, K)
    sparse: SparseGradient = SparseGradient()
    batch_invariant: bool = False  # rows of grad_input

    @functools.cached_property
    def valid(self) -> Tensor:  # (N,)
        counts = self.operands.target != self.ignore_index
        return counts if counts.dim() == 1 else counts.any(1)

    @property
    def denominator_weight(self) -> Tensor | None:  # (V,)
        """Class weights divide the mean over one class a token; soft targets' is over tokens, as torch has it."""
        return self.operands.weight if self.target_weight is None else None

    @property
    def options(self) -> dict[str, int | float | Tensor | None]:
        """By name, as the operators take them."""
        return {"ignore_index": self.ignore_index, **self.loss._asdict(), **self.logits._asdict()}


# The user's numbers, in the order of the entries' schemas.
Scalar = Annotated[float, "Scalar"]
OptionalScalar = Annotated[float | None, "Scalar?"]


class LogitNumbers(NamedTuple):
    softcap: OptionalScalar = None
    logit_scale: Scalar = 1.0
    temperature: Scalar = 1.0


@functools.cache
def numbers_of(group: Any) -> tuple[str, ...]:
    """The options of a group that the inner operators take as 0-d tensors."""
    return tuple(name for name, hint in get_type_hints(group).items() if hint in (Tensor, Tensor | None))


# What a user's number must be: as the message says it, the least and the largest.
Ranges = dict[str, tuple[str, float, float]]
LEAST, LARGEST = ulp(0.0), nextafter(inf, 0.0)  # that are positive and finite
RANGES: Ranges = {
    "softcap": ("expected softcap to be positive and finite, or None", LEAST, LARGEST),
    "teacher_softcap": ("expected teacher_softcap to be positive and finite, or None", LEAST, LARGEST),
    "temperature": ("expected temperature to be positive and finite", LEAST, LARGEST),
}

Number = float  # an int will do, and the SymFloat above, whose products with tensors torch's stubs do not have


def scalar(value: Number, like: Tensor) -> Tensor:  # ()
    """`value` on the device and in the accumulation dtype of `like`."""
    dtype = accumulation_dtype(like.dtype)
    if isinstance(value, SymFloat):
        return torch.ones((), dtype=dtype, device=like.device) * value
    return torch.full((), value, dtype=dtype, device=like.device)


def scalar_unless(neutral: float, value: Number | None, like: Tensor) -> Tensor | None:  # ()
    """`scalar(value)`, or None where the option does nothing: a value that is known, and neutral."""
    if value is None or (not isinstance(value, SymFloat) and value == neutral):
        return None
    return scalar(value, like)


def normalizer_tensor(normalizer: Tensor | Number | None, like: Tensor) -> Tensor | None:  # ()
    """The entries take a tensor. Dynamo sees this function, and to it a float that changes still looks like a float."""
    if normalizer is None or isinstance(normalizer, Tensor):
        return normalizer
    if torch.compiler.is_compiling():
        return scalar(1.0, like) * normalizer
    return scalar(normalizer, like)


def logit_options(numbers: Any, like: Tensor, token_temperature: Tensor | None = None) -> LogitOptions:
    """LogitNumbers or LossNumbers as the inner operators take them. The temperature, behind the cap, goes into both:

    cap tanh(scale u / cap) / tau = (cap / tau) tanh((scale / tau) u / (cap / tau))

    `token_temperature` (N,) stands in the number's place: cap and scale are (N,) then.
    """
    divisor = scalar_unless(1.0, numbers.temperature, like)
    if token_temperature is not None:
        divisor = token_temperature.to(accumulation_dtype(like.dtype))
    cap = None if numbers.softcap is None else scalar(numbers.softcap, like)
    if divisor is None:
        return LogitOptions(cap, scalar_unless(1.0, numbers.logit_scale, like))
    # tensors are divided: a quotient of SymFloats is a constant of the graph on torch 2.11
    return LogitOptions(None if cap is None else cap / divisor, scalar(numbers.logit_scale, like) / divisor)
