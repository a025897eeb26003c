"""The CUDA kernel of linear_cross_entropy_forward: one GEMM pass whose logits never leave the multiprocessors."""

import torch
import triton.language as tl

from ... import meta
from ...math.options import TokenStatistics
from ...meta.arguments import Forward
from ...meta.call import takes
from ...objectives.in_triton import LN2, number
from ...support.integers import cdiv
from ...support.target_range import assert_in_range
from ...support.workspace import get_workspace
from ..gemm.device import tiles_for
from ..gemm.padded_features import with_padded_features
from ..gemm.tile_sums import sum_of_tiles
from ..kernel import Kernel
from ..rows.column_sums import weighted_column_sum
from ..rows.finish_rows import ROWS, TILES
from ..rows.gather_tokens import launch_gather_targets
from ..rows.row_statistics import launch_row_statistics
from ..rows.two_sum import lse_in_nats, sum_from_lse
from ..rows.valid_tokens import ValidTokens, compact_tokens, valid_rows
from .chunks import MULTIPLE, make_vectors_contiguous, record_chunks, slices
from .exponentials import Asked, launch_exponentials
from .quantized_logits import clear_unused, quantized_of

# N tokens, n rows of a chunk, D hidden, V vocabulary, T tiles along the vocabulary

FORWARD_ROWS = 4096  # rows whose sums per tile are in memory at a time: 8 MiB of (T, n) float32 at V = 128256


