"""The GEMM that makes a chunk of logits and consumes each tile in its epilogue, in float32, before anything is rounded.

                     D               V
               ┌───────────┐    ┌──┬──┬──┬──┐    persistent programs walk the tiles of (n, V);
    n  BLOCK_N │   input   │  @ │  │▓▓│  │  │    GROUP row blocks sweep V together, so that a tile
               └───────────┘    └──┴──┴──┴──┘    of linear_weight is read from HBM once a group
                                 BLOCK_V

    for each tile:  acc = sum_k input[rows, k] @ linear_weight[cols, k].T              (tensor cores, float32)
                    z   = softcap * tanh(logit_scale * (acc + bias) / softcap)          (or logit_scale * (acc + bias))
    epilogue
      "exp_sum"    E = exp(z - reference)      partial[tile, rows] = sum_cols E;   E f -> out (optional)
                   and where asked for         sum_cols w z;   sum_cols E (z - reference);   max_cols z and its column
      "max_sum"    m = max_cols z              partial[tile, rows] = sum_cols exp(z - m);   m -> partial_max
      "gradient"   G = ((row_factor + shift_factor (z - reference)) exp(z - reference) + sum_factor w) f -> out
                                                                                      f = dz/du / logit_scale

"exp_sum" takes any reference within 40 nats under the row's largest logit: what is rounded to bfloat16 is the
exponential, whose relative error does not depend on the reference. The target's own logit is such a number for every
token whose loss is under 40 nats, it costs N dot products, and it saves the epilogue its max reduction.
`flce_ops/triton/exponentials.py` says what happens to the other tokens.

All logits, references and logarithms here are in base 2 (z * log2 e): exp2 is the hardware's instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.tiles import Tiles, tiles_for

# n rows of a chunk, D hidden, V vocabulary, T = ceil(V / BLOCK_V) tiles along the vocabulary

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def number_at(pointer, default: tl.constexpr):
    """The number of an option at `pointer`, or `default` where there is None."""
    if pointer is None:
        return default
    else:
        return tl.load(pointer).to(tl.float32)


@triton.jit
def base2_logits(acc, bias, logit_scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """(z log2 e, dz/du / logit_scale) of the raw products; the slope is meaningful only with a softcap."""
    if HAS_BIAS:
        acc = acc + bias
    if HAS_SOFTCAP:
        # With e = exp(2 y): tanh y = 1 - 2 / (1 + e) and 1 - tanh^2 = 4 e / (1 + e)^2, which does not cancel where tanh
        # is near 1. e stays finite; from 2^126 on the slope is 0 to any digit.
        y2 = acc * (2.0 * LOG2E * logit_scale / softcap)
        e = tl.exp2(tl.where(y2 > 126.0, 126.0, y2))
        inverse = 1.0 / (1.0 + e)
        z = (1.0 - 2.0 * inverse) * (softcap * LOG2E)
        slope = 4.0 * inverse * (e * inverse)
    else:
        z = acc * (logit_scale * LOG2E)
        slope = acc
    return z, slope


@triton.jit
def exceeds(guard_ptr, LIMIT: tl.constexpr):
    """True for sums above LIMIT and for nan. The guard holds the bits of a non-negative float: integers order alike."""
    largest = tl.load(guard_ptr).to(tl.float32, bitcast=True)
    return (largest > LIMIT) | (largest != largest)


@triton.jit
def logits_gemm_kernel(
    input_ptr,  # (n, D): tensor descriptor with USE_TMA, else a pointer
    weight_ptr,  # (V, D): likewise
    out_ptr,  # (n, V): likewise; E or G
    bias_ptr,  # (V,)
    class_weight_ptr,  # (V,) float32
    reference_ptr,  # (n,) base 2
    row_factor_ptr,  # (n,)
    sum_factor_ptr,  # (n,)
    shift_factor_ptr,  # (n,) of z - reference in base 2
    partial_ptr,  # (T, n)
    partial_max_ptr,  # (T, n)
    partial_argmax_ptr,  # (T, n) int32
    logit_sum_ptr,  # (T, n) sum_cols w z, base 2
    expected_ptr,  # (T, n) sum_cols E (z - reference), base 2
    guard_ptr,  # () int32, bits of the largest row sum of an earlier pass
    n,
    D,
    V,
    stride_input_n,
    stride_input_d,
    stride_weight_v,
    stride_weight_d,
    stride_out_n,
    logit_scale_ptr,  # ()
    softcap_ptr,  # ()
    EPILOGUE: tl.constexpr,
    STORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    HAS_SUM_FACTOR: tl.constexpr,
    HAS_SHIFT_FACTOR: tl.constexpr,
    EXPECTED: tl.constexpr,
    ARGMAX: tl.constexpr,
    GUARD: tl.constexpr,  # 0.0: always run; else run only where the guard exceeds it
    USE_TMA: tl.constexpr,
    EVEN_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    STORE_HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    logit_scale = number_at(logit_scale_ptr, 1.0)
    softcap = number_at(softcap_ptr, 1.0)
    row_blocks = tl.cdiv(n, BLOCK_N)
    vocab_blocks = tl.cdiv(V, BLOCK_V)
    depth = tl.cdiv(D, BLOCK_D)
    tiles = row_blocks * vocab_blocks
    if GUARD > 0.0:
        tiles = tl.where(exceeds(guard_ptr, GUARD), tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE):
        group_tiles = GROUP * vocab_blocks
        first = (tile // group_tiles) * GROUP
        height = min(row_blocks - first, GROUP)
        row_block = first + tile % height
        vocab_block = (tile % group_tiles) // height
        row_start = row_block * BLOCK_N
        col_start = vocab_block * BLOCK_V

        rows = row_start + tl.arange(0, BLOCK_N)
        cols = col_start + tl.arange(0, BLOCK_V)
        row_mask = rows < n
        col_mask = cols < V
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(depth):
            if USE_TMA:
                a = input_ptr.load([row_start, k * BLOCK_D])
                b = weight_ptr.load([col_start, k * BLOCK_D])
            else:
                ks = k * BLOCK_D + tl.arange(0, BLOCK_D)
                a = tl.load(
                    input_ptr + rows.to(tl.int64)[:, None] * stride_input_n + ks.to(tl.int64)[None, :] * stride_input_d,
                    mask=row_mask[:, None] & (ks < D)[None, :],
                    other=0.0,
                )
                b = tl.load(
                    weight_ptr
                    + cols.to(tl.int64)[:, None] * stride_weight_v
                    + ks.to(tl.int64)[None, :] * stride_weight_d,
                    mask=col_mask[:, None] & (ks < D)[None, :],
                    other=0.0,
                )
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)

        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        z, slope = base2_logits(acc, bias, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        class_weight = 1.0
        if HAS_CLASS_WEIGHT:
            class_weight = tl.load(class_weight_ptr + cols, mask=col_mask, other=0.0)[None, :]
        partial_offset = vocab_block.to(tl.int64) * n + rows

        if EPILOGUE == "max_sum":
            if not EVEN_V:
                z = tl.where(col_mask[None, :], z, float("-inf"))
            largest = tl.max(z, 1)
            finite = tl.where(largest == float("-inf"), 0.0, largest)  # a tile of -inf only: sum 0, not nan
            tl.store(partial_ptr + partial_offset, tl.sum(tl.exp2(z - finite[:, None]), 1), mask=row_mask)
            tl.store(partial_max_ptr + partial_offset, largest, mask=row_mask)
        else:
            reference = tl.load(reference_ptr + rows, mask=row_mask, other=0.0)
            if LOGIT_SUM:
                weighted = z * class_weight
                if not EVEN_V:
                    weighted = tl.where(col_mask[None, :], weighted, 0.0)
                tl.store(logit_sum_ptr + partial_offset, tl.sum(weighted, 1), mask=row_mask)
            if ARGMAX:
                candidates = z if EVEN_V else tl.where(col_mask[None, :], z, float("-inf"))
                largest = tl.max(candidates, 1)
                column = tl.min(tl.where(candidates == largest[:, None], cols[None, :], V), 1)
                tl.store(partial_max_ptr + partial_offset, largest, mask=row_mask)
                tl.store(partial_argmax_ptr + partial_offset, column, mask=row_mask)
            result = tl.exp2(z - reference[:, None])
            if EPILOGUE == "exp_sum":
                if not EVEN_V:
                    result = tl.where(col_mask[None, :], result, 0.0)
                tl.store(partial_ptr + partial_offset, tl.sum(result, 1), mask=row_mask)
                if EXPECTED:
                    # a bias of -inf has exponential 0, whose product is 0
                    weighted = tl.where(result > 0.0, result * (z - reference[:, None]), 0.0)
                    tl.store(expected_ptr + partial_offset, tl.sum(weighted, 1), mask=row_mask)
            else:
                row_factor = tl.load(row_factor_ptr + rows, mask=row_mask, other=0.0)[:, None]
                if HAS_SHIFT_FACTOR:
                    shift_factor = tl.load(shift_factor_ptr + rows, mask=row_mask, other=0.0)[:, None]
                    row_factor += tl.where(result > 0.0, shift_factor * (z - reference[:, None]), 0.0)
                result = result * row_factor
                if HAS_SUM_FACTOR:
                    result += tl.load(sum_factor_ptr + rows, mask=row_mask, other=0.0)[:, None] * class_weight
            if STORE:
                if HAS_SOFTCAP:
                    result = result * slope
                if USE_TMA:
                    rounded = result.to(out_ptr.dtype)
                    if STORE_HALVES:
                        # half the staging buffer in shared memory: room for one more stage of the main loop
                        halves = tl.permute(tl.reshape(rounded, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1))
                        left, right = tl.split(halves)
                        out_ptr.store([row_start, col_start], left)
                        out_ptr.store([row_start, col_start + BLOCK_V // 2], right)
                    else:
                        out_ptr.store([row_start, col_start], rounded)
                else:
                    tl.store(
                        out_ptr + rows.to(tl.int64)[:, None] * stride_out_n + cols[None, :],
                        result.to(out_ptr.dtype.element_ty),
                        mask=row_mask[:, None] & col_mask[None, :],
                    )


def launch_logits_gemm(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    class_weight: Tensor | None,  # (V,) float32
    *,
    epilogue: str,
    reference: Tensor | None = None,  # (n,)
    row_factor: Tensor | None = None,  # (n,)
    sum_factor: Tensor | None = None,  # (n,)
    shift_factor: Tensor | None = None,  # (n,)
    out: Tensor | None = None,  # (n, V)
    partial: Tensor | None = None,  # (T, n)
    partial_max: Tensor | None = None,  # (T, n)
    partial_argmax: Tensor | None = None,  # (T, n) int32
    logit_sum: Tensor | None = None,  # (T, n)
    expected: Tensor | None = None,  # (T, n)
    guard: Tensor | None = None,  # ()
    guard_limit: float = 0.0,
    logit_scale: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
    tiles: Tiles | None = None,
) -> None:
    assert out is None or out.stride(1) == 1
    n, hidden = input.shape
    num_classes = linear_weight.shape[0]
    tiles = tiles or tiles_for(input, linear_weight)
    block_n, block_v, block_d = tiles.block_n, tiles.block_v, tiles.block_d
    use_tma = tiles.tma and all(tensor is None or fits_tma(tensor) for tensor in (input, linear_weight, out))
    operands = [input, linear_weight, out]
    if use_tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = ([block_n, block_d], [block_v, block_d], [block_n, block_v // 2 if tiles.store_halves else block_v])
        operands = [
            None if tensor is None else TensorDescriptor.from_tensor(tensor, block)
            for tensor, block in zip(operands, blocks)
        ]
    grid_tiles = triton.cdiv(n, block_n) * triton.cdiv(num_classes, block_v)
    programs = min(grid_tiles, tiles.programs_per_sm * multiprocessors(input))
    logits_gemm_kernel[(programs,)](
        *operands,
        linear_bias,
        class_weight,
        reference,
        row_factor,
        sum_factor,
        shift_factor,
        partial,
        partial_max,
        partial_argmax,
        logit_sum,
        expected,
        guard,
        n,
        hidden,
        num_classes,
        *input.stride(),
        *linear_weight.stride(),
        0 if out is None else out.stride(0),
        logit_scale,
        softcap,
        EPILOGUE=epilogue,
        STORE=out is not None,
        HAS_BIAS=linear_bias is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_CLASS_WEIGHT=class_weight is not None,
        LOGIT_SUM=logit_sum is not None,
        HAS_SUM_FACTOR=sum_factor is not None,
        HAS_SHIFT_FACTOR=shift_factor is not None,
        EXPECTED=expected is not None,
        ARGMAX=partial_argmax is not None,
        GUARD=guard_limit,
        USE_TMA=use_tma,
        EVEN_V=num_classes % block_v == 0,
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        BLOCK_D=block_d,
        GROUP=tiles.group,
        PROGRAMS=programs,
        FLATTEN=tiles.flatten,
        WARP_SPECIALIZE=tiles.warp_specialize,
        STORE_HALVES=tiles.store_halves,
        PRECISION="ieee" if input.dtype == torch.float32 else "tf32",  # half operands ignore it
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def fits_tma(tensor: Tensor) -> bool:
    """Rows contiguous and apart, base and row stride multiples of 16 bytes: what a tensor map can address."""
    stride, unit = tensor.stride()
    aligned = stride * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return unit == 1 and stride >= tensor.shape[1] and aligned


def multiprocessors(tensor: Tensor) -> int:
    if tensor.device.type != "cuda":
        return 4  # the interpreter: enough programs that tiles are shared out unevenly
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
