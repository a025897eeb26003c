"""The gradient of a row of given logits, written once: its blocks, its edges, its target.

    G_ij = (factor_i 2^(z_ij - reference_i) + sum_factor_i w_j + [j = y_i] at_target_i) dz/du

It may stand where the logits stood: what the target and the edges are made of is read before anything is written.
"""

import triton
import triton.language as tl

from ..gemm.logits_gemm import base2_logits
from .logit_rows import class_weights, numbers_in, numbers_of

# V vocabulary


@triton.jit
def out_of(grad_logits, i, head, ALIKE: tl.constexpr):
    """Pointers to the gradient's row and to its first group."""
    row = grad_logits.pointer + i.to(tl.int64) * grad_logits.stride
    groups = row + head
    if ALIKE:
        groups = tl.multiple_of(groups, 16)
    return row, groups


@triton.jit
def gradient_numbers(
    u, col, mask, reference, factor, sum_factor, at_target, class_weight_ptr, logit_numbers, logit_scale, softcap
):
    """(factor 2^(z - reference) + sum_factor w + at_target) dz/du of numbers u of a row; factors times logit_scale."""
    z, dz_du = base2_logits(u.to(tl.float32), None, logit_numbers, logit_scale, softcap)
    g = tl.exp2(z - reference) * factor
    if sum_factor is not None:
        if class_weight_ptr is None:
            g += sum_factor
        else:
            g += sum_factor * class_weights(class_weight_ptr, col, mask)
    if at_target is not None:
        g += at_target
    if logit_numbers.softcap is not None:
        g *= dz_du
    return g


@triton.jit
def store_block(groups_ptr, g, block, groups, BLOCK_G: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr):
    group, number = numbers_of(0, BLOCK_G, VEC)
    g = g.to(groups_ptr.dtype.element_ty)
    groups_ptr += block * (BLOCK_G * VEC)
    if MASKED:
        mask = tl.broadcast_to(group < groups - block * BLOCK_G, (BLOCK_G, VEC))
        tl.store(groups_ptr + number, g, mask=mask, eviction_policy="evict_first")
    else:
        tl.store(groups_ptr + number, g, eviction_policy="evict_first")


@triton.jit
def store_gradient(
    out_groups_ptr,
    words,  # the block's
    block,
    head,
    groups,
    reference,
    factor,
    sum_factor,
    class_weight_ptr,
    logit_numbers,
    logit_scale,
    softcap,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    group, number = numbers_of(block, BLOCK_G, VEC)
    mask = tl.broadcast_to(group < groups, (BLOCK_G, VEC))
    u = numbers_in(words, out_groups_ptr.dtype.element_ty)
    g = gradient_numbers(
        u, head + number, mask, reference, factor, sum_factor, None, class_weight_ptr, logit_numbers, logit_scale,
        softcap,
    )  # fmt: skip
    store_block(out_groups_ptr, g, block, groups, BLOCK_G, VEC, MASKED)


@triton.jit
def finish_gradient(
    out_row,
    u_edges,  # (2 VEC,), read before anything was written, as u_target
    edge,
    there,
    u_target,
    column,
    V,
    reference,
    factor,
    sum_factor,
    at_target,
    class_weight_ptr,
    logit_numbers,
    logit_scale,
    softcap,
):
    """The edges and the target's entry."""
    g = gradient_numbers(
        u_edges, edge, there, reference, factor, sum_factor, None, class_weight_ptr, logit_numbers, logit_scale, softcap
    )
    tl.store(out_row + edge, g.to(out_row.dtype.element_ty), mask=there)
    g = gradient_numbers(
        u_target, column, column < V, reference, factor, sum_factor, at_target, class_weight_ptr, logit_numbers,
        logit_scale, softcap,
    )  # fmt: skip
    tl.debug_barrier()  # another thread wrote there with its block
    tl.store(out_row + column, g.to(out_row.dtype.element_ty))
