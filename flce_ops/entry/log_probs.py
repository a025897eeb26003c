"""Log-probabilities of given tokens, and what else a row of logits is asked for, from one pass that holds no logits.

torch.ops.flce.linear_log_probs -> composite -> linear_cross_entropy_forward -> ATen over N numbers

log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij

With K slots a token, log_prob_ik = z_iyk - lse_i, and the tail's log p is log(1 - sum_k e^log_prob_ik).
"""

import math

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_head
from flce_ops.entry.schemas import LogProbs
from flce_ops.entry.sparse_gradient import check_sparse_gradient
from flce_ops.math.log_probs import log_probs_of_rows
from flce_ops.math.scalars import logit_options
from flce_ops.meta.call import takes
from flce_ops.ops.autocast import autocast_head
from flce_ops.support.dtensor import any_dtensor

# N tokens, K slots of a target, D hidden, V vocabulary

OP = "linear_log_probs"


@takes(LogProbs)
def composite(call: LogProbs) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_log_probs; (0,) in place of what is not asked for."""
    if any_dtensor(call.input, call.linear_weight, call.target, call.linear_bias):
        from flce_ops.entry.log_probs_sharded import dtensor_log_probs  # torch.distributed.tensor: only for its users

        return dtensor_log_probs(call)
    autocast_head(call)
    check_head(OP, call)
    check_sparse_gradient(OP, call)
    shape = call.input.shape[:-1]
    tokens, slots = math.prod(shape), call.target.shape[len(shape) :]
    results = torch.ops.flce.linear_cross_entropy_forward(
        call.input.reshape(tokens, call.input.shape[-1]),
        call.linear_weight,
        call.target.reshape(tokens, *slots),
        call.linear_bias,
        None,
        ignore_index=call.ignore_index,
        **logit_options(call.numbers, call.input)._asdict(),
        expected_log_prob=call.entropy,
        argmax=call.argmax,
        log_sum_sq_probs=call.log_sum_sq_probs,
        mean_logit=call.mean_logit,
        **call.sparse._asdict(),
    )
    target_logit, lse, _, expected, _, argmax, squares, mean_logit, lse_rest, _ = results
    asked = (call.entropy, call.argmax, call.log_sum_sq_probs, call.mean_logit)
    found = (of_rows if wanted else None for of_rows, wanted in zip((expected, argmax, squares, mean_logit), asked))
    rows = (None if row is None else row.reshape(shape) for row in (lse, *found, lse_rest))
    target_logit = target_logit.reshape(call.target.shape)
    return log_probs_of_rows(call.target, call.ignore_index, target_logit, *rows, tail=call.tail)
