"""linear_cross_entropy_forward on CUDA, one GEMM pass whose logits never leave the multiprocessors, and what it shares
with steps that make gradients in forward.

Exponentials of a chunk of logits against a reference per row, and the rescue of rows whose reference was too low.

    1. E = exp(z - reference), sums of each row and tile        the reference is one of the row's own logits, so Z >= 1
       a guard is raised if one is above LARGEST_SUM, or nan    on the device; the host never reads it
    2. only if the guard is raised, decided on the device:      2 more GEMM passes for this chunk
           reference := the largest logit, for such a row       by the same kernel: logits_gemm.py
           E again                                              by another launch

The kernel that finishes the rows adds up the tiles' sums.

exp(z - reference) overflows if a logit is far above the reference. This happens if a token's loss exceeds 40 nats. On a
rank without the target, column 0 is the reference, and it happens if that class is as unlikely. The kernel that makes E
again is always launched. It returns immediately (in 2 microseconds) if it is not needed. So there is no host
synchronisation, and CUDA graphs work.
"""

from typing import Any

import torch
from torch import Tensor

from ... import meta
from ...meta.arguments import Forward
from ...meta.call import takes
from ...support.sizes import cdiv
from ...support.target_range import assert_in_range
from ...support.workspace import get_workspace
from ..gemm.backends import backend_for
from ..gemm.epilogues import ExpSum, ReferenceClass
from ..gemm.tiles import EPILOGUE_N
from ..logits.stored import StoredLogits, clear_unused, saved_logits
from ..rows.bias_and_tile_sums import NOTHING_ELSE, Asked, RowSums, weighted_column_sum
from ..rows.copy_rows import with_padded_features
from ..rows.gather_tokens import AtTarget, launch_gather_targets
from ..rows.row_numbers import RowOutputs, launch_row_numbers
from ..rows.valid_tokens import ValidTokens, compact_tokens, room_for_rows
from .chunks import MULTIPLE, make_vectors_contiguous, record_chunks, slices

# N tokens, n rows of a chunk, D hidden, V vocabulary, T tiles along the vocabulary

AGAINST_REFERENCE = "expected", "squares"  # sums relative to the reference: a rescue recomputes them


def launch_exponentials(
    call: Any,  # with Operands
    valid_tokens: ValidTokens,
    input: Tensor,  # (n, D) of the valid tokens
    at_target: AtTarget,  # a rescue raises its reference
    *,
    out: Tensor | None = None,  # (n, V), E
    stored: StoredLogits | None = None,  # z, written instead of E
    asked: Asked = NOTHING_ELSE,
    class_weight: Tensor | None = None,  # (V,) float32, for the logit sum
    reference_class: ReferenceClass | None = None,  # replaces the logits of these classes
) -> RowSums:
    _, linear_weight, _, linear_bias, _ = call.operands
    reference, guard, backend = at_target.reference, at_target.guard, backend_for(input)
    rows, room = input.shape[0], room_for_rows(input.shape[0])
    tiles = cdiv(linear_weight.shape[0], EPILOGUE_N.value)
    partial = torch.empty(tiles, room, dtype=torch.float32, device=input.device)
    per_tile: dict[str, Any] = {
        name: partial.new_empty(partial.shape) for name, wanted in zip(asked._fields, asked) if wanted
    }
    if asked.argmax:
        per_tile |= {"row_max": per_tile["argmax"], "argmax": partial.new_empty(partial.shape, dtype=torch.int32)}
    sums = ExpSum(
        at_target.reference_class.logit,
        class_weight if asked.logit_sum else None,
        partial,
        stored=stored,
        reference_class=reference_class,
        guard=guard,
        raised=reference,
        **per_tile,
    )

    def launch(epilogue: ExpSum, written: Tensor | None, **options: Any) -> Any:
        operands = input, linear_weight, linear_bias, epilogue, call.logits, valid_tokens
        return backend.logits(*operands, out=written, **options)

    row_sum = torch.empty(rows, dtype=torch.float32, device=input.device)
    matrices = launch(sums, out if stored is None else stored.numbers)
    again = {name: part for name, part in per_tile.items() if name in AGAINST_REFERENCE}
    sums = ExpSum(reference, None, partial, reference_class=reference_class, **again)
    launch(sums, out, guard=guard, matrices=matrices)
    found: dict[str, Tensor] = {}
    if asked.argmax:
        largest = per_tile["row_max"], per_tile["argmax"]
        found["max_logit"], found["argmax"] = argmax_over_tiles(*largest, rows, linear_weight.shape[0])
    for name, part in per_tile.items():
        if name in Asked._fields and name != "argmax":
            found[name] = weighted_column_sum(part, None)[:rows]
    return RowSums(row_sum, reference, partial, **found)


def argmax_over_tiles(row_max: Tensor, argmax: Tensor, n: int, num_classes: int) -> tuple[Tensor, Tensor]:  # (n,) each
    """The largest logit and its class: the first of equals, or the last class if the maximum is nan."""
    row_max, argmax, last = row_max[:, :n], argmax[:, :n], num_classes - 1
    max_logit = row_max.amax(0)
    return max_logit, argmax.where(row_max == max_logit, last).amin(0).long().clamp_(max=last)


FORWARD_ROWS = 4096  # rows whose sums per tile are in memory at a time: 16 MiB of (T, n) float32 at V = 128256


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
    tiles = cdiv(linear_weight.shape[0], EPILOGUE_N.value)
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
    clear_unused(retained, linear_weight.shape[0], valid_tokens)
    return chunks


def forward_chunks(tokens: int, row_bytes: int, retained: int) -> list[slice]:
    """Chunks of rows that take `row_bytes` each, for partial sums and the gathered token. Rows whose logits are saved
    come first, in separate chunks.
    """
    fitting = get_workspace() // row_bytes // MULTIPLE * MULTIPLE
    at_most, first = min(max(fitting, MULTIPLE), FORWARD_ROWS), min(retained, tokens)
    others = [slice(first + rows.start, first + rows.stop) for rows in slices(tokens - first, at_most)]
    return slices(first, at_most) + others
