"""The arguments of the entry operators, which are those of the public functions, with each number as a Scalar; then the
arguments and results of the inner operators. Each is declared once, as the fields of a class (call.py).
"""

from operator import attrgetter
from typing import Annotated

import torch
from torch import Tensor

from ..math.options import (
    Cotangents,
    KlDivOperands,
    KlDivOptions,
    LogitNumbers,
    LogitOptions,
    Operands,
    OptionalScalar,
    Scalar,
    Statistics,
)
from ..math.sparse_gradient import SparseGradient
from ..math.token_weights_and_denominator import Reduction
from ..objectives.cross_entropy import LossNumbers, LossOptions
from ..objectives.policy import PolicyNumbers, PolicyTokens
from .call import Arguments, Result, class_index, gradients, lse_pair, scalar, token, topk

# N tokens, K classes of a target, D hidden size (E of a teacher), V vocabulary


class CrossEntropy(Arguments, keyword_from="weight"):
    input: Tensor  # (..., D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (...), or (..., K)
    linear_bias: Tensor | None = None  # (V,)
    weight: Tensor | None = None  # (V,)
    reduction: str = "mean"
    ignore_index: int = -100
    numbers: LossNumbers
    token_weight: Tensor | None = None  # (...)
    normalizer: Tensor | None = None  # ()
    target_weight: Tensor | None = None  # (..., K)
    main_grad: Tensor | None = None  # (V, D)
    sparse: SparseGradient
    gradient_class_order: Tensor | None = None  # (V,)
    batch_invariant: bool = False
    learnt_scale: Tensor | None = None  # (), in place of the number logit_scale


class CrossEntropyMetrics(CrossEntropy, keyword_from="weight"):
    statistics: Statistics


class LogitsCrossEntropy(Arguments, keyword_from="weight"):
    logits: Tensor  # (..., V)
    target: Tensor  # (...)
    weight: Tensor | None = None  # (V,)
    reduction: str = "mean"
    ignore_index: int = -100
    numbers: LossNumbers
    token_weight: Tensor | None = None  # (...)
    normalizer: Tensor | None = None  # ()


class LogitsCrossEntropyInPlace(LogitsCrossEntropy, keyword_from="weight"):
    """Variants whose logits may be overwritten."""

    written = "logits"


class LogProbs(Arguments, keyword_from="ignore_index"):
    input: Tensor  # (..., D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (...), or (..., K)
    linear_bias: Tensor | None = None  # (V,)
    ignore_index: int = -100
    numbers: LogitNumbers
    entropy: bool = False
    argmax: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False
    tail: bool = False
    sparse: SparseGradient
    batch_invariant: bool = False
    learnt_scale: Tensor | None = None  # ()


class TokenLoss(Arguments, keyword_from="reduction"):
    input: Tensor  # (..., D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (...), or (..., K)
    function: str  # its name
    tensors: list[Tensor]  # (...), (..., numbers of a token) or () each
    linear_bias: Tensor | None = None  # (V,)
    reduction: str = "mean"
    ignore_index: int = -100
    numbers: LogitNumbers
    token_weight: Tensor | None = None  # (...)
    normalizer: Tensor | None = None  # ()
    sparse: SparseGradient
    batch_invariant: bool = False
    learnt_scale: Tensor | None = None  # ()


class PolicyLoss(Arguments, keyword_from="own"):
    input: Tensor  # (..., D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (...)
    tokens: PolicyTokens
    linear_bias: Tensor | None = None  # (V,)
    own: PolicyNumbers
    reduction: str = "mean"
    ignore_index: int = -100
    numbers: LogitNumbers
    token_weight: Tensor | None = None  # (...)
    normalizer: Tensor | None = None  # ()
    sparse: SparseGradient
    batch_invariant: bool = False
    learnt_scale: Tensor | None = None  # ()


class KlDiv(Arguments, keyword_from="teacher_probs"):
    input: Tensor  # (..., D)
    linear_weight: Tensor  # (V, D)
    teacher_input: Tensor | None = None  # (..., E)
    teacher_weight: Tensor | None = None  # (V, E)
    teacher_probs: Tensor | None = None  # (..., V)
    linear_bias: Tensor | None = None  # (V,)
    teacher_bias: Tensor | None = None  # (V,)
    kind: str = "forward"
    beta: Scalar = 0.5
    target: Tensor | None = None  # (...)
    ignore_index: int = -100
    token_weight: Tensor | None = None  # (...)
    reduction: str = "mean"
    normalizer: Tensor | None = None  # ()
    logit_scale: Scalar = 1.0
    softcap: OptionalScalar = None
    temperature: Scalar = 1.0
    teacher_logit_scale: OptionalScalar = None
    teacher_softcap: OptionalScalar = None
    batch_invariant: bool = False
    learnt_scale: Tensor | None = None  # (), the student's


SymInt = Annotated[int, "SymInt"]
OutputMask = Annotated[list[bool], "bool[3]"]  # which gradients are wanted: input, linear_weight, linear_bias
OptionalSymInt = Annotated[int | None, "SymInt?"]
OptionalStr = Annotated[str | None, "str?"]

# made if the call's `scale_gradient` is True
OF_SCALE = Result("grad_logit_scale", (), attrgetter("scale_gradient"), None, operand="logit_scale")
GRADIENTS = gradients("input", "linear_weight", "linear_bias")
LOSSES: tuple[Result, ...] = (scalar("loss"), token("losses"))
STATISTICS = tuple(
    (class_index if name == "argmax" else token)(name, f"statistics.{name}") for name in Statistics._fields
)


