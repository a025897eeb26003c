"""The tokens of linear_cross_entropy_with_grad in a workspace too small for one pass: forward, then backward.

Four GEMM passes instead of three, but grad_linear_weight is summed over many rows at a time whatever the workspace is.
H200, 8192x4096x128256, 64 MiB: 2.4 times the three GEMMs with chunks of 128 rows, 1.4 times by this path.
"""

import torch
from torch import Tensor

from flce_ops.loss import loss_terms_of
from flce_ops.math_options import LogitOptions, LossOptions, Operands
from flce_ops.triton.backward import Cotangents, add_gradients
from flce_ops.triton.forward import launch_forward
from flce_ops.triton.gemm import Gradients

# n tokens, D hidden, V vocabulary


def recompute_step(
    operands: Operands,  # of n tokens
    logit_options: LogitOptions,
    loss_options: LossOptions,
    row_scale: Tensor,  # (n,)
    losses: Tensor,  # (n,) out
    gradients: Gradients,  # input (n, D)
    argmax: Tensor | None,  # (n,) out
    *,
    first: bool,
    ignore_index: int,
) -> None:
    target, weight, num_classes = operands.target, operands.weight, operands.linear_weight.shape[0]
    wanted = {"logit_sum": bool(loss_options.label_smoothing), "argmax": argmax is not None}
    target_logit, lse, logit_sum, _, _, columns, lse_rest = launch_forward(
        *operands, ignore_index=ignore_index, **wanted, **logit_options._asdict()
    )
    if argmax is not None:
        argmax.copy_(columns)
    terms = loss_terms_of(target, weight, num_classes, *loss_options, lse.dtype)
    valid = target != ignore_index
    found = terms.loss(target_logit, lse, logit_sum if wanted["logit_sum"] else None, lse_rest)
    losses.copy_(torch.where(valid, found, 0.0))
    cotangents = Cotangents(*terms.cotangents(lse, torch.where(valid, row_scale, 0.0)))
    add_gradients(
        cotangents, operands, logit_options, lse, gradients, first=first, ignore_index=ignore_index, lse_rest=lse_rest
    )
