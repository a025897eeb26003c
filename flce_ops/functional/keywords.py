"""Types of keyword arguments, for overloads of functions whose result type depends on one of them."""

from typing import TypedDict

from torch import Tensor

from ..entry.arguments import ReductionName
from ..math.sparse_gradient import Mode, Operand

# K classes of a token, D hidden, V vocabulary


class SparseKeywords(TypedDict, total=False):
    gradient_threshold: float
    gradient_mode: Mode
    gradient_seed: Tensor | None  # ()
    gradient_sparse: Operand


class LogProbsKeywords(SparseKeywords, total=False):
    ignore_index: int | None
    softcap: float | None
    logit_scale: float | Tensor
    temperature: float | Tensor
    shift: bool
    batch_invariant: bool
    entropy: bool
    argmax: bool
    tail: bool


class LossKeywords(TypedDict, total=False):
    weight: Tensor | None  # (V,)
    reduction: ReductionName
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    z_loss: float
    token_weight: Tensor | None  # (...)
    normalizer: Tensor | float | None  # ()
    shift: bool


class LogitsKeywords(LossKeywords, total=False):
    logit_scale: float
    temperature: float | Tensor
    inplace_backward: bool


class CrossEntropyKeywords(LossKeywords, SparseKeywords, total=False):
    logit_scale: float | Tensor
    temperature: float | Tensor
    target_weight: Tensor | None  # (..., K)
    main_grad: Tensor | None  # (V, D)
    gradient_class_order: Tensor | None  # (V,)
    batch_invariant: bool
    options: object
