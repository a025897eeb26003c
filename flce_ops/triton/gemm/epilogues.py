"""Epilogues of the logits GEMM (logits_gemm.py): what happens to z, the logits of EPILOGUE_N columns of a tile, in
float32 and in base 2 (z log2 e). "Tile" means these columns here.

    exp_sum     E = exp(z - reference)      partial[tile, rows] = sum_cols E
                and where asked for         sum_cols w z;   sum_cols E (z - reference);   max_cols z and its column;
                                            sum_cols E^2;   sum_cols z
                or stored z in place of E                                                          (logits/stored.py)
    max_sum     u = z - row_max, row_max = max_cols z    partial[tile, rows] = sum_cols exp(u)
                and where z is stored, of z as it is rounded there
    gradient    G = (row_factor + shift_factor (z - reference)) exp(z - reference) + sum_factor w

An epilogue returns the tile that the GEMM rounds and stores. Each epilogue reads its operands from the named tuple
defined above it. If a field is None, its sum or its term is left out.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..logits.stored import StoredLogits, from_stored, max_places, to_stored
from ..rows.logit_numbers import capped
from ..rows.valid_tokens import row_distance

# n rows of a chunk, V vocabulary, T = ceil(V / EPILOGUE_N) tiles along the vocabulary

# A tile's sums of exponentials up to this limit leave float32 and bfloat16 room for the sums over V and the products
# that follow. A row's reference is at most log(2^60) = 41 nats below its largest logit then.
LARGEST_SUM = tl.constexpr(2.0**60)
LOWEST = tl.constexpr(-(2.0**127))


@triton.jit
def class_weights(pointer, cols, col_mask):
    if pointer is None:
        return 1.0
    else:
        return tl.load(pointer + cols, mask=col_mask, other=0.0)[None, :]


@triton.jit
def in_vocabulary(values, col_mask, other, EVEN_V: tl.constexpr):
    if EVEN_V:
        return values
    else:
        return tl.where(col_mask[None, :], values, other)


@triton.jit
def reference_logits(pointer, rows, row_mask):
    """Loads the reference logits. Rows without a token get inf: their logits are 0, so exp(0 - inf) = 0."""
    return tl.load(pointer + rows, mask=row_mask, other=float("inf"))


@triton.jit
def store_sum(out_ptr, values, offsets, row_mask):
    """Stores the sum of each row's values in a tile, unless `out_ptr` is None."""
    if out_ptr is not None:
        tl.store(out_ptr + offsets, tl.sum(values, 1), mask=row_mask)


class ReferenceClass(NamedTuple):
    """The class of each row whose logit is the reference, (n,) each.

    The reference is a dot product made elsewhere, in another order of summation than the GEMM's. If a row gives the
    class nearly all of its probability, its entropy is far smaller than the difference of the two results. So the
    epilogue replaces the GEMM's logit by the reference.
    """

    column: Tensor  # int64; -1 is read as class 0
    logit: Tensor  # a rescue (steps/forward.py) does not change this copy


class ExpSum(NamedTuple):
    reference_logit: Tensor  # (n,)
    class_weight: Tensor | None  # (V,) float32, for logit_sum
    partial: Tensor | None  # (T, n) out; None if the sums are not wanted
    logit_sum: Tensor | None = None  # (T, n) out, sum_cols w z
    expected: Tensor | None = None  # (T, n) out, sum_cols E (z - reference)
    row_max: Tensor | None = None  # (T, n) out
    argmax: Tensor | None = None  # (T, n) int32, out; with row_max
    squares: Tensor | None = None  # (T, n) out, sum_cols E^2
    total: Tensor | None = None  # (T, n) out, sum_cols z
    stored: StoredLogits | None = None  # the epilogue writes its maxima
    reference_class: ReferenceClass | None = None
    # () int32 of 0, out: 1 if the sum of any row over a tile is too large or nan
    guard: Tensor | None = None
    raised: Tensor | None = None  # (n,) with `guard`: raise_reference


@triton.jit
def is_too_large(sums):
    return (sums > LARGEST_SUM) | (sums != sums)


