"""The tokens of a one-pass operator if the workspace is too small for one pass: runs forward, then backward.

This takes four GEMM passes instead of three. But grad_linear_weight is summed over many rows at a time, however small
the workspace is. H200, 8192x4096x128256, 64 MiB: 2.4 times the three GEMMs' time with chunks of 128 rows, 1.4 times on
this path.
"""

import torch

from ... import meta
from ...math.options import Cotangents
from ...math.statistics import Rows, asked_of_forward, surprisal
from ...math.topk import beside_topk
from ...meta.arguments import Backward, Forward, WithGrad
from ..gemm.weight_gradient import WeightGradient
from ..rows.valid_tokens import ValidTokens
from .backward import run_backward
from .forward import run_forward
from .gradients import Gradients
from .one_pass_step import StepTokens

# N tokens, n of which run here


def recompute_step(
    call: WithGrad,  # with all N tokens
    place: torch.Tensor,  # (N,) the place of each token in the order of all valid tokens
    per_token: StepTokens,
    valid_tokens: ValidTokens,  # the tokens to run
    gradients: Gradients,  # `input` is (n, D), in the order of `valid_tokens`
    weight_gradient: WeightGradient | None,
) -> list[slice]:
    """The ranges of rows it took."""
    objective = per_token.objective
    smoothed, asked = objective.d_sum is not None, asked_of_forward(call.statistics)
    forward = Forward.like(call, logit_sum=smoothed, **asked)
    outputs = meta.outputs(forward)
    run_forward(forward, valid_tokens, outputs, own_target=False)  # own_target=False, as in a one-pass step
    target_logit, lse, logit_sum, *_, lse_rest, _ = outputs
    valid, here = place >= 0, place >= valid_tokens.start
    mine = here | ~valid
    distance = surprisal(target_logit, lse, lse_rest)
    losses, slopes = objective.losses_and_slopes(distance, lse, logit_sum if smoothed else None)
    found = [(per_token.losses, losses)]
    if per_token.log_probs is not None:
        found.append((per_token.log_probs, -distance))
    for out, values in found:
        out.copy_(torch.where(mine, torch.where(valid, values, 0.0), out))
    for of_tokens, values in zip(per_token.statistics, Rows.of_forward(outputs).statistics(call.statistics)):
        if values is not None:
            of_tokens.copy_(torch.where(mine, values, of_tokens))
    cotangents = objective.cotangents(slopes, call.reduction.scale_of_tokens(valid, torch.float32))
    own = (None if grad is None else torch.where(beside_topk(here, grad), grad, 0.0) for grad in cotangents)
    rows = {"cotangents": Cotangents(*own), "lse": lse, "lse_rest": lse_rest}
    backward = Backward.like(call, **rows, output_mask=[wanted is not None for wanted in gradients])
    return run_backward(backward, valid_tokens, gradients, weight_gradient)
