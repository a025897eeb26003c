"""The operators in plain ATen, a chunk of rows at a time: the kernel of all devices and dtypes Triton does not take.

    u = input @ linear_weight.T + linear_bias            (N, V), only a chunk of rows exists at a time: chunks.py
    z = softcap * tanh(logit_scale * u / softcap)        (without softcap: logit_scale * u)
    lse_i = log sum_j exp z_ij      target_logit_i = z_i,y_i      logit_sum_i = sum_j w_j z_ij
    p = exp(z - lse)                expected_logit_i = m_i = sum_j p_ij z_ij

With cotangents l, a, s, c of the four and f' = dz/du = logit_scale / cosh^2(logit_scale * u / softcap):

    G_ij = ((l_i + c_i (1 + z_ij - m_i)) p_ij + s_i w_j + a_i [j = y_i]) f'_ij
    grad_input = G @ linear_weight      grad_linear_weight = G.T @ input      grad_linear_bias = G.T @ 1

z, p and G live in the accumulation dtype (float32 for half operands); G is rounded to the operands' dtype once, for the
two GEMMs. The second derivatives stand in flce_ops/double_backward.py.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.chunks import chunk_product, chunk_products, product_is_rounded, row_blocks, rows_per_chunk
from flce_ops.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.loss import loss_terms
from flce_ops.readable import copy_bytes
from flce_ops.target_range import check_target_range

# N tokens, n rows of a chunk or of a block of one, D hidden, V vocabulary


def activate(
    product: Tensor,  # (n, V), overwritten where it has the accumulation dtype
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
) -> Tensor:  # (n, V) in the accumulation dtype
    logits = scale_logits(product, linear_bias, logit_scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def activate_with_slope(
    product: Tensor,  # (n, V), overwritten where it has the accumulation dtype
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
) -> tuple[Tensor, Tensor | None]:
    """`activate`'s z, (n, V), and dz/du: (n, V); where it is the same for all one number, (), or None for 1."""
    logits = scale_logits(product, linear_bias, logit_scale)
    if softcap is None:
        return logits, logit_scale
    logits, slope = cap_with_slope(logits, softcap)
    return logits, slope if logit_scale is None else slope.mul_(logit_scale)


def scale_logits(product: Tensor, linear_bias: Tensor | None, logit_scale: Tensor | None) -> Tensor:  # (n, V)
    logits = product.to(meta.accumulation_dtype(product.dtype))
    if linear_bias is not None:
        logits += linear_bias
    if logit_scale is not None:
        logits *= logit_scale
    return logits


def cap_with_slope(logits: Tensor, softcap: Tensor) -> tuple[Tensor, Tensor]:
    """softcap tanh(logits / softcap), in place, and its derivative 1 / cosh^2.

    As 1 - tanh^2 that is a difference which cancels: in float32 wrong by 1 % at logits of 6 caps, all of it at 9.
    """
    logits.div_(softcap)
    slope = logits.cosh().reciprocal_().square_()
    return logits.tanh_().mul_(softcap), slope


def chunk_logits(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
) -> Tensor:  # (n, V) in the accumulation dtype
    return activate(chunk_product(input, linear_weight), linear_bias, logit_scale, softcap)


def chunk_logits_with_slope(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
) -> tuple[Tensor, Tensor | None]:  # as of activate_with_slope
    return activate_with_slope(chunk_product(input, linear_weight), linear_bias, logit_scale, softcap)


