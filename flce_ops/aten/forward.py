"""linear_cross_entropy_forward: the numbers of each row that the loss needs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.options import Statistics
from ..math.shards import target_columns
from ..math.statistics import two_sum
from ..meta.arguments import Forward
from .chunks import block_bytes, chunk_products, copy_bytes, product_dtype, row_blocks, rows_per_chunk, save_product
from .logits import activate, at_columns
from .row_statistics import extra_matrices, reduce_rows
from .valid_tokens import kernel_of, zero_where_ignored

# N tokens, n rows of a chunk, D hidden, V vocabulary


@kernel_of(Forward, checks_target=True)
def forward(call: Forward, outputs: Sequence[Tensor]) -> None:
    target_logit, lse, sums, expected, max_logit, argmax, squares, mean_logit, lse_rest, retained = outputs
    input, linear_weight, target, linear_bias, weight = call.operands
    num_classes = linear_weight.shape[0]
    if target.dim() == 2 or call.vocab_size is not None or call.vocab_start:  # a shard, which lacks some classes
        _, hit, column = target_columns(target, call.ignore_index, call.vocab_start, num_classes)
    else:
        hit, column = None, zero_where_ignored(input, target).long().unsqueeze(1)
    weight = None if weight is None else weight.to(lse.dtype)
    weight_sum = (num_classes if weight is None else weight.sum()) if call.logit_sum else None
    asked = Statistics(call.argmax, True, call.expected_log_prob, call.log_sum_sq_probs, call.mean_logit)
    in_block = (product_dtype(input) != lse.dtype) + extra_matrices(asked)
    step = rows_per_chunk(input, num_classes, matrices_in_block=in_block, reserved=copy_bytes(linear_weight))
    if call.retain:
        products = retained.view(input.dtype)
        products[:, num_classes:].zero_()
        products[input.shape[0] :].zero_()
    nbytes = block_bytes(input)
    for chunk, product in chunk_products(call, input, linear_weight, linear_bias, step):
        if call.retain:
            save_product(products, chunk, product)
        blocks = row_blocks(input, chunk, product, nbytes, column, target_logit, lse, lse_rest)
        for rows, block, own_column, own_target_logit, own_lse, own_rest in blocks:
            logits = activate(block, call.logits)
            at_target = at_columns(logits, own_column, own_target_logit)
            own_target_logit.copy_(at_target if hit is None else torch.where(hit[rows], at_target, 0.0))
            found = reduce_rows(logits, asked, call.num_classes, weight, weight_sum)
            if call.argmax:
                max_logit[rows], argmax[rows] = found.max_logit, found.argmax
            if call.mean_logit:
                mean_logit[rows] = found.mean_logit
            if call.logit_sum:
                sums[rows] = found.logit_sum
            if call.expected_log_prob:
                expected[rows] = found.moment - found.log_sum
            if call.log_sum_sq_probs:
                squares[rows] = found.log_sum_sq_probs
            total, rest = two_sum(found.row_max, found.log_sum)
            own_lse.copy_(total)
            own_rest.copy_(rest)
            del logits  # frees memory before the next block is allocated
