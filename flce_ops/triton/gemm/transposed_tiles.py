"""The weight gradient's GEMM for a later chunk, if the last block of features is at most half full.

            D = 896                         Whole blocks of features: tiles of 128 x 256, classes x features.
           ┌───────┬───────┬───────┬───┐    The remaining features: tiles of 256 x 128, two blocks of classes at once.
         V │  1  3 │  5  7 │  9 11 │13 │    They are computed transposed, as 128 x 256 tiles of (c input).T @ E,
           │  2  4 │  6  8 │ 10 12 │14 │    so both kinds share one loop, with the operands swapped.
           └───────┴───────┴───────┴───┘

    for each tile:  left, right = E, c input        or, transposed, c input, E
                    acc = sum_k left[k, cols].T @ right[k, cols]
                    out += acc / scale              or acc.T

All tiles take equal time. Tiles of one block of classes run at the same time, so each column of E is read from HBM
once. H200, microseconds at 1536x896x151936 and 1664x640x128256: 713 and 485. With full tiles for the last features,
which multiply padding: 773 and 520. With a second launch for the last features, in narrow tiles: 758 and 545, because
each launch reads E. cuBLAS: 707 and 444.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows
from .device import capability_of, interpreted, multiprocessors
from .sum_scales import Sum, scaled_products
from .tiles import Tiles
from .tma import kernel_matrices

# n tokens of a chunk, D hidden, V vocabulary

# Transposed tiles are used up to this many whole blocks of features beside the last, partial one. Time of a step
# relative to one that multiplies the padding, H200: 0.989 at D = 640 (2 whole blocks), 0.982 at 896 (3), 1.005 at 1152.
BLOCKS_AT_MOST = 3


@Kernel
def transposed_tiles_kernel(
    exponentials_map,  # (n, V), in tiles of BLOCK_M columns
    rows_map,  # (n, D) c input, in tiles of BLOCK_N columns
    rows_transposed_map,  # (n, D) c input, in tiles of BLOCK_M columns
    exponentials_transposed_map,  # (n, V), in tiles of BLOCK_N columns
    sum_map,  # (V, D) float16 in tiles of BLOCK_M x BLOCK_M, added to
    exponent_ptr,  # (blocks of features, V) uint8 exponents of the scales
    guard_ptr,  # () int32
    valid_tokens,  # ValidTokens
    n,
    V,
    room,  # the largest product of one chunk, in units of the scale
    first_rows,  # rows of the first chunk; if all valid tokens are in it, it has written the result
    stride_exponent,
    WHOLE: tl.constexpr,  # the number of whole blocks of features
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 2 BLOCK_M
    BLOCK_K: tl.constexpr,  # tokens
    GROUP: tl.constexpr,  # even
    PROGRAMS: tl.constexpr,
):
    count = valid_rows(valid_tokens, n)
    depth = tl.cdiv(count, BLOCK_K)
    class_blocks = tl.cdiv(V, BLOCK_M)
    tiles = class_blocks * WHOLE + tl.cdiv(class_blocks, 2)
    tiles = tl.where((count > 0) & (tl.load(valid_tokens.taken) > first_rows), tiles, 0)
    group_tiles: tl.constexpr = GROUP * WHOLE + GROUP // 2
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        first = (tile // group_tiles) * GROUP
        height = min(class_blocks - first, GROUP)
        place = tile % group_tiles
        upright = height * WHOLE  # tiles of the group that are not transposed
        behind = place - upright
        class_start = (first + tl.where(behind >= 0, 2 * behind, place % height)) * BLOCK_M
        feature_block = place // height
        feature_start = feature_block * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(depth):
            lefts, rights, left_start, right_start = exponentials_map, rows_map, class_start, feature_start
            # The condition uses k only so that the compiler keeps the branch inside the loop. If the compiler moves the
            # branch out, it no longer flattens the loop over tiles and k (Triton 3.6).
            if behind + tl.minimum(k, 0) >= 0:
                lefts, rights, left_start, right_start = (
                    rows_transposed_map,
                    exponentials_transposed_map,
                    feature_start,
                    class_start,
                )
            left = lefts.load([k * BLOCK_K, left_start])
            right = rights.load([k * BLOCK_K, right_start])
            acc = tl.dot(left.T, right, acc)
        # The tile is stored in halves, because shared memory has room for half a tile only. Each branch computes the
        # scale's address itself: if the address is computed before the branches, the compiler does not flatten the loop
        # either.
        if behind >= 0:
            exponents = exponent_ptr + (feature_start // BLOCK_N).to(tl.int64) * stride_exponent
            columns = class_start + tl.arange(0, BLOCK_N)[None, :]
            of_columns = scaled_products(acc, exponents + columns, columns < V, guard_ptr, room, 0)
            upper, lower = column_halves(of_columns.to(tl.float16), BLOCK_M)
            sum_map.atomic_add([class_start, feature_start], tl.trans(upper))
            sum_map.atomic_add([class_start + BLOCK_M, feature_start], tl.trans(lower))
        else:
            exponents = exponent_ptr + (feature_start // BLOCK_N).to(tl.int64) * stride_exponent
            rows = class_start + tl.arange(0, BLOCK_M)[:, None]
            of_rows = scaled_products(acc, exponents + rows, rows < V, guard_ptr, room, 1)
            left_half, right_half = column_halves(of_rows.to(tl.float16), BLOCK_M)
            sum_map.atomic_add([class_start, feature_start], left_half)
            sum_map.atomic_add([class_start, feature_start + BLOCK_M], right_half)


@triton.jit
def column_halves(tile, BLOCK: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK, 2, BLOCK)), (0, 2, 1)))


def fits_transposed_tiles(rows: Tensor, tiles: Tiles) -> bool:
    """Hopper only: Triton 3.6 cannot flatten this loop for Blackwell."""
    blocks, behind = divmod(rows.shape[1], tiles.block_n)
    hopper = interpreted(rows) or capability_of(rows.device) // 10 == 9
    half_full = tiles.block_n == 2 * tiles.block_m and 0 < behind <= tiles.block_m
    return hopper and tiles.tma and half_full and 1 <= blocks <= BLOCKS_AT_MOST


def launch_transposed_tiles(
    total: Sum,  # the sum to which the products are added
    exponentials: Tensor,  # (n, V)
    rows: Tensor,  # (n, D)
    valid_tokens: ValidTokens,
    *,
    room: float,
    first_rows: int,
    tiles: Tiles,
) -> None:
    (n, num_classes), hidden = exponentials.shape, rows.shape[1]
    narrow, wide, programs = tiles.block_m, tiles.block_n, multiprocessors(rows)
    matrices = [exponentials, rows, rows, exponentials, total.numbers]
    columns = [[tiles.block_k, width] for width in (narrow, wide, narrow, wide)]
    transposed_tiles_kernel[(programs,)](
        *kernel_matrices(matrices, [*columns, [narrow, narrow]]),
        total.exponents,
        total.guard,
        valid_tokens,
        n,
        num_classes,
        room,
        first_rows,
        total.exponents.stride(0),
        WHOLE=hidden // wide,
        GROUP=tiles.group,
        PROGRAMS=programs,
        **tiles.options,
    )
