"""The GEMM that makes a chunk of logits. Its epilogue consumes each float32 tile before anything is rounded.

                     D               V
               ┌───────────┐    ┌──┬──┬──┬──┐    persistent programs walk the tiles of (n, V);
    n  BLOCK_M │   input   │  @ │  │▓▓│  │  │    GROUP row blocks sweep V together, so that a tile
               └───────────┘    └──┴──┴──┴──┘    of linear_weight is read from HBM once a group
                                 BLOCK_N

    for each tile:  acc = sum_k input[rows, k] @ linear_weight[cols, k].T              (tensor cores, float32)
    for each part of EPILOGUE_N columns:
                    z   = softcap * tanh(logit_scale * (acc + bias) / softcap)          (or logit_scale * (acc + bias))
    result = epilogue(z), which also stores sums, one number per row and part             (epilogues.py)
             0 in a part's rows after the last valid token                            (valid_tokens.py)
    out = result dz/du / logit_scale, rounded once; optional                        (max_sum: without dz/du)

The epilogue "exp_sum" works with any reference that is at most 40 nats below the row's largest logit. It rounds the
exponential to bfloat16, and the relative error of that does not depend on the reference. The target's own logit is such
a reference for every token whose loss is under 40 nats. It costs N dot products and saves the epilogue a maximum over
the row. For the other tokens a program walks its tiles a second time, and `flce_ops/triton/steps/forward.py` launches
the kernel again. A maximum in the first walk would take 2 % of the kernel's time at D = 640.

All logits, references and logarithms here are in base 2 (z * log2 e), because exp2 is the hardware's instruction.
"""

import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...support.sizes import cdiv
from ..kernel import Kernel
from ..rows.logit_numbers import base2_logits, loaded
from ..rows.valid_tokens import ValidTokens, valid_rows
from .epilogues import EPILOGUES, Epilogue, ExpSum, Gradient, raise_reference
from .tiles import (
    EPILOGUE_N,
    Matrix,
    Tiles,
    block_of_tile,
    columns_of_tile,
    fits_tma,
    in_dtype_of,
    kernel_matrices,
    load_tile,
    matrix_of,
    multiprocessors,
    store_tile,
    tiles_for,
)

# n rows of a chunk, D hidden, V vocabulary, T = ceil(V / EPILOGUE_N) tiles along the vocabulary


