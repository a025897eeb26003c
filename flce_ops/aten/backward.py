"""Kernel of linear_cross_entropy_backward: logits again, then their gradient, then two GEMMs."""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import (
    chunk_products,
    product_is_rounded,
    row_blocks,
)
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
from flce_ops.support.readable import copy_bytes

# N tokens, n rows of a chunk, D hidden, V vocabulary


def backward(
    grad_target_logit: Tensor | None,
    grad_lse: Tensor | None,
    grad_logit_sum: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int = -100,
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    vocab_start: int = 0,
    output_mask: list[bool],
    grad_expected_logit: Tensor | None = None,
    expected_logit: Tensor | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, lse)
    cotangents = (grad_target_logit, grad_lse, grad_logit_sum)
    per_token = {
        "grad_expected_logit": grad_expected_logit,
        "expected_logit": expected_logit,
        "lse_rest": lse_rest,
    }
    grads = meta.backward_outputs(*cotangents, *operands, output_mask=output_mask, **per_token)
    valid, hit, column = target_columns(target, ignore_index, vocab_start, linear_weight.shape[0])
    grad_lse, grad_target_logit, grad_logit_sum, grad_expected_logit = (
        None if grad is None else torch.where(kept, grad, 0.0).to(lse.dtype)
        for grad, kept in (
            (grad_lse, valid),
            (grad_target_logit, hit),
            (grad_logit_sum, valid),
            (grad_expected_logit, valid),
        )
    )
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
    in_block = product_is_rounded(input) + (grad_expected_logit is not None) + (softcap is not None)
    step = rows_beside_gradients(
        input, linear_weight.shape[0], output_mask[1], matrices_in_block=in_block, reserved=copy_bytes(linear_weight)
    )
    gradients = GradientAccumulator(input, linear_weight, grads, output_mask, step)
    for chunk, product in chunk_products("linear_cross_entropy_backward", input, linear_weight, step):
        for rows, block in row_blocks(input, chunk, product):
            logits, slope = activate_with_slope(block, linear_bias, logit_scale, softcap)
            if p_expected is not None:
                log_p = at_least_finite(logits.sub_(lse[rows, None]))
                p = log_p.exp()
                grad_logits = log_p.mul_(p_expected[rows, None]).add_(p_factor[rows, None]).mul_(p)
                del p
            elif p_factor is None:
                grad_logits = logits.zero_()
            else:
                grad_logits = logits.sub_(lse[rows, None]).exp_().mul_(p_factor[rows, None])
            add_target_and_sum(
                grad_logits,
                column[rows],
                None if grad_target_logit is None else grad_target_logit[rows],
                None if grad_logit_sum is None else grad_logit_sum[rows],
                weight,
            )
            apply_slope(grad_logits, slope)
            gradients.add_to_bias(grad_logits)
            write_over(block, grad_logits)
            del logits, grad_logits, slope  # before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    return grads
