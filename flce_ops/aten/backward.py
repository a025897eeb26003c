"""linear_cross_entropy_backward: recomputes the logits that forward did not save, computes their gradient, then runs
two GEMMs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.shards import target_columns
from ..math.sparse_gradient import Draws
from ..meta.arguments import Backward, BackwardInPlace
from .chunks import block_bytes, chunk_products, copy_bytes, product_is_rounded, row_blocks
from .gradients import SparseAccumulator, accumulator_of, draws_of, needs_exact, rows_beside_gradients
from .logits import activate_with_slope, add_target_and_sum, apply_slope, softmax_factors, softmax_gradient, upcast
from .valid_tokens import kernel_of

# N tokens, n rows of a chunk, D hidden, V vocabulary


@kernel_of(BackwardInPlace)
def backward_in_place(call: BackwardInPlace, grads: Sequence[Tensor]) -> None:
    main_grad = call.main_grad.data  # with its own version counter: all chunks count as one write
    torch.autograd.graph.increment_version(call.main_grad)
    gradients_of_rows(call, (grads[0], main_grad, *grads[2:]))


@kernel_of(Backward, extra_of=draws_of)
def backward(call: Backward, grads: Sequence[Tensor], draws: Draws | None = None) -> None:
    gradients_of_rows(call, grads, draws)


def gradients_of_rows(call: Backward, grads: Sequence[Tensor], draws: Draws | None = None) -> None:
    input, linear_weight, target, linear_bias, weight = call.operands
    num_classes, output_mask = linear_weight.shape[0], call.output_mask
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, num_classes)
    cotangents = call.cotangents.masked(hit, valid, call.lse.dtype)
    factors = softmax_factors(call, valid, cotangents.grad_lse)
    weight = upcast(weight, call.lse.dtype)
    # p and its factor are separate matrices if the factor depends on the class
    in_block = product_is_rounded(input) + (factors.expected is not None) + (call.logits.softcap is not None)
    in_block += (draws is not None) + 2 * call.scale_gradient  # u, and G u
    # The user's buffer. If there are several chunks, they are summed in float32 first, also for a bfloat16 or float16
    # buffer.
    main_grad = call.main_grad if isinstance(call, BackwardInPlace) else None
    sums = output_mask[1] and (main_grad is None or main_grad.itemsize < 4)
    step = rows_beside_gradients(
        input,
        num_classes,
        sums,
        matrices=draws is not None and needs_exact(call),
        matrices_in_block=in_block,
        reserved=copy_bytes(linear_weight),
    )
    retained = None if call.retained is None else call.retained.view(input.dtype)
    gradients = accumulator_of(call, draws, grads, step)
    nbytes = block_bytes(input)
    for chunk, product in chunk_products(call, input, linear_weight, linear_bias, step, retained):
        for rows, block in row_blocks(input, chunk, product, nbytes):
            product_of_rows = gradients.kept(block)
            logits, slope = activate_with_slope(block, call.logits)
            grad_logits = softmax_gradient(logits, factors.of(rows))
            add_target_and_sum(grad_logits, column[rows], cotangents.of(rows), weight)
            gradients.add_bias(apply_slope(grad_logits, slope))
            gradients.add_scale(grad_logits, product_of_rows)
            if isinstance(gradients, SparseAccumulator):
                gradients.keep(grad_logits, cotangents.filled(call.lse).of(rows).grad_lse, chunk, rows)
            gradients.round_block(block, grad_logits)
            del logits, grad_logits, slope  # frees memory before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
