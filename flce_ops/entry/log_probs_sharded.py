"""linear_log_probs on DTensors: per-token results sharded as the tokens are."""

import torch
from torch import Tensor

from flce_ops.distributed.layout import check_plain_target, check_same_mesh, layout_of
from flce_ops.distributed.local import localize_head
from flce_ops.distributed.vocab_parallel import vocab_parallel_rows
from flce_ops.entry.arguments import check_head
from flce_ops.entry.sharded import per_token
from flce_ops.math.log_probs import log_probs_of_rows
from flce_ops.math.scalars import Number, logit_scalars
from flce_ops.ops.autocast import autocast_operands

# N tokens of this rank, D hidden, V vocabulary


def dtensor_log_probs(
    input: Tensor,  # (..., D) DTensor
    linear_weight: Tensor,  # (V, D) DTensor
    target: Tensor,  # (...), a DTensor, or a plain tensor that is the same on every rank
    linear_bias: Tensor | None,  # (V,)
    *,
    ignore_index: int,
    softcap: Number | None,
    logit_scale: Number,
    temperature: Number,
    entropy: bool,
    argmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Body of torch.ops.flce.linear_log_probs when an argument is a DTensor."""
    op = "linear_log_probs"
    layout = layout_of(input, linear_weight, op)
    check_same_mesh(layout, input, op, target=target, linear_bias=linear_bias)
    check_plain_target(target, input, op)
    input, linear_weight, linear_bias = autocast_operands(input.device.type, input, linear_weight, linear_bias)
    check_head(op, input, linear_weight, target, linear_bias, softcap, temperature)
    num_classes, target_shape = linear_weight.shape[0], target.shape
    tokens_shape, operands = localize_head(layout, input, linear_weight, target, linear_bias)
    if layout.splits_vocabulary:
        rows = vocab_parallel_rows(
            layout,
            *operands,
            None,
            num_classes=num_classes,
            ignore_index=ignore_index,
            **logit_scalars(logit_scale, softcap, temperature, operands[0]),
            expected_logit=entropy,
            argmax=argmax,
        )
        valid = operands[2] != ignore_index
        results = log_probs_of_rows(valid, rows.target_logit, rows.lse, rows.expected_logit, rows.argmax)
    else:
        results = torch.ops.flce.linear_log_probs(
            *operands,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            entropy=entropy,
            argmax=argmax,
        )
    asked_for = (True, True, entropy, argmax)
    return tuple(
        per_token(layout, result.reshape(tokens_shape), target_shape) if asked else result
        for result, asked in zip(results, asked_for)
    )