@triton.jit
def raise_reference(operands, z, rows, row_mask, col_mask, EVEN_V: tl.constexpr):
    """After exp_sum: raises the references of rows whose sum over the tile is too large to the tile's largest logit.
    Other rows keep theirs, and so their bits.

    A row's largest logit is in such a tile, or less than 1 + log2(EPILOGUE_N) above the largest of one.
    """
    reference_logit = reference_logits(operands.reference_logit, rows, row_mask)
    sums = tl.sum(in_vocabulary(tl.exp2(z - reference_logit[:, None]), col_mask, 0.0, EVEN_V), 1)
    largest = tl.max(in_vocabulary(z, col_mask, float("-inf"), EVEN_V), 1)
    # if all classes of a row are at -inf, any finite reference makes the exponentials 0
    largest = tl.where(largest == float("-inf"), LOWEST, largest)
    tl.atomic_max(operands.raised + rows, largest, mask=row_mask & is_too_large(sums), sem="relaxed")


@triton.jit
def exp_sum(operands, z, rows, cols, row_mask, col_mask, tile, n, V, EVEN_V: tl.constexpr):
    class_weight = class_weights(operands.class_weight, cols, col_mask)
    reference_logit = reference_logits(operands.reference_logit, rows, row_mask)
    partial_offset = tile.to(tl.int64) * row_distance(n) + rows
    if operands.reference_class is not None:
        own = tl.load(operands.reference_class.column + rows, mask=row_mask, other=0).to(tl.int32)
        own_logit = tl.load(operands.reference_class.logit + rows, mask=row_mask, other=0.0)
        is_own = cols[None, :] == tl.maximum(own, 0)[:, None]
        z = tl.where(is_own, own_logit[:, None], z)
    # fma(..., 0) rounds the products. Plain ones would be fused with the additions where no mask stands between, and
    # the sums of a shard with EVEN_V would have other bits than those of a vocabulary without.
    zero = tl.zeros_like(z)
    weighted = tl.fma(z, zero + class_weight, zero)
    store_sum(operands.logit_sum, in_vocabulary(weighted, col_mask, 0.0, EVEN_V), partial_offset, row_mask)
    rounded = tl.fma(z, zero + 1.0, zero)
    store_sum(operands.total, in_vocabulary(rounded, col_mask, 0.0, EVEN_V), partial_offset, row_mask)
    if operands.argmax is not None:
        candidates = in_vocabulary(z, col_mask, float("-inf"), EVEN_V)
        row_max = tl.max(candidates, 1)
        column = tl.min(tl.where(candidates == row_max[:, None], cols[None, :], V), 1)
        tl.store(operands.row_max + partial_offset, row_max, mask=row_mask)
        tl.store(operands.argmax + partial_offset, column, mask=row_mask)
    result = in_vocabulary(tl.exp2(z - reference_logit[:, None]), col_mask, 0.0, EVEN_V)
    sums = tl.sum(result, 1)
    if operands.partial is not None:
        tl.store(operands.partial + partial_offset, sums, mask=row_mask)
    if operands.guard is not None:
        # a masked store instead of a branch, which would keep the compiler from pipelining the loop over tiles
        too_large = row_mask & is_too_large(sums)
        tl.store(operands.guard + tl.zeros_like(rows), tl.full(rows.shape, 1, tl.int32), mask=too_large)
    # a bias of -inf gives an exponential of 0, and 0 * -inf would be nan
    shifted = tl.where(result > 0.0, result * (z - reference_logit[:, None]), 0.0)
    store_sum(operands.expected, shifted, partial_offset, row_mask)
    store_sum(operands.squares, result * result, partial_offset, row_mask)
    if operands.stored is not None:
        tile_max = tl.max(in_vocabulary(z, col_mask, float("-inf"), EVEN_V), 1)
        tile_max = tl.where(tile_max == float("-inf"), 0.0, tile_max)
        tl.store(max_places(operands.stored, rows, tile), tile_max, mask=row_mask)
        result = to_stored(z - tile_max[:, None], operands.stored.numbers.dtype.element_ty)
    return result


