"""Ignored tokens: on a CPU they cost nothing. On other devices their values do no harm.

kernel_of makes a kernel from a function `body`. The body works on chunks of rows, reads every row it is given and fills
in the results:

    a CPU        indices = 1 3 4 6         the indices of the valid tokens
                 body on those rows        matrices are gathered chunk by chunk, vectors at once
                 row k -> row indices[k]   in place; rows of ignored tokens get a constant
    elsewhere    body on all rows          a chunk of input is copied, with zeros for ignored rows
                 results are filled where ignored

The number of valid tokens is data. A CPU may read it. On a GPU the host would have to wait for all queued work. There,
zeros in input are the cheapest way to keep out nan and inf: they take D numbers per row, where a mask of the logits
would take V, and the product for grad_linear_weight reads input, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import meta
from ..math.options import tokens_that_count
from ..meta.call import Arguments, takes
from ..meta.outputs import AXES
from ..objectives.token_function import zero_where
from ..support.target_range import assert_in_range, in_range

# N tokens, n valid ones, K classes of a target, D hidden, V vocabulary

# The value that replaces an ignored row of a matrix. For probabilities it is 1, because log 1 = 0 and log 0 = -inf.
MATRICES = {name: float(name == "teacher_probs") for name, axes in AXES.items() if axes in ("ND", "NE", "NV")}
OF_TOKENS = {name for name, axes in AXES.items() if axes in ("N", "N2")} | {"teacher_lse_pair", "student_kl"}
SPREAD_BYTES = 2 << 20  # bytes of rows that are moved at a time: they fit a CPU's cache


class RowsByChunk:
    """Stands in for an (N, D) matrix, with what the bodies, chunks.py and gradients.py use of a tensor.

    Rows are made when they are read: a copy of all rows would not fit a workspace that is smaller than input.
    """

    def __init__(
        self,
        matrix: Tensor,
        rows: int,
        make: Callable[[slice], Tensor],
        ignored: Tensor | None = None,  # (rows,) bool
        places: Tensor | None = None,  # (rows,)
    ) -> None:
        self.dtype, self.device, self.new_empty = matrix.dtype, matrix.device, matrix.new_empty
        self.shape = torch.Size((rows, matrix.shape[1]))
        self.tokens = matrix.shape[0]
        self.make = make
        self.ignored = ignored  # rows of ignored tokens; None if there are none
        self.places = places  # of the rows in the call; None if all are there

    def __getitem__(self, rows: slice) -> Tensor:
        return self.make(rows)


def tokens_of(input: Tensor) -> int:
    """N, including ignored tokens: the length of the vectors that need memory beside a chunk."""
    return input.tokens if isinstance(input, RowsByChunk) else input.shape[0]


def zero_where_ignored(input: Tensor, values: Tensor) -> Tensor:  # (N, ...)
    """The values, with 0 at ignored rows, unless the body got only valid rows."""
    ignored = input.ignored if isinstance(input, RowsByChunk) else None
    return values if ignored is None else zero_where(ignored, values)


Body = Callable[..., None]  # takes a call and the results to fill in
Results = Sequence[Tensor]
Fills = Sequence[float | None]  # None for a result that has no entry for each token


def kernel_of(
    arguments: type[Arguments],
    *,
    checks_target: bool = False,  # for operators that get the target from the user, not from another operator
) -> Callable[[Body], Callable]:
    """Decorates a body: the kernel checks the call, allocates the results, and runs the body on the valid rows."""

    def decorate(body: Body) -> Callable:
        @takes(arguments)
        @functools.wraps(body)
        def kernel(call: Any) -> Any:
            outputs = meta.outputs(call)
            if checks_target:
                call.all_count = check_target_range(call.operands.target, call.num_classes, call.ignore_index)
            results, fills = (outputs,) if isinstance(outputs, Tensor) else outputs, call.fills
            if call.written == "logits":  # whose rows become those of their gradient
                results, fills = (*results, call.operands.logits), (*fills, 0.0)
            if call.all_count:
                body(call, results)
            else:
                on_valid_tokens(body, call, results, fills)
            return outputs

        return kernel

    return decorate


def on_valid_tokens(body: Body, call: Arguments, results: Results, fills: Fills) -> None:
    valid = counted(call)
    if valid is None or (valid.device.type == "cpu" and bool(valid.all())):
        body(call, results)
    elif valid.device.type != "cpu":
        with_zeroed_rows(body, call, results, fills, ~valid)
    else:
        with_valid_rows(body, call, results, fills, valid)


def check_target_range(target: Tensor, num_classes: int, ignore_index: int) -> bool:
    """Checks the targets. Returns whether all tokens are known to be valid, which a CPU finds out in the same pass."""
    if target.device.type == "cpu":
        if not target.numel():
            return False
        lowest, highest = map(int, target.aminmax())
        if 0 <= lowest and highest < num_classes:
            return not lowest <= ignore_index <= highest
    valid = in_range(target, num_classes, ignore_index).all()
    assert_in_range(valid, target, num_classes, ignore_index)
    return False


def counted(call: Any) -> Tensor | None:  # (N,) bool of valid tokens; None if all are
    if "target" in call.index:
        return tokens_that_count(call.operands.target, call.ignore_index)
    return call.operands.valid


def with_valid_rows(body: Body, call: Arguments, results: Results, fills: Fills, valid: Tensor) -> None:
    indices = valid.nonzero().squeeze(1)
    by_token = [(r, fill) for r, fill in zip(results, fills) if fill is not None and len(r)]
    first = {id(r): r[: len(indices)] for r, fill in by_token}

    def of_valid(name: str, value: Any) -> Any:
        if name == "tensors" and value is not None:  # of a token function, (N, ...) or ()
            return [tensor.index_select(0, indices) if tensor.dim() else tensor for tensor in value]
        if name == "valid" or not isinstance(value, Tensor):
            return None if name == "valid" else value
        if name in MATRICES:
            return RowsByChunk(value, len(indices), lambda rows: value.index_select(0, indices[rows]), places=indices)
        return value.index_select(0, indices) if name in OF_TOKENS and len(value) else value

    call_of_valid = call.changed(of_valid)
    call_of_valid.notes += ("without ignored tokens",)
    body(call_of_valid, [first.get(id(r), r) for r in results])
    ignored = (~valid).nonzero().squeeze(1)
    for result, fill in by_token:
        spread(result, indices)
        result.index_fill_(0, ignored, fill)


def spread(rows: Tensor, indices: Tensor) -> None:
    """Moves row k to row indices[k] >= k, in place. It goes from the last to the first, so no row is overwritten before
    it moves.
    """
    step = max(SPREAD_BYTES // max(rows[0].numel() * rows.element_size(), 1), 1)
    for start in reversed(range(0, len(indices), step)):
        to = indices[start : start + step]
        rows.index_copy_(0, to, rows[start : start + len(to)].clone())


def with_zeroed_rows(body: Body, call: Arguments, results: Results, fills: Fills, ignored: Tensor) -> None:
    def zeroed(name: str, value: Any) -> Any:
        if name not in MATRICES or not isinstance(value, Tensor):
            return value
        fill = MATRICES[name]
        return RowsByChunk(
            value, value.shape[0], lambda rows: value[rows].masked_fill(ignored[rows, None], fill), ignored=ignored
        )

    body(call.changed(zeroed), results)
    for result, fill in zip(results, fills):
        # Rows of grad_input are already 0, as zeros times linear_weight. An lse_pair, (N, 2), becomes the user's lse;
        # that of a divergence stays the one of its row of zeros, which backward reads.
        pair = result.shape[1:] == (2,) and "target" in call.index
        if fill is not None and len(result) and (result.dim() == 1 or pair):
            result.masked_fill_(ignored[:, None] if pair else ignored, fill)