@Kernel
def logits_gemm_kernel(
    input,  # (n, D): tensor descriptor with USE_TMA, else a Matrix
    linear_weight,  # (V, D): likewise
    out,  # (n, V) out: likewise; None if nothing is stored
    bias_ptr,  # (V,) or None
    logit_numbers,  # LogitNumbers
    operands,  # the epilogue's tuple: ExpSum, MaxSum or Gradient
    guard_ptr,  # () int32, 0 if no sum of an earlier pass is too large: the kernel returns; or None
    valid_tokens,  # ValidTokens, the tokens of the rows
    products,  # Matrix, (n, V) float32, with MADE: input @ linear_weight.T, which another backend has made
    n,
    D,
    V,
    EPILOGUE: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # classes
    BLOCK_K: tl.constexpr,  # features
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STORED: tl.constexpr,  # `out` is given; Triton 3.6 cannot compare a NamedTuple that holds None with None
    SLOPED: tl.constexpr,
    RAISES: tl.constexpr,  # if a sum is too large, a program makes its tiles once more, for raise_reference
    MADE: tl.constexpr,
):
    numbers = loaded(logit_numbers)
    count = valid_rows(valid_tokens, n)
    row_blocks = tl.cdiv(count, BLOCK_M)
    vocab_blocks = tl.cdiv(V, BLOCK_N)
    depth = tl.cdiv(D, BLOCK_K)
    tiles = row_blocks * vocab_blocks
    PARTS: tl.constexpr = BLOCK_N // EPILOGUE_N
    if guard_ptr is not None:
        tiles = tl.where(tl.load(guard_ptr) > 0, tiles, 0)
    for walk in tl.static_range(2 if RAISES else 1):
        if walk == 1:
            # A program raises the references of its own tiles. So it must see what its own threads have stored in the
            # guard, and need not see what other programs store. These may store at the same time. With a scalar load
            # each thread would read for itself: some would begin the walk and others not, and the GPU would stop with
            # "illegal instruction". An atomic operation on a scalar is done once, for all threads of the program.
            tl.debug_barrier()
            tiles = tl.where(tl.atomic_max(operands.guard, 0, sem="relaxed") > 0, tiles, 0)
        for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=USE_TMA):
            row_block, vocab_block = block_of_tile(tile, row_blocks, vocab_blocks, GROUP)
            row_start = row_block * BLOCK_M
            col_start = vocab_block * BLOCK_N

            rows = row_start + tl.arange(0, BLOCK_M)
            cols = col_start + tl.arange(0, BLOCK_N)
            row_mask = rows < count
            col_mask = cols < V
            if MADE:
                acc = load_tile(products, rows, cols, row_mask, col_mask)
            else:
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(depth):
                    if USE_TMA:
                        a = input.load([row_start, k * BLOCK_K])
                        b = linear_weight.load([col_start, k * BLOCK_K])
                    else:
                        ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                        a = load_tile(input, rows, ks, row_mask, ks < D)
                        b = load_tile(linear_weight, cols, ks, col_mask, ks < D)
                    acc = tl.dot(a, b.T, acc)
            for part in tl.static_range(PARTS):
                # The store of one part runs beside the epilogue of the next, and its staging buffer is half as large.
                products_of_part = columns_of_tile(acc, part, EPILOGUE_N)
                part_start = col_start + part * EPILOGUE_N
                part_cols = part_start + tl.arange(0, EPILOGUE_N)
                part_mask = part_cols < V
                # the last tile's second part may lie behind V, and then stores no sums
                part_rows = rows < tl.where(part_start < V, count, 0)
                bias = None
                if bias_ptr is not None:
                    bias = tl.load(bias_ptr + part_cols, mask=part_mask, other=0.0).to(tl.float32)[None, :]
                z, dz_du = base2_logits(products_of_part, bias, logit_numbers, numbers)
                if walk == 1:
                    raise_reference(operands, z, rows, part_rows, part_mask, EVEN_V)
                else:
                    place = vocab_block * PARTS + part
                    result = EPILOGUE(operands, z, rows, part_cols, part_rows, part_mask, place, n, V, EVEN_V)
                    if STORED:
                        if SLOPED:
                            result = result * dz_du
                        if USE_TMA:
                            out.store([row_start, part_start], in_dtype_of(out, result, USE_TMA))
                        else:
                            # also writes the zeros after the valid rows, as the store through TMA does
                            store_tile(out, result, rows, part_cols, rows < n, part_mask)


def launch_logits_gemm(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    epilogue: Epilogue,
    logit_options: LogitOptions,
    valid_tokens: ValidTokens,
    *,
    out: Tensor | None = None,  # (n, V)
    guard: Tensor | None = None,  # ()
    tiles: Tiles | None = None,
    matrices: list | None = None,  # what an earlier launch on the same operands returned
    products: Tensor | None = None,  # (n, V) float32: input @ linear_weight.T, if another backend has made it
) -> list:
    n, hidden = input.shape
    num_classes = linear_weight.shape[0]
    tiles = tiles or tiles_for(input)
    if matrices is None:
        given = [input, linear_weight, out]
        of_rows, of_classes = [tiles.block_m, tiles.block_k], [tiles.block_n, tiles.block_k]
        of_out = [tiles.block_m, EPILOGUE_N.value]
        matrices = kernel_matrices(given, (of_rows, of_classes, of_out), tiles.tma and all(map(fits_tma, given)))
    grid_tiles = cdiv(n, tiles.block_m) * cdiv(num_classes, tiles.block_n)
    programs = multiprocessors(input)
    logits_gemm_kernel[(min(grid_tiles, programs),)](
        *matrices,
        linear_bias,
        logit_options,
        epilogue,
        guard,
        valid_tokens,
        matrix_of(products),
        n,
        hidden,
        num_classes,
        EPILOGUE=EPILOGUES[type(epilogue)],
        USE_TMA=not isinstance(matrices[0], Matrix),
        EVEN_V=num_classes % EPILOGUE_N.value == 0,
        GROUP=tiles.group,
        PROGRAMS=programs,
        STORED=out is not None,
        # the results of the other are logits, not gradients
        SLOPED=logit_options.softcap is not None and isinstance(epilogue, ExpSum | Gradient),
        RAISES=isinstance(epilogue, ExpSum) and epilogue.guard is not None,
        MADE=products is not None,
        **tiles.options,
    )
    return matrices
