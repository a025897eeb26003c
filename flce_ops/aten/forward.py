"""Kernel of linear_cross_entropy_forward: the numbers of a row that the loss needs."""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import (
    chunk_products,
    product_is_rounded,
    row_blocks,
    rows_per_chunk,
)
from flce_ops.aten.logits import activate, expectation, exponentiate_rows, upcast, weighted_logits
from flce_ops.math.shards import target_columns
from flce_ops.math.two_sum import two_sum
from flce_ops.support.readable import copy_bytes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary


def forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_sum: bool = False,
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    vocab_start: int = 0,
    vocab_size: int | None = None,
    expected_logit: bool = False,
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = {"logit_sum": logit_sum, "expected_logit": expected_logit, "argmax": argmax}
    outputs = meta.forward_outputs(input, linear_weight, target, linear_bias, weight, **wanted)
    target_logit, lse, sums, expected, max_logit, largest, lse_rest = outputs
    num_classes = linear_weight.shape[0]
    check_target_range(target, num_classes if vocab_size is None else vocab_size, ignore_index)
    _, hit, column = target_columns(target, ignore_index, vocab_start, num_classes)
    linear_bias, weight = upcast(linear_bias, lse.dtype), upcast(weight, lse.dtype)
    in_block = product_is_rounded(input) + expected_logit
    step = rows_per_chunk(input, num_classes, matrices_in_block=in_block, reserved=copy_bytes(linear_weight))
    for chunk, product in chunk_products("linear_cross_entropy_forward", input, linear_weight, step):
        for rows, block in row_blocks(input, chunk, product):
            logits = activate(block, linear_bias, logit_scale, softcap)
            target_logit[rows] = torch.where(hit[rows], logits.gather(1, column[rows]).squeeze(1), 0.0)
            if logit_sum:
                sums[rows] = weighted_logits(logits, weight)
            if argmax:
                max_logit[rows], largest[rows] = logits.max(1)
            if expected_logit:
                expected[rows], row_max, row_sum = expectation(logits)
            else:
                row_max, row_sum = exponentiate_rows(logits)
            lse[rows], lse_rest[rows] = two_sum(row_max, row_sum.log())
            del logits  # before the next block is allocated
    return outputs
