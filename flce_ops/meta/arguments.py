"""The arguments of each inner operator, once: the fields of a class, as call.py declares."""

from typing import Annotated, NamedTuple

from torch import Tensor

from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.options import (
    Cotangents,
    LogitOperands,
    LogitOptions,
    LowRankOperands,
    Operands,
    Statistics,
)
from flce_ops.math.reduction import Reduction
from flce_ops.math.sparse_gradient import SparseGradient
from flce_ops.meta.call import Arguments
from flce_ops.objectives.cross_entropy import LossOptions
from flce_ops.objectives.policy import PolicyOperands, PolicyOptions, PolicyTokens

SymInt = Annotated[int, "SymInt"]
OutputMask = Annotated[list[bool], "bool[3]"]  # gradients wanted: of input, linear_weight, linear_bias
LowRankMask = Annotated[list[bool], "bool[5]"]  # of input, low_rank_input, low_rank_weight, linear_bias, class_scale
OptionalSymInt = Annotated[int | None, "SymInt?"]


class Forward(Arguments, keyword_from="ignore_index"):
    operands: Operands
    ignore_index: int = -100
    logit_sum: bool = False
    logits: LogitOptions
    vocab_start: SymInt = 0  # of a shard: its first class, and the classes of all shards
    vocab_size: OptionalSymInt = None
    expected_log_prob: bool = False
    argmax: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False  # of a shard: its logits' part of the mean over the classes of all shards
    retain: SymInt = 0  # rows whose logits the backward operator will be given, the first of the kept tokens
    main_grad: Tensor | None = None  # (V, D), that backward adds grad_linear_weight to; nothing is written here
    sparse: SparseGradient  # of backward


class Backward(Arguments, keyword_from="ignore_index"):
    cotangents: Cotangents
    operands: Operands
    lse: Tensor  # (N,)
    ignore_index: int = -100
    logits: LogitOptions
    vocab_start: SymInt = 0
    output_mask: OutputMask
    grad_expected_log_prob: Tensor | None = None  # (N,)
    expected_log_prob: Tensor | None = None  # (N,)
    lse_rest: Tensor | None = None  # (N,), what the rounding of lse took from it
    retained: Tensor | None = None  # (R, ...), what forward retained of these operands
    sparse: SparseGradient


class BackwardInPlace(Backward, keyword_from="ignore_index"):
    """grad_linear_weight is added to main_grad."""

    main_grad: Tensor  # (V, D)

    @classmethod
    def schema(cls) -> str:
        return super().schema().replace("Tensor main_grad", "Tensor(a!) main_grad", 1)


class WithGrad(Arguments, keyword_from="ignore_index"):
    operands: Operands
    reduction: Reduction
    ignore_index: int = -100
    loss: LossOptions
    logits: LogitOptions
    output_mask: OutputMask
    statistics: Statistics
    target_weight: Tensor | None = None  # (N, K), with a target (N, K)
    sparse: SparseGradient


class LowRankWithGrad(Arguments, keyword_from="ignore_index"):
    operands: LowRankOperands
    reduction: Reduction
    ignore_index: int = -100
    loss: LossOptions
    logits: LogitOptions
    output_mask: LowRankMask


class VocabParallelWithGrad(Arguments, keyword_from="group"):
    """`weight` has the V classes of all ranks, the other operands this rank's."""

    operands: Operands
    row_scale: Tensor  # (N,)
    group: str
    ranks: int
    vocab_start: SymInt
    vocab_size: SymInt
    ignore_index: int = -100
    loss: LossOptions
    logits: LogitOptions
    output_mask: OutputMask
    statistics: Statistics
    sparse: SparseGradient


class GradGrads(NamedTuple):
    """Cotangents of the backward operator's results."""

    grad_grad_input: Tensor | None  # (N, D)
    grad_grad_linear_weight: Tensor | None  # (V, D)
    grad_grad_linear_bias: Tensor | None  # (V,)


class DoubleBackward(Arguments, keyword_from="ignore_index"):
    grad_grads: GradGrads
    cotangents: Cotangents
    operands: Operands
    lse: Tensor  # (N,)
    ignore_index: int = -100
    logits: LogitOptions
    vocab_start: SymInt = 0
    lse_rest: Tensor | None = None  # (N,)


class LogitsForward(Arguments, keyword_from="ignore_index"):
    operands: LogitOperands
    ignore_index: int = -100
    logit_sum: bool = False
    logits: LogitOptions
    argmax: bool = False


class LogitsBackward(Arguments, keyword_from="ignore_index"):
    cotangents: Cotangents
    operands: LogitOperands
    lse: Tensor  # (N,)
    lse_rest: Tensor  # (N,), what the rounding of lse took from it
    ignore_index: int = -100
    logits: LogitOptions


class LogitsWithGrad(Arguments, keyword_from="ignore_index"):
    operands: LogitOperands
    reduction: Reduction
    ignore_index: int = -100
    loss: LossOptions
    logits: LogitOptions
    argmax: bool = False


class LogitsWithGradInPlace(LogitsWithGrad, keyword_from="ignore_index"):
    """The gradient is written over the logits."""

    @classmethod
    def schema(cls) -> str:
        return super().schema().replace("Tensor logits", "Tensor(a!) logits", 1)


class KlDivForward(Arguments, keyword_from="options"):
    operands: KlDivOperands
    options: KlDivOptions


class KlDivBackward(Arguments, keyword_from="options"):
    grad: Tensor  # (N,)
    operands: KlDivOperands
    shift: Tensor  # (2, N), and the next two: as forward gave them
    teacher_shift: Tensor
    student_kl: Tensor
    options: KlDivOptions
    output_mask: OutputMask


class KlDivWithGrad(Arguments, keyword_from="options"):
    operands: KlDivOperands
    row_scale: Tensor  # (N,)
    options: KlDivOptions
    output_mask: OutputMask


class PolicyWithGrad(Arguments, keyword_from="ignore_index"):
    operands: PolicyOperands
    tokens: PolicyTokens
    reduction: Reduction
    ignore_index: int = -100
    policy: PolicyOptions
    logits: LogitOptions
    output_mask: OutputMask
