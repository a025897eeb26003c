"""Ignored tokens: on a CPU they cost nothing, elsewhere what they hold is harmless.

A kernel allocates its results and hands the work to a body over chunks of rows, which reads every row it is given:

    a CPU        indices = 1 3 4 6         the tokens that count, by index
                 body on those rows        matrices are gathered a chunk at a time, vectors at once
                 row k -> row indices[k]   in place; the rows between are filled
    elsewhere    body on all rows          a chunk of input is copied, its ignored rows as zeros
                 results are filled where ignored

How many tokens count is data. A CPU may look, a GPU's host would wait for everything that is queued. There zeros in
input are the cheapest way to keep nan and inf out: they take D numbers a row where a mask of the logits takes V, and
the product that makes grad_linear_weight reads them too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.topk import tokens_that_count
from ..meta.call import Arguments
from ..meta.results import AtIgnored
from ..objectives.row import RowObjective
from ..support.target_range import assert_in_range, in_range

# N tokens, n of them that are not ignored, K classes of a target, D hidden, V vocabulary

# What an ignored row of a matrix is read as: log 1 = 0, where log 0 = -inf.
MATRICES = {  # (N, ...)
    "input": 0.0,
    "low_rank_input": 0.0,
    "logits": 0.0,
    "grad_grad_input": 0.0,
    "teacher_input": 0.0,
    "teacher_probs": 1.0,
}
VECTORS = {  # (..., N)
    *(name for objective in RowObjective.named.values() for name in objective.tokens_of._fields),
    "row_scale",
    "lse",
    "lse_rest",
    "expected_log_prob",
    "grad",
    "grad_lse",
    "grad_logit_sum",
    "grad_expected_log_prob",
    "shift",
    "teacher_shift",
    "student_kl",
    "token",
    "softcap",
    "logit_scale",
    "teacher_softcap",
    "teacher_logit_scale",
}
PER_TARGET = {"target", "target_weight", "grad_target_logit"}  # (N,) or (N, K)
SPREAD_BYTES = 2 << 20  # of rows that move at a time: in a CPU's cache


class RowsByChunk:
    """Stands in for an (N, D) matrix in what the bodies, chunks.py and gradients.py ask of it.

    Rows are made when they are read. A copy of all of them would not fit a workspace that is smaller than input.
    """

    def __init__(
        self,
        matrix: Tensor,
        rows: int,
        make: Callable[[slice], Tensor],
        ignored: Tensor | None = None,  # (rows,) bool
    ) -> None:
        self.dtype, self.device, self.new_empty = matrix.dtype, matrix.device, matrix.new_empty
        self.shape = torch.Size((rows, matrix.shape[1]))
        self.tokens = matrix.shape[0]
        self.make = make
        self.ignored = ignored  # rows of tokens that do not count; None where all do

    def __getitem__(self, rows: slice) -> Tensor:
        return self.make(rows)


def tokens_of(input: Tensor) -> int:
    """N, ignored ones included: vectors of so many numbers exist beside a chunk."""
    return input.tokens if isinstance(input, RowsByChunk) else input.shape[0]


def zero_where_ignored(input: Tensor, values: Tensor) -> Tensor:  # (N,)
    """What a body reads at the ignored rows that it was given, if any."""
    ignored = input.ignored if isinstance(input, RowsByChunk) else None
    return values if ignored is None else values.masked_fill(ignored, 0)


Body = Callable[..., None]  # of a call, the results that it fills in, and perhaps a direction
Results = Sequence[Tensor]
Fills = Sequence[AtIgnored | None]  # None for a result that is not by token


def on_valid_tokens(body: Body, call: Arguments, results: Results, fills: Fills, *direction: Any) -> None:
    valid = None if call.all_count else counted(call)
    if valid is None:
        body(call, results, *direction)
    elif valid.device.type != "cpu":
        with_zeroed_rows(body, call, results, fills, ~valid, *direction)
    elif bool(valid.all()):
        body(call, results, *direction)
    else:
        with_valid_rows(body, call, results, fills, valid, *direction)


def check_target_range(target: Tensor, num_classes: int, ignore_index: int, *, on_device: bool = False) -> bool:
    """Whether it is known that no token is ignored: on a CPU one pass tells both."""
    if not on_device and target.device.type == "cpu":
        if not target.numel():
            return False
        lowest, highest = map(int, target.aminmax())
        if 0 <= lowest and highest < num_classes:
            return not lowest <= ignore_index <= highest
    valid = in_range(target, num_classes, ignore_index).all()
    assert_in_range(valid, target, num_classes, ignore_index, on_device=on_device)
    return False


def counted(call: Any) -> Tensor | None:  # (N,) bool, None for all
    if "target" in call.index:
        return tokens_that_count(call.operands.target, call.ignore_index)
    return call.operands.valid


def with_valid_rows(
    body: Body, call: Arguments, results: Results, fills: Fills, valid: Tensor, *direction: Any
) -> None:
    indices = valid.nonzero().squeeze(1)
    by_token = [(r, fill) for r, fill in zip(results, fills) if fill is not None and r.shape[fill.dim]]
    first = {id(r): r.narrow(fill.dim, 0, len(indices)) for r, fill in by_token}

    def of_valid(name: str, value: Any) -> Any:
        if name == "valid" or not isinstance(value, Tensor):
            return None if name == "valid" else value
        if name in MATRICES:
            return RowsByChunk(value, len(indices), lambda rows: value.index_select(0, indices[rows]))
        if name in PER_TARGET:
            return value.index_select(0, indices)
        return value.index_select(-1, indices) if name in VECTORS and value.dim() and value.shape[-1] else value

    call_of_valid = call.changed(of_valid)
    call_of_valid.notes += ("without ignored tokens",)
    body(call_of_valid, [first.get(id(r), r) for r in results], *(by_name(d, of_valid) for d in direction))
    ignored = (~valid).nonzero().squeeze(1)
    for result, fill in by_token:
        spread(result.movedim(fill.dim, 0), indices)
        result.index_fill_(fill.dim, ignored, fill.fill)


def spread(rows: Tensor, indices: Tensor) -> None:
    """Row k to row indices[k] >= k, in place: from the last to the first, none is overwritten that has yet to move."""
    step = max(SPREAD_BYTES // max(rows[0].numel() * rows.element_size(), 1), 1)
    for start in reversed(range(0, len(indices), step)):
        to = indices[start : start + step]
        rows.index_copy_(0, to, rows[start : start + len(to)].clone())


def with_zeroed_rows(
    body: Body, call: Arguments, results: Results, fills: Fills, ignored: Tensor, *direction: Any
) -> None:
    def zeroed(name: str, value: Any) -> Any:
        if name not in MATRICES or not isinstance(value, Tensor):
            return value
        fill = MATRICES[name]
        return RowsByChunk(
            value, value.shape[0], lambda rows: value[rows].masked_fill(ignored[rows, None], fill), ignored=ignored
        )

    body(call.changed(zeroed), results, *(by_name(d, zeroed) for d in direction))
    for result, fill in zip(results, fills):
        # rows of grad_input are zeros times linear_weight; a shift fits the row of zeros it was made of
        if fill is not None and result.dim() == 1 and len(result):
            result.masked_fill_(ignored, fill.fill)


def by_name(values: Any, change: Callable[[str, Any], Any]) -> Any:
    """A named tuple with its values changed."""
    return type(values)(*(change(name, value) for name, value in values._asdict().items()))
