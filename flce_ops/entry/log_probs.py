"""Log-probabilities of given tokens, and what else a row of logits is asked for, from one pass that holds no logits.

torch.ops.flce.linear_log_probs -> composite -> linear_cross_entropy_forward -> ATen over N numbers

log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij
"""

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_head
from flce_ops.math.log_probs import log_probs_of_rows
from flce_ops.math.scalars import Number, logit_scalars
from flce_ops.ops.autocast import autocast_operands
from flce_ops.support.dtensor import any_dtensor

# N tokens, D hidden, V vocabulary

OP = "linear_log_probs"


def composite(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    entropy: bool = False,
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Body of torch.ops.flce.linear_log_probs; (0,) in place of what is not asked for."""
    if any_dtensor(input, linear_weight, target, linear_bias):
        from flce_ops.entry.log_probs_sharded import (
            dtensor_log_probs,  # builds on torch.distributed.tensor: only for its users
        )

        return dtensor_log_probs(
            input,
            linear_weight,
            target,
            linear_bias,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            entropy=entropy,
            argmax=argmax,
        )
    input, linear_weight, linear_bias = autocast_operands(input.device.type, input, linear_weight, linear_bias)
    check_head(OP, input, linear_weight, target, linear_bias, softcap, temperature)
    flat_target = target.reshape(target.numel())
    target_logit, lse, _, expected, _, largest, lse_rest = torch.ops.flce.linear_cross_entropy_forward(
        input.reshape(target.numel(), input.shape[-1]),
        linear_weight,
        flat_target,
        linear_bias,
        None,
        ignore_index=ignore_index,
        **logit_scalars(logit_scale, softcap, temperature, input),
        expected_logit=entropy,
        argmax=argmax,
    )
    valid = (flat_target != ignore_index).reshape(target.shape)
    rows = (target_logit, lse, expected if entropy else None, largest if argmax else None, lse_rest)
    return log_probs_of_rows(valid, *(None if row is None else row.reshape(target.shape) for row in rows))
