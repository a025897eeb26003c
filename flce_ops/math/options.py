"""The arguments in groups: operands, and the options that turn products into logits.

    u_ij  = input_i . linear_weight_j + linear_bias_j
    z_ij  = softcap tanh(logit_scale u_ij / softcap)                 LogitOptions; without softcap: logit_scale u_ij

Inside the package, numbers are 0-d tensors in the accumulation dtype, and None if they have no effect. A Python number
would be a constant of a compiled graph, so every new value would compile a new graph. A 0-d tensor is an input of the
graph. If a Python float changes between two calls, torch.compile makes it a SymFloat, and the tensor computed from it
an input of the graph. So the third and later values reuse a compiled graph.

    logit_scale = 30, softcap = None   ->   tensor(30.), None          None: the option is off and costs nothing
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nextafter, ulp
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from ..support.refusals import running
from ..support.sizes import SYMBOLIC, finite_in, known_only_when_it_runs
from .sparse_gradient import SparseGradient

# N tokens, K classes, D and E hidden of student and teacher, V vocabulary (if it is sharded, a rank's part)


CLASSES_PER_MAXIMUM = 128  # of Triton's stored logits: what an epilogue of its logits GEMM takes at a time


def saved_columns(num_classes: int, dtype: torch.dtype) -> int:
    """The number of 16-bit columns in a row of saved logits. Each row starts at a multiple of 16 bytes.

    A row has V numbers of the operands' dtype and a float32 for each tile. Only the kernels know their format
    (flce_ops/triton/logits/stored.py, flce_ops/aten/chunks.py).
    """
    numbers, maxima = (num_classes + 7) // 8, (num_classes + 4 * CLASSES_PER_MAXIMUM - 1) // (4 * CLASSES_PER_MAXIMUM)
    return 4 * dtype.itemsize * (numbers + maxima)


HeadWeight = Annotated[Tensor, "Tensor?"]


class Operands(NamedTuple):
    """Without a head, linear_weight is None, and `input` holds the logits."""

    input: Tensor  # (N, D), or given logits, (N, V)
    linear_weight: HeadWeight  # (V, D)
    target: Tensor  # (N,), or (N, K)
    linear_bias: Tensor | None = None  # (V,)
    weight: Tensor | None = None  # (V,), class weights

    @property
    def num_classes(self) -> int:
        return self.input.shape[1] if self.linear_weight is None else self.linear_weight.shape[0]

    @property
    def saved_columns(self) -> int:
        return saved_columns(self.num_classes, self.input.dtype)


def changed(values: Any, change: Callable[[Tensor], Any]) -> Any:
    """The named tuple with `change` applied to every tensor; None stays None."""
    return type(values)(*(None if value is None else change(value) for value in values))


class LogitOptions(NamedTuple):
    softcap: Tensor | None = None  # ()
    logit_scale: Tensor | None = None  # (), may get a gradient


class Cotangents(NamedTuple):
    """The gradients of the objective by target_logit, lse and logit_sum, (N,) each."""

    grad_target_logit: Tensor | None  # (N, K) with several classes per token
    grad_lse: Tensor | None
    grad_logit_sum: Tensor | None

    def of(self, rows: slice) -> "Cotangents":
        return changed(self, lambda grad: grad[rows])

    def masked(self, hit: Tensor, valid: Tensor, dtype: torch.dtype) -> "Cotangents":
        """Sets to 0 the cotangents of ignored tokens, and those of target logits whose class is not on this rank."""
        counted = (hit, valid, valid)  # hit is (N,) or (N, K), as the target is
        return Cotangents(
            *(None if grad is None else torch.where(of, grad, 0.0).to(dtype) for grad, of in zip(self, counted))
        )


class Statistics(NamedTuple):
    """Which statistics of a row of logits are requested, with p = softmax(z)."""

    argmax: bool = False
    lse: bool = False
    entropy: bool = False  # -sum_j p_j log p_j
    log_sum_sq_probs: bool = False  # log sum_j p_j^2
    mean_logit: bool = False  # sum_j z_j / V


class TokenStatistics(NamedTuple):
    """The statistics of every token, (N,) each. Ignored tokens have 0, and an argmax of -1. None if not requested."""

    argmax: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None

    @classmethod
    def found(cls, asked: Statistics, results: Sequence[Tensor]) -> "TokenStatistics":
        """From an operator's results, which are (0,) if not requested."""
        if not any(asked):
            return cls()
        return cls(*(result if wanted else None for result, wanted in zip(results, asked, strict=True)))


