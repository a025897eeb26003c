"""The tokens of linear_cross_entropy_with_grad in a workspace too small for one pass: forward, then backward.

Four GEMM passes instead of three, but grad_linear_weight is summed over many rows at a time whatever the workspace is.
H200, 8192x4096x128256, 64 MiB: 2.4 times the three GEMMs with chunks of 128 rows, 1.4 times by this path.
"""

import torch
from torch import Tensor

from flce_ops.math.loss import losses_of_rows
from flce_ops.meta.arguments import Backward, WithGrad
from flce_ops.triton.backward import add_gradients
from flce_ops.triton.forward import launch_forward
from flce_ops.triton.gemm import Gradients

# n tokens, D hidden, V vocabulary


def recompute_step(
    call: WithGrad,  # of n tokens
    losses: Tensor,  # (n,) out
    gradients: Gradients,  # input (n, D)
    argmax: Tensor | None,  # (n,) out
    *,
    first: bool,
) -> None:
    operands = call.operands
    logits = {"ignore_index": call.ignore_index, **call.logits._asdict()}
    target_logit, lse, logit_sum, _, _, columns, lse_rest = launch_forward(
        *operands, logit_sum=bool(call.loss.label_smoothing), argmax=argmax is not None, **logits
    )
    if argmax is not None:
        argmax.copy_(columns)
    rows = (target_logit, lse, logit_sum, lse_rest)
    terms, found, valid = losses_of_rows(operands, call.ignore_index, call.loss, operands.linear_weight.shape[0], *rows)
    losses.copy_(found)
    cotangents = terms.cotangents(target_logit, lse, torch.where(valid, call.row_scale, 0.0))
    backward = Backward.bind(
        *cotangents,
        *operands,
        lse,
        **logits,
        output_mask=[wanted is not None for wanted in gradients],
        lse_rest=lse_rest,
    )
    add_gradients(backward, gradients, first=first)
