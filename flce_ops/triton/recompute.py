"""The tokens of linear_cross_entropy_with_grad in a workspace too small for one pass: forward, then backward.

Four GEMM passes instead of three, but grad_linear_weight is summed over many rows at a time whatever the workspace is.
H200, 8192x4096x128256, 64 MiB: 2.4 times the three GEMMs with chunks of 128 rows, 1.4 times by this path.
"""

from collections.abc import Callable
from typing import Any

import torch

from flce_ops import meta
from flce_ops.math.loss import losses_of_rows
from flce_ops.math.statistics import asked_of_forward, statistics_of_forward
from flce_ops.meta.arguments import Backward, Forward, WithGrad
from flce_ops.triton.backward import run_backward
from flce_ops.triton.forward import run_forward
from flce_ops.triton.gradients import Gradients
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.one_pass_step import StepTokens
from flce_ops.triton.weight_gradient import WeightGradient

# N tokens, n of them here

# Of target_logit, lse, logit_sum and lse_rest: what has the cotangents of LossTerms, the numbers that stand for the
# losses, 0 where ignored, and which tokens are not.
LossesOfRows = Callable[..., tuple[Any, torch.Tensor, torch.Tensor]]


def recompute_step(
    call: WithGrad,  # of N tokens
    place: torch.Tensor,  # (N,) of each token in the order of all kept ones
    per_token: StepTokens,
    kept: Kept,  # the tokens to take
    gradients: Gradients,  # input: (n, D), in the order of `kept`
    weight_gradient: WeightGradient | None,
    losses_of: LossesOfRows | None = None,  # None for call.loss
) -> list[slice]:
    """The ranges of rows it took."""
    operands = call.operands
    logits = {"ignore_index": call.ignore_index, **call.logits._asdict()}
    asked = asked_of_forward(call.statistics)
    forward = Forward.bind(*operands, logit_sum=bool(call.loss.label_smoothing), **asked, **logits)
    outputs = meta.outputs(forward)
    run_forward(forward, kept, outputs)
    target_logit, lse, logit_sum, *_, lse_rest, _ = outputs
    here = place >= kept.start
    rows = (target_logit, lse, logit_sum, lse_rest)
    if losses_of is not None:
        terms, losses, valid = losses_of(*rows)
    else:
        terms, losses, valid = losses_of_rows(
            operands,
            call.ignore_index,
            call.loss,
            operands.linear_weight.shape[0],
            *rows,
            target_weight=call.target_weight,
        )
    mine = here | ~valid
    per_token.losses.copy_(torch.where(mine, losses, per_token.losses))
    for out, found in zip(per_token.statistics, statistics_of_forward(call.statistics, outputs)):
        if found is not None:
            out.copy_(torch.where(mine, found, out))
    scale = torch.where(here, call.reduction.scale_of_tokens(valid, torch.float32), 0.0)
    cotangents = terms.cotangents(target_logit, lse, scale)
    backward = Backward.bind(
        *cotangents,
        *operands,
        lse,
        **logits,
        output_mask=[wanted is not None for wanted in gradients],
        lse_rest=lse_rest,
    )
    return run_backward(backward, kept, gradients, weight_gradient)
