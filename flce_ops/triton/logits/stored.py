"""Logits that are stored in 16 bits between the GEMM that makes them and the kernels that read them.

    m_it = max_j z_ij of the classes j of tile t             float32
    u_ij = z_ij - m_it                                       16 bits, at most 0

        -17 < u <= -1      -2048 (u + 1), rounded, not negative        within 2^-12: a probability within 1.7e-4
        others             the bits of u in float16, negative          within 2^-12 above -1; down to -65504 and -inf

Logits, here and in all kernels, are in base 2: z log2 e. float16 alone holds u within 2^-11 |u|, and bfloat16 would
lose eight times as much. Fixed steps alone would need a least u. Exponentials cannot be stored instead: relative to
their reference, the target's logit, they may be as large as 2^60, beyond float16's range. docs/numerics.md has the
errors that each format would add.

Backward reads the logits that forward saved. Both models' logits of a divergence are stored for a chunk. If G needs
dz/du of a softcap, the logits before the softcap are stored, because computing dz/du from z would cancel.

float32 operands, which only tests give to a divergence, store u itself.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import CLASSES_PER_MAXIMUM
from ...support.sizes import cdiv
from ..kernel import Kernel
from ..rows.logit_numbers import capped
from ..rows.valid_tokens import ValidTokens, valid_rows

# n rows, R of them with saved logits, V vocabulary, T tiles along it

STEPS = tl.constexpr(2048.0)
# The last bit of a float32 number from here to 2^24 counts ones: the low bits of ONES + k are the integer k. An H100
# converts floats to integers at an eighth of the rate at which it adds, and stored logits need a conversion each way.
ONES = tl.constexpr(2.0**23)


class StoredLogits(NamedTuple):
    """Passed to kernels as one argument. Triton 3.6 compiles no tuple within a tuple that holds None or 1. So no field
    is None, and the strides of tile_max, of which one is 1, are in bytes.
    """

    numbers: Tensor  # (n, V) int16
    stride: int  # between rows
    tile_max: Tensor  # (n, T) float32
    row_bytes: int  # of tile_max, as is the next
    tile_bytes: int

    def of(self, rows: slice) -> "StoredLogits":
        return self._replace(numbers=self.numbers[rows], tile_max=self.tile_max[rows])


def stored_logits(numbers: Tensor, tile_max: Tensor) -> StoredLogits:  # (n, V) and (n, T)
    return StoredLogits(numbers, numbers.stride(0), tile_max, *(4 * stride for stride in tile_max.stride()))


def saved_logits(retained: Tensor, num_classes: int) -> StoredLogits:
    """A view of memory that flce_ops/meta allocates: (R, columns) int16. A row has V numbers, and from a multiple of
    16 bytes on T maxima.
    """
    maxima = retained.view(torch.float32)[:, cdiv(num_classes, 8) * 4 :]
    return stored_logits(retained[:, :num_classes], maxima)


@triton.jit
def to_stored(u, DTYPE: tl.constexpr):
    """`u` in the format of the stored numbers."""
    if DTYPE == tl.int16:
        # z - max is rounded once on a GPU, in one operation with the product that z is, so it may be a little above 0
        u = tl.minimum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
        code = u * -STEPS + (ONES - STEPS)
        fixed = (code >= ONES) & (code < ONES + 32768.0)
        half = u.to(tl.float16).to(tl.int16, bitcast=True) | -32768  # the sign bit marks float16, for u = 0 too
        return tl.where(fixed, code.to(tl.int32, bitcast=True).to(tl.int16), half)
    else:
        return u


@triton.jit
def from_stored(numbers):
    if numbers.dtype == tl.int16:
        code = (numbers.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)  # ONES + numbers
        fixed = code * (-1.0 / STEPS) + (ONES / STEPS - 1.0)
        return tl.where(numbers >= 0, fixed, numbers.to(tl.float16, bitcast=True).to(tl.float32))
    else:
        return numbers


@triton.jit
def max_places(stored, rows, tile):
    return stored.tile_max + rows.to(tl.int64) * (stored.row_bytes // 4) + tile.to(tl.int64) * (stored.tile_bytes // 4)


@triton.jit
def log_probabilities(stored, softcap, pair, rows, cols, row_mask, tile, V):
    """(log2 of the probabilities; dz/du / logit_scale, meaningful only with a softcap).

    `pair` is the lse_pair of each row. The log-probabilities are -inf after column V, and in rows after the valid ones.
    Loads still run to the next multiple of 8 columns: rows are a multiple of 16 numbers apart, so loads of 16 bytes
    work for any V.
    """
    places = stored.numbers + rows.to(tl.int64)[:, None] * stored.stride + cols[None, :]
    mask = row_mask[:, None] & (cols < tl.cdiv(V, 8) * 8)[None, :]
    # A negative number for `other` would be wrong on a GPU: Triton 3.6 packs two 16-bit numbers with their signs.
    u = from_stored(tl.load(places, mask=mask, other=0))
    tile_max = tl.load(max_places(stored, rows, tile), mask=row_mask, other=0.0)
    reference, log_sum = pair
    dz_du = u
    if softcap is None:
        log2_q = (u + (tile_max - reference)[:, None]) - log_sum[:, None]
    else:
        z, dz_du = capped(u + tile_max[:, None], softcap)
        log2_q = (z - reference[:, None]) - log_sum[:, None]
    return tl.where(row_mask[:, None] & (cols < V)[None, :], log2_q, float("-inf")), dz_du


CLEARED = tl.constexpr(1024)  # columns that a program clears at a time


@Kernel
def clear_unused_kernel(
    saved_ptr,  # (R, columns) int16
    valid_tokens,  # ValidTokens
    rows,
    V,
    first_maximum,  # first column of the maxima
    behind_maxima,  # the column after the maxima
    columns,
):
    row = tl.program_id(0)
    whole = row >= valid_rows(valid_tokens, rows)
    for start in range(tl.where(whole, 0, V), columns, CLEARED):
        cols = start + tl.arange(0, CLEARED)
        unused = (cols < tl.where(whole, columns, first_maximum)) | (cols >= behind_maxima)
        tl.store(saved_ptr + row.to(tl.int64) * columns + cols, 0, mask=unused & (cols < columns))


def clear_unused(retained: Tensor, num_classes: int, valid_tokens: ValidTokens) -> None:
    """Writes zeros wherever nothing else is written, so that an operator's result does not depend on uninitialised
    memory.
    """
    if not retained.shape[0]:
        return
    first_maximum = 8 * cdiv(num_classes, 8)
    behind_maxima = first_maximum + 2 * cdiv(num_classes, CLASSES_PER_MAXIMUM)
    rows, columns = retained.shape
    of_rows = retained, valid_tokens, rows, num_classes, first_maximum, behind_maxima, columns
    clear_unused_kernel[(rows,)](*of_rows, num_warps=4)
