"""The CUDA kernel of linear_cross_entropy_forward: one GEMM pass whose logits never leave the multiprocessors."""

from typing import Any

import torch

from ... import meta
from ...meta.arguments import Forward
from ...meta.call import takes
from ...support.sizes import cdiv
from ...support.target_range import assert_in_range
from ...support.workspace import get_workspace
from ..gemm.padded_features import with_padded_features
from ..gemm.tiles import tiles_for
from ..logits.stored import clear_unused, saved_logits
from ..rows.column_sums import weighted_column_sum
from ..rows.gather_tokens import launch_gather_targets
from ..rows.row_numbers import RowOutputs, launch_row_numbers
from ..rows.valid_tokens import ValidTokens, compact_tokens
from .chunks import MULTIPLE, make_vectors_contiguous, record_chunks, slices
from .exponentials import Asked, launch_exponentials

# N tokens, n rows of a chunk, D hidden, V vocabulary, T tiles along the vocabulary

FORWARD_ROWS = 4096  # rows whose sums per tile are in memory at a time: 8 MiB of (T, n) float32 at V = 128256


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
    *results, retained = outputs
    saved = saved_logits(retained, linear_weight.shape[0])
    chunks = forward_chunks(valid_tokens.order.shape[0], row_bytes, retained.shape[0])
    class_weight = weight.float() if weight is not None and call.logit_sum else None
    class_weight_sum = None if class_weight is None else weighted_column_sum(class_weight.view(-1, 1), None)
    memory = input.new_empty(max(chunk.stop - chunk.start for chunk in chunks), input.shape[1])
    wanted = RowOutputs(*(out if out.numel() else None for out in results))
    for chunk in chunks:
        n, here = chunk.stop - chunk.start, valid_tokens.of(chunk)
        rows = memory[:n]
        at_target = launch_gather_targets(call, here, rows)
        stored = saved.of(chunk) if chunk.start < retained.shape[0] else None
        own = at_target.reference_class if call.expected_log_prob else None
        options: dict[str, Any] = {"stored": stored, "reference_class": own, "class_weight": class_weight}
        sums = launch_exponentials(call, here, rows, at_target, asked=asked, **options)
        launch_row_numbers(sums, at_target, wanted, here, call.num_classes, linear_weight.shape[0], class_weight_sum)
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