@Kernel
def finish_forward_kernel(
    target_logit2_ptr,  # (n, K)
    column_ptr,  # (n, K)
    sums,  # RowSums
    class_weight_sum,  # (1,) float32; None for V
    outputs,  # seven tensors (N,), out, the first (N, K); None if not requested
    valid_tokens,  # ValidTokens
    n,
    V,
    T,
    TOPK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Adds up the tiles' sums, converts from base 2 to nats and writes to the tokens' places. Ignored tokens get 0, and
    an argmax of -1. So do targets that another rank has.
    """
    target_logit_out, lse_out, logit_sum_out, expected_out, max_logit_out, argmax_out, lse_rest_out = outputs
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < n
    count = valid_rows(valid_tokens, n)
    mask = i < count
    token = tl.load(valid_tokens.order + i, mask=inside, other=0)
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)  # of the targets' logits
    for k in range(TOPK):
        hit = tl.load(column_ptr + i.to(tl.int64) * TOPK + k, mask=mask, other=-1) >= 0
        target_logit2 = tl.load(target_logit2_ptr + i.to(tl.int64) * TOPK + k, mask=mask, other=0.0)
        if TOPK == 1:
            largest = target_logit2  # of column 0, if this rank lacks the target
        else:
            largest = tl.maximum(largest, tl.where(hit, target_logit2, float("-inf")))
        tl.store(target_logit_out + token.to(tl.int64) * TOPK + k, tl.where(hit, target_logit2 * LN2, 0.0), mask=inside)
    reference2 = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    row_sum = tl.where(mask, sum_of_tiles(sums.tiles, i, count, n, T, BLOCK_T), 1.0)
    # Rounding must not leave the row sum below the target's exponential, which comes from the same products, summed in
    # another order.
    row_sum = tl.maximum(row_sum, tl.exp2(largest - reference2), propagate_nan=tl.PropagateNan.ALL)
    tl.store(sums.exponentials + i, row_sum, mask=mask)
    lse, rest = lse_in_nats(reference2, tl.log2(row_sum))
    tl.store(lse_out + token, tl.where(mask, lse, 0.0), mask=inside)
    tl.store(lse_rest_out + token, tl.where(mask, rest, 0.0), mask=inside)
    if logit_sum_out is not None:
        logit_sum2 = tl.load(sums.logit_sum + i, mask=mask, other=0.0)
        logit_sum = sum_from_lse(logit_sum2, number(class_weight_sum, V), reference2 + tl.log2(row_sum))
        tl.store(logit_sum_out + token, tl.where(mask, logit_sum, 0.0), mask=inside)
    if expected_out is not None:
        expected = (tl.load(sums.expected + i, mask=mask, other=0.0) / row_sum - tl.log2(row_sum)) * LN2
        tl.store(expected_out + token, tl.where(mask, expected, 0.0), mask=inside)
    if argmax_out is not None:
        tl.store(max_logit_out + token, tl.load(sums.max_logit + i, mask=mask, other=0.0) * LN2, mask=inside)
        tl.store(argmax_out + token, tl.load(sums.argmax + i, mask=mask, other=-1), mask=inside)


@takes(Forward)
@with_padded_features
def launch_forward(call: Forward) -> meta.Outputs:
    if call.retain and call.logits.softcap is not None:
        raise NotImplementedError(
            "linear_cross_entropy_forward: expected retain=0 under a softcap, whose slope the saved logits do not "
            f"tell, got {call.retain}"
        )
    outputs = meta.outputs(call)
    make_vectors_contiguous(call)
    input, linear_weight, target, *_ = call.operands
    in_range = target.new_empty((), dtype=torch.bool)
    with torch.cuda.device_of(input):
        valid_tokens, _ = compact_tokens(target, call.ignore_index, call.num_classes, in_range)
        chunks = run_forward(call, valid_tokens, outputs)
        assert_in_range(in_range, target, call.num_classes, call.ignore_index)
    record_chunks(call, linear_weight, chunks)
    return outputs


def run_forward(call: Forward, valid_tokens: ValidTokens, outputs: meta.Outputs) -> list[slice]:
    """Runs over the valid tokens and returns the chunks. `outputs` are (N,), in the order of all tokens."""
    input, linear_weight, target, _, weight = call.operands
    tiles = cdiv(linear_weight.shape[0], tiles_for(input).block_n)
    asked = Asked(call.logit_sum, call.expected_log_prob, call.argmax, call.log_sum_sq_probs, call.mean_logit)
    row_bytes = tiles * 4 * (1 + asked.numbers) + input.shape[1] * input.dtype.itemsize
    *results, squares, mean_logit, lse_rest, retained = outputs
    statistics = TokenStatistics(
        log_sum_sq_probs=squares if call.log_sum_sq_probs else None, mean_logit=mean_logit if call.mean_logit else None
    )
    quantized = quantized_of(retained, linear_weight.shape[0], input.dtype)
    chunks = forward_chunks(valid_tokens.order.shape[0], row_bytes, retained.shape[0])
    class_weight = weight.float() if weight is not None and call.logit_sum else None
    class_weight_sum = None if class_weight is None else weighted_column_sum(class_weight.view(-1, 1), None)
    memory = input.new_empty(max(chunk.stop - chunk.start for chunk in chunks), input.shape[1])
    wanted = tuple(out if out.numel() else None for out in (*results, lse_rest))
    for chunk in chunks:
        n, here = chunk.stop - chunk.start, valid_tokens.of(chunk)
        rows = memory[:n]
        at_target = launch_gather_targets(call, here, rows)
        sums = launch_exponentials(
            call,
            here,
            rows,
            at_target,
            quantized=quantized.of(chunk) if chunk.start < retained.shape[0] else None,
            asked=asked,
            reference_class=at_target.reference_class if call.expected_log_prob else None,
            class_weight=class_weight,
        )
        finish_forward_kernel[(cdiv(n, ROWS),)](
            at_target.logit,
            at_target.column,
            sums,
            class_weight_sum,
            wanted,
            here,
            n,
            linear_weight.shape[0],
            tiles,
            TOPK=1 if target.dim() == 1 else target.shape[1],
            BLOCK_N=ROWS,
            BLOCK_T=TILES,
            num_warps=4,
        )
        launch_row_statistics(sums, statistics, here, call.num_classes)
    clear_unused(retained, linear_weight.shape[0], tiles_for(input).block_n, valid_tokens)
    return chunks


def forward_chunks(tokens: int, row_bytes: int, retained: int) -> list[slice]:
    """Chunks of rows that take `row_bytes` each, for partial sums and the gathered token. Rows whose logits are saved
    come first, in separate chunks.
    """
    rows_that_fit = get_workspace() // row_bytes // MULTIPLE * MULTIPLE
    at_most, first = min(max(rows_that_fit, MULTIPLE), FORWARD_ROWS), min(retained, tokens)
    others = [slice(first + rows.start, first + rows.stop) for rows in slices(tokens - first, at_most)]
    return slices(first, at_most) + others