class Forward(Arguments, keyword_from="ignore_index"):
    op = "linear_cross_entropy_forward"
    results = (
        topk("target_logit"),
        lse_pair("lse_pair"),
        token("logit_sum", "logit_sum"),
        token("expected_log_prob", "expected_log_prob"),
        token("max_logit", "argmax"),
        class_index("argmax", "argmax"),
        token("log_sum_sq_probs", "log_sum_sq_probs"),
        token("mean_logit", "mean_logit"),
        Result("retained", attrgetter("retain", "operands.saved_columns"), at_ignored=None, dtype=torch.int16),
    )

    operands: Operands
    ignore_index: int = -100
    logit_sum: bool = False
    logits: LogitOptions
    vocab_start: SymInt = 0  # a shard's first class; vocab_size is then the number of classes of all shards
    vocab_size: OptionalSymInt = None
    expected_log_prob: bool = False
    argmax: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False  # return the mean logit; of a shard, its part of the mean over all shards
    retain: SymInt = 0  # the logits of this many valid tokens, the first ones, are saved for backward
    main_grad: Tensor | None = None  # (V, D), to which backward adds grad_linear_weight; forward does not write to it
    sparse: SparseGradient  # for backward
    batch_invariant: bool = False  # for backward


class Backward(Arguments, keyword_from="ignore_index"):
    op = "linear_cross_entropy_backward"
    results = (*GRADIENTS, OF_SCALE)

    cotangents: Cotangents
    operands: Operands
    lse_pair: Tensor  # (N, 2)
    ignore_index: int = -100
    logits: LogitOptions
    vocab_start: SymInt = 0
    output_mask: OutputMask
    scale_gradient: bool = False  # whether the gradient of logit_scale is wanted
    grad_expected_log_prob: Tensor | None = None  # (N,)
    expected_log_prob: Tensor | None = None  # (N,)
    retained: Tensor | None = None  # (R, ...), the logits that forward saved
    sparse: SparseGradient
    batch_invariant: bool = False  # the bits of a row of grad_input must not depend on other tokens


class BackwardInPlace(Backward, keyword_from="ignore_index"):
    """Adds grad_linear_weight to main_grad instead of returning it."""

    op = "linear_cross_entropy_backward_"
    results = tuple(
        made._replace(asked=lambda call: False) if made.operand == "linear_weight" else made
        for made in Backward.results
    )
    written = "main_grad"

    main_grad: Tensor  # (V, D)


class WithGrad(Arguments, keyword_from="ignore_index"):
    op = "linear_cross_entropy_with_grad"
    results = (*LOSSES, *GRADIENTS, *STATISTICS, topk("log_probs", "function"), OF_SCALE)

    operands: Operands
    reduction: Reduction
    ignore_index: int = -100
    loss: LossOptions
    logits: LogitOptions
    output_mask: OutputMask
    scale_gradient: bool = False
    statistics: Statistics
    target_weight: Tensor | None = None  # (N, K), with a target (N, K)
    sparse: SparseGradient
    batch_invariant: bool = False  # as of backward
    # If the losses of tokens are those of a function of one token: its name in objectives/token_function.py, and its
    # tensors, (N, ...) or () each, which are constants.
    function: OptionalStr = None
    tensors: list[Tensor] | None = None
    # If ranks share the vocabulary: their process group, their number, this rank's first class, and V over all of them.
    # `weight` has the classes of all ranks then.
    group: OptionalStr = None
    ranks: int = 1
    vocab_start: SymInt = 0
    vocab_size: OptionalSymInt = None


class WithGradInPlace(WithGrad, keyword_from="ignore_index"):
    """Of given logits: writes the gradient over the logits."""

    op = "cross_entropy_with_grad_"
    results = (*LOSSES, STATISTICS[0])
    made = ("input",)
    written = "input"


class OfDivergence(Arguments):
    @property
    def logits(self) -> LogitOptions:
        return vars(self)["options"].student


class KlDivForward(OfDivergence, keyword_from="options"):
    op = "linear_kl_div_forward"
    results = (
        token("divergence"),
        lse_pair("lse_pair"),
        lse_pair("teacher_lse_pair", lambda call: call.operands.teacher_probs is None),
        Result("student_kl", asked=lambda call: call.options.of_student),
    )

    operands: KlDivOperands
    options: KlDivOptions


class KlDivBackward(OfDivergence, keyword_from="options"):
    op = "linear_kl_div_backward"
    results = (*GRADIENTS, OF_SCALE)

    grad: Tensor  # (N,)
    operands: KlDivOperands
    lse_pair: Tensor  # (N, 2); this and the next two come from forward
    teacher_lse_pair: Tensor
    student_kl: Tensor
    options: KlDivOptions
    output_mask: OutputMask
    scale_gradient: bool = False
    divergence: Tensor | None = None  # (N,), of forward, for "nla"


class KlDivWithGrad(OfDivergence, keyword_from="options"):
    op = "linear_kl_div_with_grad"
    results = (scalar("loss"), token("divergence"), *GRADIENTS, OF_SCALE)

    operands: KlDivOperands
    row_scale: Tensor  # (N,)
    options: KlDivOptions
    output_mask: OutputMask
    scale_gradient: bool = False
