"""Writes the gradient of a row of given logits: its blocks, its edges, then the target's entry.

    G_ij = (factor_i e^(z_ij - reference_i) + sum_factor_i w_j + [j = y_i] at_target_i) dz/du

The gradient may overwrite the logits: everything that the target and the edges need is read before anything is written.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .logit_rows import class_weights, exp_below, logits_of, numbers_in, numbers_of

# V vocabulary


class Slopes(NamedTuple):
    """The numbers of a row's gradient, computed in a kernel. The factors include logit_scale."""

    reference: float
    factor: float
    sum_factor: float | None
    at_target: float


@triton.jit
def out_of(grad_logits, i, row, ALIKE: tl.constexpr):
    """Pointers to the gradient's row and to its first group."""
    out_row = grad_logits.pointer + i.to(tl.int64) * grad_logits.stride
    groups = out_row + row.head
    if ALIKE:
        groups = tl.multiple_of(groups, 16)
    return out_row, groups


@triton.jit
def gradient_numbers(u, col, mask, slopes, scores, AT_TARGET: tl.constexpr):
    """(factor e^(z - reference) + sum_factor w + at_target) dz/du of numbers u of a row."""
    z, dz_du = logits_of(u, scores)
    g = exp_below(z - slopes.reference) * slopes.factor
    if slopes.sum_factor is not None:
        if scores.class_weight is None:
            g += slopes.sum_factor
        else:
            g += slopes.sum_factor * class_weights(scores, col, mask)
    if AT_TARGET:
        g += slopes.at_target
    if scores.options.softcap is not None:
        g *= dz_du
    return g


@triton.jit
def store_gradient(
    out_groups_ptr,
    words,  # the block's words (logit_rows.py)
    block,
    row,  # Row
    slopes,  # Slopes
    scores,  # Scores
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    dtype: tl.constexpr = out_groups_ptr.dtype.element_ty
    group, number = numbers_of(block, BLOCK_G, VEC)
    inside = tl.broadcast_to(group < row.groups, (BLOCK_G, VEC))
    g = gradient_numbers(numbers_in(words, dtype), row.head + number, inside, slopes, scores, False)
    _, place = numbers_of(0, BLOCK_G, VEC)
    mask = None
    if MASKED:
        mask = inside
    tl.store(out_groups_ptr + block * (BLOCK_G * VEC) + place, g.to(dtype), mask=mask, eviction_policy="evict_first")


@triton.jit
def finish_gradient(
    out_row,
    u_edges,  # (2 VEC,), read before anything was written; so was u_target
    edge,
    there,
    u_target,
    column,
    V,
    slopes,  # Slopes
    scores,  # Scores
):
    """Writes the gradient's edges and the target's entry."""
    g = gradient_numbers(u_edges, edge, there, slopes, scores, False)
    tl.store(out_row + edge, g.to(out_row.dtype.element_ty), mask=there)
    g = gradient_numbers(u_target, column, column < V, slopes, scores, True)
    tl.debug_barrier()  # waits: another thread has written this place with its block
    tl.store(out_row + column, g.to(out_row.dtype.element_ty))
