"""Exponentials of a chunk of logits against a reference per row, and the rescue of rows whose reference was too low.

    1. E = exp(z - reference), sums of each row and tile        the reference is one of the row's own logits, so Z >= 1
       a guard is raised if one is above LARGEST_SUM, or nan    on the device; the host never reads it
    2. only if the guard is raised, decided on the device:      2 more GEMM passes for this chunk
           reference := the largest logit, for the rows that raised it;  E again

The kernel that finishes the rows adds up the tiles' sums.

exp(z - reference) overflows if a logit is far above the reference. This happens if a token's loss exceeds 40 nats. On a
rank without the target, column 0 is the reference, and it happens if that class is as unlikely. The kernels of step 2
are always launched. They return immediately (a few microseconds) if they are not needed. So there is no host
synchronisation, and CUDA graphs work.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...support.sizes import cdiv
from ..gemm.backends import backend_for
from ..gemm.epilogues import ExpSum, Largest, ReferenceClass
from ..gemm.tiles import tiles_for
from ..logits.stored import StoredLogits
from ..rows.column_sums import weighted_column_sum
from ..rows.gather_tokens import AtTarget
from ..rows.valid_tokens import ValidTokens, room_for_rows

# n rows of a chunk, V vocabulary, T tiles along the vocabulary


class RowSums(NamedTuple):
    """Sums over the classes of each row, (n,) each, in base 2; None if not requested."""

    exponentials: (
        Tensor  # sum of exp2(z2 - reference_logit); if `tiles` is given, the reader adds these up and writes it
    )
    reference_logit: Tensor
    tiles: Tensor | None = None  # (T, n'), the same sum over each tile
    logit_sum: Tensor | None = None  # sum of w z2
    expected: Tensor | None = None  # sum of exp2(z2 - reference_logit) (z2 - reference_logit)
    max_logit: Tensor | None = None  # z2
    argmax: Tensor | None = None  # int64, the first of equals
    squares: Tensor | None = None  # sum of exp2(z2 - reference_logit)^2
    total: Tensor | None = None  # sum of z2


class Asked(NamedTuple):
    """Which fields of RowSums are requested, besides the first three. `argmax` also gives max_logit."""

    logit_sum: bool = False
    expected: bool = False
    argmax: bool = False
    squares: bool = False
    total: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers the epilogue stores for a row and tile."""
        return sum(self) + self.argmax


NOTHING_ELSE = Asked()
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
    reference_logit, guard, backend = at_target.reference, at_target.guard, backend_for(input)
    rows, room = input.shape[0], room_for_rows(input.shape[0])
    block_v = tiles_for(input).block_n
    tiles = cdiv(linear_weight.shape[0], block_v)
    partial = torch.empty(tiles, room, dtype=torch.float32, device=input.device)
    per_tile: dict[str, Any] = {
        name: partial.new_empty(partial.shape) for name, wanted in asked._asdict().items() if wanted
    }
    if asked.argmax:
        per_tile |= {"row_max": per_tile["argmax"], "argmax": partial.new_empty(partial.shape, dtype=torch.int32)}
    sums = ExpSum(
        reference_logit,
        class_weight if asked.logit_sum else None,
        partial,
        stored=stored,
        reference_class=reference_class,
        guard=guard,
        **per_tile,
    )

    def launch(epilogue: ExpSum | Largest, written: Tensor | None, **options: Any) -> Any:
        operands = input, linear_weight, linear_bias, epilogue, call.logits, valid_tokens
        return backend.logits(*operands, out=written, **options)

    row_sum = torch.empty(rows, dtype=torch.float32, device=input.device)
    matrices = launch(sums, out if stored is None else stored.numbers)
    launch(Largest(reference_logit, guard), None, guard=guard, matrices=matrices)
    again = {name: part for name, part in per_tile.items() if name in AGAINST_REFERENCE}
    sums = ExpSum(reference_logit, None, partial, reference_class=reference_class, **again)
    launch(sums, out, guard=guard, matrices=matrices)
    found: dict[str, Tensor] = {}
    if asked.argmax:
        largest = per_tile["row_max"], per_tile["argmax"]
        found["max_logit"], found["argmax"] = argmax_over_tiles(*largest, rows, linear_weight.shape[0])
    for name, part in per_tile.items():
        if name in Asked._fields and name != "argmax":
            found[name] = weighted_column_sum(part, None)[:rows]
    return RowSums(row_sum, reference_logit, partial, **found)


def argmax_over_tiles(row_max: Tensor, argmax: Tensor, n: int, num_classes: int) -> tuple[Tensor, Tensor]:  # (n,) each
    """The largest logit and its class: the first of equals, or the last class if the maximum is nan."""
    row_max, argmax, last = row_max[:, :n], argmax[:, :n], num_classes - 1
    max_logit = row_max.amax(0)
    return max_logit, argmax.where(row_max == max_logit, last).amin(0).long().clamp_(max=last)
