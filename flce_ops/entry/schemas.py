"""The arguments of the entry operators. They are those of the public functions, with each number as a Scalar."""

from torch import Tensor

from ..math.options import LogitNumbers, OptionalScalar, Scalar, Statistics
from ..math.sparse_gradient import SparseGradient
from ..meta.call import Arguments
from ..objectives.cross_entropy import LossNumbers
from ..objectives.policy import PolicyNumbers, PolicyTokens

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
