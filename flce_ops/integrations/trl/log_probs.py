"""Stands in for TRL's ChunkedLogProbFunction: the results that TRL's trainers need from rows of logits.

With z the logits (scaled, capped and divided by the temperature), p = softmax(z) and y the target, for each token:

    log_probs          z_y - lse(z)                                  differentiable
    entropy            lse(z) - sum_j p_j z_j                        differentiable
    is_top1            argmax_j z_j == y
    mean_logits        1/V sum_j z_j
    log_sum_sq_probs   log sum_j p_j^2

One pass computes all of them.
"""

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from ...functional import linear_log_probs
from ..sparse_options import sparse_options
from .zero3 import gathered_in_backward

# N tokens, D hidden, V vocabulary

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # in the order in which TRL takes them
METRICS = dict(zip(("entropy", "log_sum_sq_probs", "mean_logit", "is_top1"), OUTPUTS))  # their names here
NO_CLASS = -100  # no target equals it: TRL passes a class for every token, also for those that it ignores later
STEP = threading.local()  # its `head`: the stand-in of the step that this thread runs, or None


class ChunkedLogProbs:
    """Has the interface of TRL's autograd Function."""

    gradient_threshold = 0.0

    @classmethod
    def apply(
        cls,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,  # for TRL's own tiles; here the workspace decides
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:  # log_probs and OUTPUTS, (N,) each; None if not requested
        unknown = set(outputs) - {"log_probs", *OUTPUTS}
        if unknown:
            raise NotImplementedError(
                f"TRL asks its head for {sorted(unknown)}, which flce_ops does not have: unpatch()"
            )
        weight, bias = in_dtype_of(hidden, weight, bias)
        options = {
            "softcap": final_logit_softcapping,
            "logit_scale": logit_scale,
            "temperature": temperature,
            **sparse_options(cls.gradient_threshold, hidden.device),
        }
        metrics = [name for name in METRICS if METRICS[name] in outputs]
        kind = (getattr(STEP, "head", None) if torch.is_grad_enabled() else None) or cls
        with gathered_in_backward(weight, bias):
            log_probs, found = kind.outputs_of(hidden, weight, bias, targets, metrics, options)
        return log_probs, *(found.get(name) for name in METRICS)

    @staticmethod
    def outputs_of(
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        metrics: list[str],  # of METRICS
        options: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """log_probs (N,), and metrics by their names."""
        found, by_name = linear_log_probs(
            *(hidden, weight, targets, bias),
            ignore_index=NO_CLASS,
            entropy="entropy" in metrics,
            argmax="is_top1" in metrics,
            return_metrics=[name for name in metrics if name not in ("entropy", "is_top1")],
            **options,
        )
        if found.entropy is not None:
            by_name["entropy"] = found.entropy
        if found.argmax is not None:
            by_name["is_top1"] = found.argmax == targets
        return found.log_probs, by_name


@functools.cache  # Dynamo compiles anew for every class
def with_threshold(gradient_threshold: float) -> type[ChunkedLogProbs]:
    if not gradient_threshold:
        return ChunkedLogProbs
    return type("SparseChunkedLogProbs", (ChunkedLogProbs,), {"gradient_threshold": gradient_threshold})


def in_dtype_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Casts as TRL does: to the hidden states' dtype. Under autocast the operator casts by itself."""
    if torch.is_autocast_enabled(hidden.device.type):
        return weight, bias
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
