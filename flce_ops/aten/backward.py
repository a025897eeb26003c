"""Kernel of linear_cross_entropy_backward: logits again, then their gradient, then two GEMMs."""

import torch

from flce_ops import meta
from flce_ops.aten.chunks import chunk_products, product_is_rounded, row_blocks
from flce_ops.aten.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.aten.logits import (
    activate_with_slope,
    add_target_and_sum,
    apply_slope,
    at_least_finite,
    upcast,
    write_over,
)
from flce_ops.math.shards import target_columns
from flce_ops.meta.arguments import Backward, takes
from flce_ops.meta.outputs import Gradients
from flce_ops.support.readable import copy_bytes

# N tokens, n rows of a chunk, D hidden, V vocabulary


@takes(Backward)
def backward(call: Backward) -> Gradients:
    grads = meta.backward_outputs(call)
    input, linear_weight, target, linear_bias, weight = call.operands
    lse, lse_rest, expected_logit, output_mask = call.lse, call.lse_rest, call.expected_logit, call.output_mask
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    cotangents = call.cotangents.kept(hit, valid, lse.dtype)
    grad_lse, grad_expected_logit = cotangents.grad_lse, call.grad_expected_logit
    if grad_expected_logit is not None:
        grad_expected_logit = torch.where(valid, grad_expected_logit, 0.0).to(lse.dtype)
    p_factor = p_expected = None  # of exp(z - lse): cotangents, and what lse lacks
    if grad_lse is not None or grad_expected_logit is not None:
        share = torch.ones_like(lse) if lse_rest is None else torch.exp(-lse_rest)
        p_factor = torch.zeros_like(lse) if grad_lse is None else grad_lse
        if grad_expected_logit is not None:
            p_factor = (p_factor + grad_expected_logit * (1.0 + lse - expected_logit)) * share
            p_expected = grad_expected_logit * share
        else:
            p_factor = p_factor * share
    linear_bias, weight = upcast(linear_bias, lse.dtype), upcast(weight, lse.dtype)
    # p and its factor are two matrices where the factor depends on the class
    in_block = product_is_rounded(input) + (grad_expected_logit is not None) + (call.logits.softcap is not None)
    step = rows_beside_gradients(
        input, linear_weight.shape[0], output_mask[1], matrices_in_block=in_block, reserved=copy_bytes(linear_weight)
    )
    gradients = GradientAccumulator(input, linear_weight, grads, output_mask, step)
    for chunk, product in chunk_products("linear_cross_entropy_backward", input, linear_weight, step):
        for rows, block in row_blocks(input, chunk, product):
            logits, slope = activate_with_slope(block, linear_bias, call.logits)
            if p_expected is not None:
                log_p = at_least_finite(logits.sub_(lse[rows, None]))
                p = log_p.exp()
                grad_logits = log_p.mul_(p_expected[rows, None]).add_(p_factor[rows, None]).mul_(p)
                del p
            elif p_factor is None:
                grad_logits = logits.zero_()
            else:
                grad_logits = logits.sub_(lse[rows, None]).exp_().mul_(p_factor[rows, None])
            add_target_and_sum(grad_logits, column[rows], cotangents.of(rows), weight)
            apply_slope(grad_logits, slope)
            gradients.add_to_bias(grad_logits)
            write_over(block, grad_logits)
            del logits, grad_logits, slope  # before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    return grads
