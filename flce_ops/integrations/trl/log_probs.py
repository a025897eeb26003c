"""Stands in for TRL's ChunkedLogProbFunction: what its trainers ask the rows of logits for.

With z the logits, scaled, capped and divided by the temperature, p = softmax(z), y the target, per token:

    log_probs          z_y - lse(z)                                  differentiable
    entropy            lse(z) - sum_j p_j z_j                        differentiable
    is_top1            argmax_j z_j == y
    mean_logits        1/V sum_j z_j
                       = s / T (x . mean_j W_j + mean_j b_j)         without a softcap
                       = lse(z) - loss(label_smoothing=1)            with one: another forward pass
    log_sum_sq_probs   log sum_j p_j^2 = lse(2 z) - 2 lse(z)         another forward pass, at half the temperature

The first three come from one pass.
"""

from typing import Any, cast

import torch
from torch import Tensor

from flce_ops.functional import linear_cross_entropy, linear_log_probs
from flce_ops.integrations.trl.zero3 import gathered_in_backward

# N tokens, D hidden, V vocabulary

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # in the order in which TRL takes them
NO_CLASS = -100  # TRL's targets are classes, also where it ignores what comes of them


class ChunkedLogProbs:
    """Called as TRL calls its autograd Function."""

    @staticmethod
    def apply(
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,  # of TRL's own tiles; the workspace decides here
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:  # log_probs and OUTPUTS, (N,) each, None where not asked for
        unknown = set(outputs) - {"log_probs", *OUTPUTS}
        if unknown:
            raise NotImplementedError(
                f"TRL asks its head for {sorted(unknown)}, which flce_ops does not have: unpatch()"
            )
        weight, bias = in_dtype_of(hidden, weight, bias)
        head = (hidden, weight, targets, bias)
        options: dict[str, Any] = {"softcap": final_logit_softcapping, "logit_scale": logit_scale}
        options["ignore_index"] = NO_CLASS
        with gathered_in_backward(weight, bias):
            found = linear_log_probs(
                *head, **options, temperature=temperature, entropy="entropy" in outputs, argmax="is_top1" in outputs
            )
        log_sum_sq_probs = mean_logits = None
        with torch.no_grad():
            if "log_sum_sq_probs" in outputs:
                squared = linear_log_probs(*head, **options, temperature=temperature / 2)
                log_sum_sq_probs = squared.lse - 2 * found.lse
            if "mean_logits" in outputs and final_logit_softcapping is None:
                mean_logits = mean_of_products(hidden, weight, bias) * (logit_scale / temperature)
            elif "mean_logits" in outputs:
                uniform = linear_cross_entropy(
                    *head, **options, temperature=temperature, label_smoothing=1.0, reduction="none"
                )
                mean_logits = found.lse - cast(Tensor, uniform)
        is_top1 = None if found.argmax is None else found.argmax == targets
        return found.log_probs, found.entropy, log_sum_sq_probs, mean_logits, is_top1


def in_dtype_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """TRL computes in the hidden states' dtype, or in autocast's, to which the operator goes by itself."""
    if torch.is_autocast_enabled(hidden.device.type):
        return weight, bias
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def mean_of_products(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (N,)
    """Mean over the classes of hidden @ weight.T + bias, of float32 copies of hidden and of the mean row."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
        return mean if bias is None else mean + bias.mean(dtype=dtype)
