"""A one-pass step whose logit gradient is sparse: one GEMM, then lists in place of the other two.

    E, losses, row factors of a chunk                                                              one_pass_step.py
    lists[rows]         = the entries of G = c E that are kept                                      sparse_lists.py
    grad_input[rows]    = sum of value linear_weight[class] over a row's list                        gather_sums.py
    after the last chunk of a span
        the lists by class                                                                           class_order.py
        grad_linear_weight (+)= sum of value input[token] over a class's list                        gather_sums.py

A span is as many tokens as fit the workspace with their lists and what orders these: all of them, unless it is small or
the lists are long. The exponentials of a chunk, beside the span's lists, are gone when these are ordered.
"""

import torch
from torch import Tensor

from flce_ops.math.sparse_gradient import SparseGradient, room_of_row
from flce_ops.meta.arguments import WithGrad
from flce_ops.support.workspace import matrix_bytes
from flce_ops.triton.chunks import TOKEN_BYTES, rows_that_fit, slices
from flce_ops.triton.class_order import GROUP, launch_class_order, order_bytes
from flce_ops.triton.cut import Cut
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.gather_sums import Pieces, launch_gather_classes, launch_gather_rows
from flce_ops.triton.gradients import Gradients
from flce_ops.triton.input_gradient import Pieces as ColumnPieces
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.one_pass_step import FinishRows, OnePassStep, StepTokens
from flce_ops.triton.sparse_lists import Lists, launch_lists

# N tokens, n rows of a chunk, D hidden, V vocabulary, R room of a row's list

PIECE = 256  # entries of a class beyond which it is cut: 3.0 ms; with 1024 3.1, 128 3.7 (8192x4096x128256)
PIECES_BYTES = 64 << 20  # of their float32 sums


class SparseStep(OnePassStep):
    """The chunks of one span; grad_linear_weight is made of its lists."""

    def __init__(self, *args, sparse: SparseGradient, span: slice, room: int, **options) -> None:
        super().__init__(*args, **options)
        self.sparse, self.span = sparse, span
        n, of_rows = span.stop - span.start, self.finish_rows
        device = self.operands.input.device
        self.lists = Lists(
            torch.empty(n, room, dtype=torch.int64, device=device), torch.empty(n, dtype=torch.int32, device=device)
        )

        def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
            self.row_sum = sums.exponentials
            return of_rows(tokens, sums)

        self.finish_rows = finish_rows

    def write_input(
        self, chunk: slice, tokens: Tokens, pieces: ColumnPieces, finished: FinishedRows, product: Tensor
    ) -> None:
        """grad_input from lists, which stay for grad_linear_weight."""
        ((_, exponentials),) = pieces
        lists = self.lists.of(slice(chunk.start - self.span.start, chunk.stop - self.span.start))
        launch_lists(exponentials, self.row_sum, finished, tokens.column, tokens.kept, self.sparse, lists)
        if self.grad_input is not None:
            launch_gather_rows(lists, self.operands.linear_weight, self.grad_input[chunk])


def run_spans(
    call: WithGrad,
    kept: Kept,
    per_token: StepTokens,
    gradients: Gradients,
    finish_rows: FinishRows,
) -> list[slice]:
    """Chunks of the tokens."""
    input, linear_weight = call.operands[:2]
    tokens, num_classes = input.shape[0], linear_weight.shape[0]
    room = room_of_row(call.sparse.gradient_threshold, num_classes)
    chunks = []
    for span in slices(tokens, span_at_most(tokens, num_classes, input.shape[1], room)):
        n = span.stop - span.start
        want_input = gradients.input is not None
        row_bytes = 0 if want_input else input.shape[1] * input.dtype.itemsize
        at_most = rows_that_fit(tokens, num_classes, input.dtype.itemsize, list_bytes(n, room), row_bytes)
        of_span = [slice(span.start + rows.start, span.start + rows.stop) for rows in slices(n, at_most)]
        step = SparseStep(
            call.operands,
            call.logits,
            kept,
            per_token,
            gradients._replace(linear_weight=None),
            Cut(None, of_span, False, 0),
            finish_rows,
            sparse=call.sparse,
            span=span,
            room=room,
        )
        step.run_chunks(of_span)
        if gradients.linear_weight is not None:
            gather_weight(step.lists, kept.of(span), input, gradients.linear_weight, add=span.start > 0)
        chunks += of_span
    return chunks


def gather_weight(lists: Lists, kept: Kept, input: Tensor, grad_weight: Tensor, *, add: bool) -> None:
    """grad_linear_weight of a span's lists."""
    num_classes, hidden = grad_weight.shape
    entries, behind = launch_class_order(lists, num_classes, kept)
    total = torch.diff(behind, prepend=behind.new_zeros(1))
    sums = torch.empty(pieces_at_most(entries.shape[0], hidden), hidden, dtype=torch.float32, device=input.device)
    # sum ceil(total / length) of those with total > length is at most 2 / length of them all
    length = torch.div(2 * behind[-1] + sums.shape[0] - 1, sums.shape[0], rounding_mode="floor").clamp_(min=PIECE)
    number = torch.where(total > length, (total + length - 1) // length, 0)
    pieces = Pieces(length.int(), number.cumsum(0, dtype=torch.int32), sums)
    launch_gather_classes(entries, behind, pieces, input, grad_weight, add=add)


def pieces_at_most(entries: int, hidden: int) -> int:
    return max(min(PIECES_BYTES // (4 * hidden), 2 * entries // PIECE), 1)


def list_bytes(tokens: int, room: int) -> int:
    return tokens * (8 * room + 4)


def span_at_most(tokens: int, num_classes: int, hidden: int, room: int) -> int:
    """Tokens whose lists fit the workspace with what orders them."""
    each, fixed = order_bytes(num_classes, room)
    left = matrix_bytes(tokens, TOKEN_BYTES) - fixed - PIECES_BYTES
    return max(left // (each + list_bytes(1, room)) // GROUP.value, 1) * GROUP.value