class MaxSum(NamedTuple):
    partial: Tensor  # (T, n) out
    row_max: Tensor  # (T, n) out
    # What the GEMM stores. Its maxima are row_max, except under a softcap. The sums are those of the rounded logits:
    # logits/divergence_rows.py says why.
    stored: StoredLogits | None = None
    softcap: Tensor | None = None  # (), if z are logits before a softcap, which are stored


@triton.jit
def max_sum(operands, z, rows, cols, row_mask, col_mask, tile, n, V, EVEN_V: tl.constexpr):
    partial_offset = tile.to(tl.int64) * row_distance(n) + rows
    row_max = tl.max(in_vocabulary(z, col_mask, float("-inf"), EVEN_V), 1)
    finite = tl.where(row_max == float("-inf"), 0.0, row_max)  # if a tile has only -inf, its sum is 0, not nan
    # Masked after the subtraction, which is fused with z's product: so it is in a shard with EVEN_V, without a mask.
    u = in_vocabulary(z - finite[:, None], col_mask, float("-inf"), EVEN_V)
    result = u
    if operands.stored is not None:
        result = to_stored(u, operands.stored.numbers.dtype.element_ty)
        u = from_stored(result)
        if operands.softcap is not None:
            tl.store(max_places(operands.stored, rows, tile), finite, mask=row_mask)
            z, _ = capped(u + finite[:, None], operands.softcap)
            row_max, _ = capped(row_max, operands.softcap)
            u = in_vocabulary(z - row_max[:, None], col_mask, float("-inf"), EVEN_V)
    store_sum(operands.partial, tl.exp2(u), partial_offset, row_mask)
    tl.store(operands.row_max + partial_offset, row_max, mask=row_mask)
    return result


class Gradient(NamedTuple):
    reference_logit: Tensor  # (n,)
    row_factor: Tensor  # (n,)
    class_weight: Tensor | None = None  # (V,) float32
    sum_factor: Tensor | None = None  # (n,)
    shift_factor: Tensor | None = None  # (n,), multiplies z - reference in base 2

    def of(self, rows: slice) -> "Gradient":
        reference, row_factor, class_weight, *others = self
        others = [None if factor is None else factor[rows] for factor in others]
        return Gradient(reference[rows], row_factor[rows], class_weight, *others)


@triton.jit
def gradient(operands, z, rows, cols, row_mask, col_mask, tile, n, V, EVEN_V: tl.constexpr):
    reference_logit = reference_logits(operands.reference_logit, rows, row_mask)
    return gradient_of_rows(operands, z - reference_logit[:, None], rows, cols, row_mask, col_mask)


@triton.jit
def gradient_of_rows(operands, log2_p, rows, cols, row_mask, col_mask):
    """G from z - reference. Stored logits take this function, too (logits/stored_tiles.py)."""
    row_factor = tl.load(operands.row_factor + rows, mask=row_mask, other=0.0)[:, None]
    shift_factor, sum_factor, weight = None, None, 1.0
    if operands.shift_factor is not None:
        shift_factor = tl.load(operands.shift_factor + rows, mask=row_mask, other=0.0)[:, None]
    if operands.sum_factor is not None:
        sum_factor = tl.load(operands.sum_factor + rows, mask=row_mask, other=0.0)[:, None]
        weight = class_weights(operands.class_weight, cols, col_mask)
    return logit_gradient(log2_p, row_factor, shift_factor, sum_factor, weight)


@triton.jit
def logit_gradient(log2_p, row_factor, shift_factor, sum_factor, weight):
    """G of a row objective, but for the target's entry; given logits take this function, too (logits/row_blocks.py)."""
    result = tl.exp2(log2_p)
    if shift_factor is not None:
        row_factor += tl.where(result > 0.0, shift_factor * log2_p, 0.0)
    result = result * row_factor
    if sum_factor is not None:
        result += sum_factor * weight
    return result


Epilogue = ExpSum | MaxSum | Gradient
EPILOGUES = {ExpSum: exp_sum, MaxSum: max_sum, Gradient: gradient}
