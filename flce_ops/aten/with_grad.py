"""Kernel of linear_cross_entropy_with_grad: the scalar loss and its gradients, from one pass over the logits."""

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
    exponentiate_rows,
    upcast,
    weighted_logits,
    write_over,
)
from flce_ops.math.loss import loss_terms
from flce_ops.math.shards import target_columns
from flce_ops.math.two_sum import two_sum
from flce_ops.support.readable import copy_bytes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    row_scale: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: Tensor | None = None,  # ()
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    output_mask: list[bool],
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, row_scale)
    loss, losses, *grads, largest = meta.with_grad_outputs(*operands, output_mask=output_mask, argmax=argmax)
    num_classes = linear_weight.shape[0]
    check_target_range(target, num_classes, ignore_index)
    valid, _, column = target_columns(target, ignore_index, 0, num_classes)
    accumulate = meta.accumulation_dtype(input.dtype)
    scale = torch.where(valid, row_scale, 0.0).to(accumulate)
    linear_bias, class_weight = upcast(linear_bias, accumulate), upcast(weight, accumulate)
    target_weight = None if class_weight is None else class_weight[column.squeeze(1)]
    weight_sum = None if class_weight is None else class_weight.sum()
    in_block = product_is_rounded(input) + (softcap is not None)
    step = rows_beside_gradients(
        input, num_classes, output_mask[1], matrices_in_block=in_block, reserved=copy_bytes(linear_weight)
    )
    gradients = GradientAccumulator(input, linear_weight, tuple(grads), output_mask, step)
    for chunk, product in chunk_products("linear_cross_entropy_with_grad", input, linear_weight, step):
        for rows, block in row_blocks(input, chunk, product):
            terms = loss_terms(
                None if target_weight is None else target_weight[rows], weight_sum, num_classes, label_smoothing, z_loss
            )
            logits, slope = activate_with_slope(block, linear_bias, logit_scale, softcap)
            target_logit = logits.gather(1, column[rows]).squeeze(1)
            logit_sum = weighted_logits(logits, class_weight) if label_smoothing else None
            if argmax:
                largest[rows] = logits.argmax(1)
            row_max, row_sum = exponentiate_rows(logits)
            lse, lse_rest = two_sum(row_max, row_sum.log())
            losses[rows] = torch.where(valid[rows], terms.loss(target_logit, lse, logit_sum, lse_rest), 0.0)
            grad_logits = logits.mul_((scale[rows] * terms.d_lse(lse) / row_sum)[:, None])
            add_target_and_sum(
                grad_logits,
                column[rows],
                -terms.target_factor * scale[rows],
                -terms.smoothing * scale[rows] if label_smoothing else None,
                class_weight,
            )
            apply_slope(grad_logits, slope)
            gradients.add_to_bias(grad_logits)
            write_over(block, grad_logits)
            del logits, grad_logits, slope  # before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    torch.sum(row_scale * losses, dim=0, out=loss)
    return loss, losses, *grads, largest