@dataclass(eq=False)
class TokenLosses:
    """The arguments that determine the losses of tokens, one row a token."""

    operands: Operands
    ignore_index: int
    loss: Any  # LossOptions
    logits: LogitOptions
    statistics: Statistics = Statistics()
    scale_gradient: bool = False  # whether logit_scale gets a gradient
    main_grad: Tensor | None = None  # (V, D), to which grad_linear_weight is added
    target_weight: Tensor | None = None  # (N, K), with a target (N, K)
    sparse: SparseGradient = SparseGradient()
    batch_invariant: bool = False  # rows of grad_input

    @functools.cached_property
    def valid(self) -> Tensor:  # (N,)
        return tokens_that_count(self.operands.target, self.ignore_index)

    @property
    def denominator_weight(self) -> Tensor | None:  # (V,)
        """The class weights whose sum divides the mean. Soft targets have none: their mean is over tokens."""
        return self.operands.weight if self.target_weight is None else None


# Numbers that the user passes, in the order of the entry operators' schemas.
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


# The range of a user's number: the text of the error, the least and the largest value.
Ranges = dict[str, tuple[str, float, float]]
LEAST, LARGEST = ulp(0.0), nextafter(inf, 0.0)  # the smallest and the largest positive finite number
RANGES: Ranges = {
    "softcap": ("expected softcap to be positive and finite, or None", LEAST, LARGEST),
    "teacher_softcap": ("expected teacher_softcap to be positive and finite, or None", LEAST, LARGEST),
    "temperature": ("expected temperature to be positive and finite", LEAST, LARGEST),
    "logit_scale": ("expected logit_scale to be finite", -LARGEST, LARGEST),
    "teacher_logit_scale": ("expected teacher_logit_scale to be finite", -LARGEST, LARGEST),
}

Number = float  # also an int, or a SymFloat as above; torch's stubs lack the product of a SymFloat and a tensor


def scalar(value: Number, like: Tensor, name: str = "a number", op: str = "") -> Tensor:  # ()
    """`value` as a tensor, on the device and in the accumulation dtype of `like`. `name` is its argument's, for an
    error; `op` names the function where no operator runs yet. Refuses a finite number that the dtype would round to
    infinity.
    """
    dtype = accumulation_dtype(like.dtype)
    largest = torch.finfo(dtype).max
    # the check of a SymFloat is a guard of its graph
    if not known_only_when_it_runs(value) and largest < abs(value) < inf:
        op = op or running.function or "flce_ops"
        raise ValueError(f"{op}: expected {name} in the range of {dtype}, got {value}")
    if isinstance(value, SYMBOLIC):
        return torch.ones((), dtype=dtype, device=like.device) * value
    return torch.full((), value, dtype=dtype, device=like.device)


def scalar_unless(neutral: float, value: Number | None, like: Tensor, name: str) -> Tensor | None:  # ()
    """`scalar(value)`, or None if the option has no effect because its value is `neutral`. A value that is symbolic in
    a traced graph counts as having an effect.
    """
    if value is None or (not isinstance(value, SYMBOLIC) and value == neutral):
        return None
    return scalar(value, like, name)