def target_columns(
    target: Tensor, ignore_index: int, vocab_start: int, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """valid (N,): not ignored; hit (N,): valid and among these columns; column (N, 1): its index, 0 where not hit."""
    valid = target != ignore_index
    column = target.long() - vocab_start
    hit = valid & (column >= 0) & (column < num_classes)
    return valid, hit, torch.where(hit, column, 0).unsqueeze(1)


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
                sums[rows] = weighted_sum(logits, weight)
            if argmax:
                max_logit[rows], largest[rows] = logits.max(1)
            if expected_logit:
                expected[rows], row_max, row_sum = expectation(logits)
            else:
                row_max, row_sum = exponentiate_rows(logits)
            lse[rows], lse_rest[rows] = exact_sum(row_max, row_sum.log())
            del logits  # before the next block is allocated
    return outputs


def upcast(per_class: Tensor | None, dtype: torch.dtype) -> Tensor | None:  # (V,)
    """Once, rather than in every block."""
    return None if per_class is None else per_class.to(dtype)


def weighted_sum(logits: Tensor, weight: Tensor | None) -> Tensor:
    """sum_j w_j z_ij, (n,)."""
    return logits.sum(1) if weight is None else logits @ weight.to(logits.dtype)


def exponentiate_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turns z into exp(z - row_max) in place; returns row_max and the row sums, (n,) each."""
    row_max = finite_maximum(logits)
    row_sum = logits.sub_(row_max).exp_().sum(1)
    return row_max.squeeze(1), row_sum


def exact_sum(large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and what rounding took from it (Knuth's two-sum; 0 where the sum is not finite).

    An lse of 1000 is right to 3e-5 in float32, and so would be every probability exp(z - lse) of its row.
    """
    total = large + small
    part = total - large
    rest = (large - (total - part)) + (small - part)
    return total, torch.where(total.isfinite(), rest, 0.0)


def finite_maximum(logits: Tensor) -> Tensor:  # (n, 1)
    """A bias of -inf may switch off all classes of a vocabulary shard: their exponentials are 0, not nan."""
    return logits.amax(1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)


def probabilities(logits: Tensor, lse: Tensor, lse_rest: Tensor | None) -> Tensor:  # (n, V)
    p = torch.exp(logits - lse[:, None])
    return p if lse_rest is None else p.mul_(torch.exp(-lse_rest)[:, None])


def expectation(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j p_ij z_ij, and row_max and row sums as exponentiate_rows gives them, (n,) each; overwrites z."""
    row_max = finite_maximum(logits)
    shifted = at_least_finite(logits.sub_(row_max))
    exponentials = shifted.exp()
    row_sum = exponentials.sum(1)
    mean = exponentials.mul_(shifted).sum(1) / row_sum
    row_max = row_max.squeeze(1)
    return mean + row_max, row_max, row_sum


def at_least_finite(log_p: Tensor) -> Tensor:
    """In place: p log p is 0, not 0 * -inf, where a bias of -inf switches a class off; exp(-10^4) is 0 in any dtype."""
    return log_p.clamp_(min=-1e4)


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


def write_over(block: Tensor, grad_logits: Tensor) -> None:
    """G, rounded, takes the place of its logits; in the accumulation dtype it was made there."""
    if block.dtype != grad_logits.dtype:
        block.copy_(grad_logits)


def add_target_and_sum(
    grad_logits: Tensor,  # (n, V), in place
    column: Tensor,  # (n, 1)
    grad_target_logit: Tensor | None,  # (n,)
    grad_logit_sum: Tensor | None,  # (n,)
    weight: Tensor | None,  # (V,)
) -> None:
    if grad_logit_sum is not None:
        if weight is None:
            grad_logits += grad_logit_sum[:, None]
        else:
            grad_logits.addcmul_(grad_logit_sum[:, None], weight.to(grad_logits.dtype))  # addr_ makes an (n, V) copy
    if grad_target_logit is not None:
        grad_logits.scatter_add_(1, column, grad_target_logit[:, None])


def apply_slope(grad_logits: Tensor, slope: Tensor | None) -> Tensor:
    return grad_logits if slope is None else grad_logits.mul_(slope)


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
            logit_sum = weighted_sum(logits, class_weight) if label_smoothing else None
            if argmax:
                largest[rows] = logits.argmax(1)
            row_max, row_sum = exponentiate_rows(logits)
            lse, lse_rest = exact_sum(row_max, row_sum.log())
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
