"""The GEMM that makes a chunk of logits and consumes each tile in its epilogue, in float32, before anything is rounded.

                     D               V
               ┌───────────┐    ┌──┬──┬──┬──┐    persistent programs walk the tiles of (n, V);
    n  BLOCK_M │   input   │  @ │  │▓▓│  │  │    GROUP row blocks sweep V together, so that a tile
               └───────────┘    └──┴──┴──┴──┘    of linear_weight is read from HBM once a group
                                 BLOCK_N

    for each tile:  acc = sum_k input[rows, k] @ linear_weight[cols, k].T              (tensor cores, float32)
                        + the product of a low-rank pair, if there is one              (low_rank_pair.py)
                    z   = softcap * tanh(logit_scale * (acc + bias) / softcap)          (or logit_scale * (acc + bias))
    result = epilogue(z)  and what it sums by rows, a number a row and tile                          (epilogues.py)
             0 behind the valid tokens' rows up to the end of their tile                           (valid_tokens.py)
    out = result dz/du / logit_scale, rounded once; optional            (max_sum's: without dz/du, or instead of it the
                                                                         logits before the softcap)

"exp_sum" takes any reference within 40 nats under the row's largest logit: what is rounded to bfloat16 is the
exponential, whose relative error does not depend on the reference. The target's own logit is such a number for every
token whose loss is under 40 nats, it costs N dot products, and it saves the epilogue its max reduction.
`flce_ops/triton/steps/exponentials.py` says what happens to the other tokens.

All logits, references and logarithms here are in base 2 (z * log2 e): exp2 is the hardware's instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...objectives.in_triton import number
from ..divergence.fixed_point import to_fixed_point
from ..launch.replay import Kernel
from ..rows.logit_numbers import numbers_in_kernel, numbers_of
from ..rows.valid_tokens import ValidTokens, valid_rows
from ..steps.low_rank_pair import NO_PAIR, Pair, add_pair_product
from .device import multiprocessors, tiles_for
from .epilogues import EPILOGUES, ExpSum, Gradient, MaxSum
from .tiles import LogitsTiles
from .tma import block_of_tile, descriptors, fits_tma, load_tile, store_tile

# n rows of a chunk, D hidden, V vocabulary, T = ceil(V / BLOCK_N) tiles along the vocabulary

LOG2E = tl.constexpr(1.4426950408889634)
# (tanh(y) / y - 1) / w in powers of w = (2 y log2 e)^2, where w < 2.5: minimax, relative to tanh(y)
TANH = tl.constexpr((-4.0037299e-2, 1.9218430e-3, -9.1303815e-5, 3.4282380e-6))
# exp2 sums up to here leave float32 and bfloat16 room for the products and the sums over V that follow.
LARGEST_SUM = tl.constexpr(2.0**60)


@triton.jit
def base2_logits(acc, bias, logit_numbers, logit_scale, softcap):
    """(z log2 e, dz/du / logit_scale) of the raw products; the second is meaningful only with a softcap.

    `logit_numbers` says which options there are, the two after it were loaded from its pointers: scalars, or numbers of
    rows that broadcast.
    """
    if bias is not None:
        acc = acc + bias
    if logit_numbers.softcap is not None:
        # With e = exp(2 y): tanh y = 1 - 2 / (1 + e) and 1 - tanh^2 = 4 e / (1 + e)^2, which does not cancel where tanh
        # is near 1. e stays finite; from 2^126 on the slope is 0 to any digit.
        y2 = acc * (2.0 * LOG2E * logit_scale / softcap)
        e = tl.exp2(tl.where(y2 > 126.0, 126.0, y2))
        inverse = 1.0 / (1.0 + e)
        # Below |y| = 0.55 that tanh cancels: off by 6e-8 whatever y is. There z is u times tanh(y) / y, a polynomial in
        # y2^2 with a relative error of 3e-8, so that a large cap leaves the digits of u. 8 instructions on 11 to 15.
        square = y2 * y2
        tanh_by_y = 1.0 + square * (TANH[0] + square * (TANH[1] + square * (TANH[2] + square * TANH[3])))
        small = acc * (logit_scale * LOG2E) * tanh_by_y
        z = tl.where(square < 2.5, small, (1.0 - 2.0 * inverse) * (softcap * LOG2E))
        dz_du = 4.0 * inverse * (e * inverse)
    else:
        z = acc * (logit_scale * LOG2E)
        dz_du = acc
    return z, dz_du


@triton.jit
def exceeds(guard_ptr):
    """True for sums above LARGEST_SUM and for nan. The guard holds a non-negative float: its bits order alike."""
    largest_sum = tl.load(guard_ptr).to(tl.float32, bitcast=True)
    return (largest_sum > LARGEST_SUM) | (largest_sum != largest_sum)


@Kernel
def logits_gemm_kernel(
    input_ptr,  # (n, D): tensor descriptor with USE_TMA, else a pointer
    weight_ptr,  # (V, D): likewise
    out_ptr,  # (n, V): likewise, out; None where nothing is stored
    bias_ptr,  # (V,) or None
    logit_numbers,  # LogitNumbers
    operands,  # of the epilogue: ExpSum, MaxSum, Gradient
    pair_input_ptr,  # (n, r): as input_ptr; None where there is no pair
    pair_weight_ptr,  # (V, r)
    class_scale_ptr,  # (V,) float32; None for 1: multiplies the products, and what is stored
    guard_ptr,  # () int32, bits of the largest row sum of an earlier pass, without which this one runs; or None
    valid_tokens,  # ValidTokens, the tokens of the rows
    n,
    D,
    V,
    stride_input_n,
    stride_input_d,
    stride_weight_v,
    stride_weight_d,
    stride_out_n,
    EPILOGUE: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # classes
    BLOCK_K: tl.constexpr,  # features
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    STORE_HALVES: tl.constexpr,
    SLOPED: tl.constexpr,
    BEFORE_SOFTCAP: tl.constexpr,
    FIXED_POINT: tl.constexpr,
    RANK: tl.constexpr,  # of the pair, contiguous
):
    if logit_numbers.by_token is None:
        logit_scale = number(logit_numbers.logit_scale)
        softcap = number(logit_numbers.softcap)
    count = valid_rows(valid_tokens, n)
    row_blocks = tl.cdiv(count, BLOCK_M)
    vocab_blocks = tl.cdiv(V, BLOCK_N)
    depth = tl.cdiv(D, BLOCK_K)
    pair_depth: tl.constexpr = tl.cdiv(RANK, BLOCK_K) if USE_TMA else 0
    tiles = row_blocks * vocab_blocks
    if guard_ptr is not None:
        tiles = tl.where(exceeds(guard_ptr), tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE):
        row_block, vocab_block = block_of_tile(tile, row_blocks, vocab_blocks, GROUP)
        row_start = row_block * BLOCK_M
        col_start = vocab_block * BLOCK_N

        rows = row_start + tl.arange(0, BLOCK_M)
        cols = col_start + tl.arange(0, BLOCK_N)
        row_mask = rows < count
        col_mask = cols < V
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(depth + pair_depth):
            if USE_TMA:
                inputs, weights, step = input_ptr, weight_ptr, k
                if RANK > 0:
                    if k >= depth:  # one address or the other of a tensor map: the loop stays one
                        inputs, weights, step = pair_input_ptr, pair_weight_ptr, k - depth
                a = inputs.load([row_start, step * BLOCK_K])
                b = weights.load([col_start, step * BLOCK_K])
            else:
                ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_tile(input_ptr, rows, ks, row_mask, ks < D, stride_input_n, stride_input_d)
                b = load_tile(weight_ptr, cols, ks, col_mask, ks < D, stride_weight_v, stride_weight_d)
            acc = tl.dot(a, b.T, acc)
        if RANK > 0 and not USE_TMA:
            acc = add_pair_product(acc, pair_input_ptr, pair_weight_ptr, rows, cols, row_mask, col_mask, RANK, BLOCK_K)
        if class_scale_ptr is not None:
            class_scale = tl.load(class_scale_ptr + cols, mask=col_mask, other=0.0)[None, :]
            acc = acc * class_scale
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        if logit_numbers.by_token is not None:
            token = tl.load(valid_tokens.order + rows, mask=row_mask, other=0)
            scale_of_rows, softcap_of_rows = numbers_of(logit_numbers, token[:, None], row_mask[:, None])
        else:
            scale_of_rows, softcap_of_rows = logit_scale, softcap
        z, dz_du = base2_logits(acc, bias, logit_numbers, scale_of_rows, softcap_of_rows)
        result = EPILOGUE(operands, z, rows, cols, row_mask, col_mask, vocab_block, n, V, EVEN_V)
        if out_ptr is not None:
            if BEFORE_SOFTCAP:
                result = (acc if bias is None else acc + bias) * scale_of_rows
            elif FIXED_POINT:
                result = to_fixed_point(result)
            elif SLOPED:
                result = result * dz_du
            if class_scale_ptr is not None:
                result = result * class_scale
            if USE_TMA:
                rounded = result.to(out_ptr.dtype)
                if STORE_HALVES:
                    # half the staging buffer in shared memory: room for one more stage of the main loop
                    halves = tl.permute(tl.reshape(rounded, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
                    left, right = tl.split(halves)
                    out_ptr.store([row_start, col_start], left)
                    out_ptr.store([row_start, col_start + BLOCK_N // 2], right)
                else:
                    out_ptr.store([row_start, col_start], rounded)
            else:
                # zeros behind the valid rows, as TMA stores them
                store_tile(out_ptr, result, rows, cols, rows < n, col_mask, stride_out_n)


def launch_logits_gemm(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    epilogue: ExpSum | MaxSum | Gradient,
    logit_options: LogitOptions,
    valid_tokens: ValidTokens,
    *,
    out: Tensor | None = None,  # (n, V)
    guard: Tensor | None = None,  # ()
    before_softcap: bool = False,  # what is stored, in nats, in place of the result
    pair: Pair = NO_PAIR,  # whose product is added
    tiles: LogitsTiles | None = None,
) -> None:
    assert out is None or out.stride(1) == 1
    n, hidden = input.shape
    num_classes = linear_weight.shape[0]
    tiles = tiles or tiles_for(input)
    matrices = [input, linear_weight, out, pair.input, pair.weight]
    use_tma = tiles.tma and all(map(fits_tma, matrices))
    if use_tma:
        of_rows, of_classes = [tiles.block_m, tiles.block_k], [tiles.block_n, tiles.block_k]
        of_out = [tiles.block_m, tiles.block_n // 2 if tiles.store_halves else tiles.block_n]
        matrices = descriptors(matrices, (of_rows, of_classes, of_out, of_rows, of_classes))
    grid_tiles = triton.cdiv(n, tiles.block_m) * triton.cdiv(num_classes, tiles.block_n)
    programs = tiles.programs_per_sm * multiprocessors(input)
    logits_gemm_kernel[(min(grid_tiles, programs),)](
        *matrices[:3],
        linear_bias,
        numbers_in_kernel(logit_options),
        epilogue,
        *matrices[3:],
        pair.class_scale,
        guard,
        valid_tokens,
        n,
        hidden,
        num_classes,
        *input.stride(),
        *linear_weight.stride(),
        0 if out is None else out.stride(0),
        EPILOGUE=EPILOGUES[type(epilogue)],
        USE_TMA=use_tma,
        EVEN_V=num_classes % tiles.block_n == 0,
        GROUP=tiles.group,
        PROGRAMS=programs,
        FLATTEN=tiles.flatten,
        WARP_SPECIALIZE=tiles.warp_specialize,
        STORE_HALVES=tiles.store_halves,
        SLOPED=logit_options.softcap is not None and not isinstance(epilogue, MaxSum),  # whose result are logits
        BEFORE_SOFTCAP=before_softcap,
        FIXED_POINT=isinstance(epilogue, MaxSum) and out is not None and out.dtype == torch.int16,
        RANK=pair.rank,
        **tiles.options,
    )