def number_tensor(op: str, name: str, number: Tensor | Number, like: Tensor, *, may_be_inf: bool = False) -> Tensor:
    """A number becomes the tensor that the entry operators take. Dynamo traces this function. In the trace a SymFloat,
    too, counts as a float.
    """
    if isinstance(number, Tensor):
        return number
    dtype = accumulation_dtype(like.dtype)
    if not finite_in(dtype, number) and not (may_be_inf and abs(number) == inf):
        raise ValueError(f"{op}: expected {name} in the range of {dtype}, got {number}")
    if not torch.compiler.is_compiling():
        return scalar(number, like, name, op)
    return scalar(1.0, like) * number


def logit_options(
    numbers: Any,
    like: Tensor,
    of: str = "",  # before a name in an error
    learnt: Tensor | None = None,  # (), in place of the number logit_scale
) -> LogitOptions:
    """Converts LogitNumbers or LossNumbers for the inner operators. The temperature, which acts after the cap, goes
    into both options:

    cap tanh(scale u / cap) / tau = (cap / tau) tanh((scale / tau) u / (cap / tau))
    """
    divisor = scalar_unless(1.0, numbers.temperature, like, "temperature")
    cap = None if numbers.softcap is None else scalar(numbers.softcap, like, f"{of}softcap")
    if divisor is None:
        number = scalar_unless(1.0, numbers.logit_scale, like, f"{of}logit_scale")
        return LogitOptions(cap, number if learnt is None else learnt)
    # divides tensors: on torch 2.11 a quotient of SymFloats is a constant of the graph
    scale = scalar(numbers.logit_scale, like, f"{of}logit_scale") if learnt is None else learnt
    return LogitOptions(None if cap is None else cap / divisor, scale / divisor)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the softmax, of the loss and of their sums. Checks elsewhere refuse dtypes that operands may not
    have.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


def tokens_that_count(target: Tensor, ignore_index: int) -> Tensor:  # (N,) or (N, K) -> (N,) bool
    counts = target != ignore_index
    return counts if target.dim() == 1 else counts.any(1)


def beside_topk(per_token: Tensor, per_target: Tensor) -> Tensor:  # (...), and (...) or (..., K) -> (...) or (..., 1)
    return per_token if per_token.dim() == per_target.dim() else per_token.unsqueeze(-1)


def in_columns(per_target: Tensor) -> Tensor:  # (N,) or (N, K) -> (N, K)
    return per_target.unsqueeze(1) if per_target.dim() == 1 else per_target


def repeats(target: Tensor) -> Tensor:  # (..., K) -> (..., K) bool
    """Whether the same class stands earlier in the same row."""
    ordered, order = target.sort(stable=True, dim=-1)
    same = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    return torch.zeros_like(same).scatter(-1, order, same)


class KlDivOperands(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    linear_bias: Tensor | None  # (V,)
    teacher_input: Tensor | None  # (N, E)
    teacher_weight: Tensor | None  # (V, E)
    teacher_bias: Tensor | None  # (V,)
    teacher_probs: Tensor | None  # (N, V), instead of the three tensors above
    valid: Tensor | None  # (N,) bool; rows where it is False are not read


TEACHER = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_probs")


class KlDivOptions(NamedTuple):
    kind: str = "forward"  # one of KINDS; or "cross_entropy", with teacher_probs
    beta: Tensor | None = None  # (), for "jsd"
    logit_scale: Tensor | None = None  # (), as are the next three
    softcap: Tensor | None = None
    teacher_logit_scale: Tensor | None = None
    teacher_softcap: Tensor | None = None
    # if ranks share the vocabulary: their process group, their number, and V over all of them
    group: str | None = None
    ranks: int = 1
    vocab_size: Annotated[int | None, "SymInt?"] = None
    batch_invariant: bool = False  # the bits of a row of grad_input must not depend on other tokens

    @property
    def student(self) -> LogitOptions:
        return LogitOptions(self.softcap, self.logit_scale)

    @property
    def teacher(self) -> LogitOptions:
        return LogitOptions(self.teacher_softcap, self.teacher_logit_scale)

    @property
    def of_student(self) -> bool:
        """Whether the gradient needs K, a sum over the student's distribution (objectives/divergence.py)."""
        return self.kind not in ("forward", "cross_entropy")
