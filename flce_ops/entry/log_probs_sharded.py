"""linear_log_probs on DTensors: per-token results sharded as the tokens are."""

import torch
from torch import Tensor

from flce_ops.distributed.layout import check_plain_target, layout_of
from flce_ops.distributed.local import localize_head
from flce_ops.distributed.sparse_seed import sparse_of_rank
from flce_ops.distributed.vocab_parallel import vocab_parallel_rows
from flce_ops.entry.arguments import check_head
from flce_ops.entry.schemas import LogProbs
from flce_ops.entry.sharded import per_token
from flce_ops.entry.sparse_gradient import check_sparse_gradient, refuse_sparse_gradient
from flce_ops.math.log_probs import log_probs_of_rows
from flce_ops.math.options import Operands
from flce_ops.math.scalars import logit_options
from flce_ops.ops.autocast import autocast_head

# N tokens of this rank, D hidden, V vocabulary


def dtensor_log_probs(call: LogProbs) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_log_probs when an argument is a DTensor, or a plain target beside some."""
    op = "linear_log_probs"
    layout = layout_of(call.input, call.linear_weight, op, target=call.target, linear_bias=call.linear_bias)
    check_plain_target(call.target, call.input, op)
    autocast_head(call)
    check_head(op, call)
    call.sparse = sparse_of_rank(layout, call.sparse)
    check_sparse_gradient(op, call)
    num_classes, shape, target_shape = call.linear_weight.shape[0], call.input.shape[:-1], call.target.shape
    tokens_shape, (input, linear_weight, target, linear_bias) = localize_head(
        layout, call.input, call.linear_weight, call.target, call.linear_bias
    )
    if layout.splits_vocabulary:
        refuse_sparse_gradient(op, call, "over a sharded vocabulary")
        rows = vocab_parallel_rows(
            layout,
            Operands(input, linear_weight, target, linear_bias, None),
            num_classes=num_classes,
            ignore_index=call.ignore_index,
            logits=logit_options(call.numbers, input),
            expected_log_prob=call.entropy,
            argmax=call.argmax,
            log_sum_sq_probs=call.log_sum_sq_probs,
            mean_logit=call.mean_logit,
        )
        numbers = (rows.target_logit, rows.lse, *rows[3:])
        results = log_probs_of_rows(target, call.ignore_index, *numbers, tail=call.tail)
    else:
        call.input, call.linear_weight, call.target, call.linear_bias = input, linear_weight, target, linear_bias
        results = LogProbs.run(torch.ops.flce.linear_log_probs, call.values())
    log_probs, *others = results
    log_probs = per_token(layout, log_probs.reshape(*tokens_shape, *target_shape[len(shape) :]), target_shape)
    asked_for = (True, call.entropy, call.argmax, call.log_sum_sq_probs, call.mean_logit, call.tail)
    return log_probs, *(
        per_token(layout, result.reshape(tokens_shape), shape) if asked else result
        for result, asked in zip(others, asked_for, strict=True)
    )
