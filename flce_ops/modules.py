"""Modules that own the head's parameters. They call flce_ops.linear_cross_entropy."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .entry.arguments import ReductionName, check_ranges, check_reduction, check_torch_options
from .functional import linear_cross_entropy
from .functional.public import refuse_misnamed, typed
from .math.sparse_gradient import Mode, Operand, SparseGradient
from .meta.checks import check_per_class, check_sparse

# D in_features, V classes


OPTIONS = ("ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss")
OF_SPARSE = ("gradient_threshold", "gradient_mode", "gradient_sparse")


def options_of(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(module, name) for name in (*OPTIONS, *OF_SPARSE)}


def loss_repr(module: nn.Module) -> str:
    shown = (*OPTIONS, *OF_SPARSE) if module.gradient_threshold else OPTIONS
    return ", ".join(f"{name}={getattr(module, name)}" for name in shown)


def check_options(module: nn.Module) -> None:
    """Refuses invalid options in the constructor, not only when the first loss is computed."""
    op, options = type(module).__name__, options_of(module)
    check_ranges(op, options, options.values())
    check_sparse(op, SparseGradient(**{name: options[name] for name in OF_SPARSE}))


class LinearCrossEntropyLoss(nn.Module):
    """Same as nn.CrossEntropyLoss over an nn.Linear that the module owns, without the logits.

    Stands in for torch.nn's module of this name: the same arguments and the same state dict.

    Args:
        in_features: D.
        num_classes: V.
        out_features: (d_1, ..., d_K), the positions of a K-dimensional loss, each with its own head; the linear
            layer has V * d_1 * ... * d_K outputs.
        bias: whether the linear layer adds a learnable bias.
        weight: class weights, (V,); a buffer, part of the state dict.
        reduction, ignore_index, label_smoothing, softcap, logit_scale, z_loss, options: as `linear_cross_entropy`.
        gradient_threshold, gradient_mode, gradient_sparse: as `linear_cross_entropy`. The seed and the order of classes
            are arguments of forward.

    `forward(input, target)` takes input (..., D) and target (..., *out_features), probabilities (..., V,
    *out_features), or (..., K) with a target_weight of that shape. The loss is () or, for reduction="none", (...,
    *out_features); with return_metrics the result is a pair. The other arguments of forward, dtypes, errors and what
    composes are those of `linear_cross_entropy`.

    Raises:
        ValueError, TypeError: an option that can never be right, by its name.
    """

    weight: Tensor | None

    @typed
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        reduction: ReductionName = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        gradient_threshold: float = 0.0,
        gradient_mode: Mode = "unbiased",
        gradient_sparse: Operand = "both",
        options: object = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.register_buffer("weight", weight)
        if weight is not None:
            check_per_class(op, "weight", weight, num_classes)
        check_reduction(op, reduction)
        check_torch_options(op, options)
        outputs = num_classes * math.prod(out_features)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        self.options = options
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss = z_loss
        self.gradient_threshold = gradient_threshold
        self.gradient_mode = gradient_mode
        self.gradient_sparse = gradient_sparse
        check_options(self)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        target_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        shift: bool = False,
        gradient_seed: Tensor | None = None,
        gradient_class_order: Tensor | None = None,
        return_metrics: bool | Sequence[str] = False,
        **misnamed: Any,
    ) -> Any:
        refuse_misnamed(self, misnamed)
        linear_weight: Tensor = self.linear.weight
        linear_bias: Tensor | None = self.linear.bias
        if self.out_features:
            linear_weight = linear_weight.unflatten(0, (self.num_classes, *self.out_features))
            linear_bias = None if linear_bias is None else linear_bias.view(linear_weight.shape[:-1])
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias,
            weight=self.weight,
            reduction=self.reduction,
            **options_of(self),
            token_weight=token_weight,
            target_weight=target_weight,
            normalizer=normalizer,
            shift=shift,
            gradient_seed=gradient_seed,
            gradient_class_order=gradient_class_order,
            return_metrics=return_metrics,
            options=self.options,
        )

    def extra_repr(self) -> str:
        positions = f"out_features={self.out_features}, " if self.out_features else ""
        return f"{positions}reduction={self.reduction!r}, {loss_repr(self)}"


class LinearCrossEntropyHead(nn.Linear):
    """An nn.Linear whose forward returns the loss when it is given targets, and the logits when it is not.

    Because the loss runs inside the forward of the module that owns the weight, wrappers which gather parameters around
    a module's forward (FSDP, ZeRO-3) work unchanged. The state dict is nn.Linear's.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear; out_features is V.
        ignore_index, label_smoothing, softcap, logit_scale, z_loss, gradient_threshold, gradient_mode, gradient_sparse:
            as `linear_cross_entropy`. The seed and the order of classes are arguments of forward.

    `forward(input)` gives the logits of input (..., D), (..., V), scaled and capped. `forward(input, target)` gives the
    loss for target (...), or (..., K) with a target_weight of that shape. The other arguments of forward, dtypes,
    errors and what composes are those of `linear_cross_entropy`.

    Raises:
        ValueError, TypeError: an option that can never be right, by its name.
    """

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        gradient_threshold: float = 0.0,
        gradient_mode: Mode = "unbiased",
        gradient_sparse: Operand = "both",
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss = z_loss
        self.gradient_threshold = gradient_threshold
        self.gradient_mode = gradient_mode
        self.gradient_sparse = gradient_sparse
        check_options(self)

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        reduction: ReductionName = "mean",
        token_weight: Tensor | None = None,
        target_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        shift: bool = False,
        gradient_seed: Tensor | None = None,
        gradient_class_order: Tensor | None = None,
        return_metrics: bool | Sequence[str] = False,
        **misnamed: Any,
    ) -> Any:
        refuse_misnamed(self, misnamed)
        if target is None:
            if return_metrics:
                raise TypeError(f"{type(self).__name__}: return_metrics is of a loss, which needs a target, got None")
            return self.logits(input)
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            weight=weight,
            reduction=reduction,
            **options_of(self),
            token_weight=token_weight,
            target_weight=target_weight,
            normalizer=normalizer,
            shift=shift,
            gradient_seed=gradient_seed,
            gradient_class_order=gradient_class_order,
            return_metrics=return_metrics,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {loss_repr(self)}"

    def logits(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
