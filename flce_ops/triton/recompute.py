"""The tokens of linear_cross_entropy_with_grad in a workspace too small for one pass: forward, then backward.

Four GEMM passes instead of three, but grad_linear_weight is summed over many rows at a time whatever the workspace is.
H200, 8192x4096x128256, 64 MiB: 2.4 times the three GEMMs with chunks of 128 rows, 1.4 times by this path.
"""

import torch
from torch import Tensor

from flce_ops.math.loss import loss_terms_of
from flce_ops.triton.backward import add_gradients
from flce_ops.triton.forward import launch_forward

# N tokens, D hidden, V vocabulary


def recompute_step(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,
    target: Tensor,  # (n,)
    linear_bias: Tensor | None,
    weight: Tensor | None,
    row_scale: Tensor,  # (n,)
    losses: Tensor,  # (n,) out
    largest: Tensor | None,  # (n,) out, argmax
    *gradients: Tensor | None,  # grad_input (n, D), grad_weight (V, D), bias_sum (V,): see backward.add_gradients
    first: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
    logit_scale: Tensor | None,  # ()
) -> None:
    operands = (input, linear_weight, target, linear_bias, weight)
    logits = {"ignore_index": ignore_index, "softcap": softcap, "logit_scale": logit_scale}
    wanted = {"logit_sum": bool(label_smoothing), "argmax": largest is not None}
    target_logit, lse, logit_sum, _, _, columns, lse_rest = launch_forward(*operands, **wanted, **logits)
    if largest is not None:
        largest.copy_(columns)

    terms = loss_terms_of(target, weight, linear_weight.shape[0], label_smoothing, z_loss, lse.dtype)
    valid = target != ignore_index
    found = terms.loss(target_logit, lse, logit_sum if label_smoothing else None, lse_rest)
    losses.copy_(torch.where(valid, found, 0.0))
    scale = torch.where(valid, row_scale, 0.0)
    add_gradients(
        *terms.cotangents(lse, scale),
        *operands,
        lse,
        *gradients,
        first=first,
        lse_rest=lse_rest,
        **logits,
    )
