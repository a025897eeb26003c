"""A one-pass step whose logit gradient is sparse: one GEMM, then lists in place of the other two.

    E, losses, row factors of a chunk                                                              one_pass_step.py
    of the first chunk: the blocks of classes whose gradient is dense                              sparse_or_dense.py
    lists[rows]         = the entries of G = c E that are kept, of the other classes                sparse_lists.py
    grad_linear_weight += E.T @ (c rows), grad_input[rows] = c (E @ linear_weight): the GEMMs of an exact step, over
                          the dense classes alone                                                    live_tiles.py
    grad_input[rows]   += sum of value linear_weight[class] over a row's list                        gather_sums.py
    after the last chunk of a span
        the lists by class                                                                           class_order.py
        grad_linear_weight (+)= sum of value input[token] over a class's list                        gather_sums.py

A class that many tokens keep is faster by GEMM, and exact then. Where rows are flat, as a model's are before it is
trained, all classes are dense. The device decides and the host launches both, whatever there is for them.

The lists wait in the last rows of grad_linear_weight, which nothing has written, so that chunks are as large as an
exact step's. The classes of those rows are dense only if all are, and then there are no lists.

Where the lists are too long for that, a span is as many tokens as fit the workspace with their lists and what orders
these. The exponentials of a chunk, beside the span's lists, are gone when these are ordered.
"""

import torch
import triton
from torch import Tensor

from flce_ops.math.slots import in_columns
from flce_ops.math.sparse_gradient import room_of_row
from flce_ops.meta.arguments import Backward, WithGrad
from flce_ops.support.workspace import matrix_bytes
from flce_ops.triton.chunks import TOKEN_BYTES, slices
from flce_ops.triton.class_order import GROUP, launch_class_order, order_bytes
from flce_ops.triton.cut import Cut, cut_beside
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.gather_sums import launch_gather_classes, launch_gather_rows
from flce_ops.triton.gradients import Gradients
from flce_ops.triton.input_gradient import Pieces
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.one_pass_step import FinishRows, OnePassStep, StepTokens
from flce_ops.triton.sparse_lists import Lists, launch_lists
from flce_ops.triton.sparse_or_dense import NONE_DENSE, empty_dense, launch_sparse_or_dense

# N tokens, n rows of a chunk, D hidden, V vocabulary, R room of a row's list

PIECE = 256  # entries of a class beyond which it is cut: 3.0 ms; with 1024 3.1, 128 3.7 (8192x4096x128256)
PIECES_BYTES = 64 << 20  # of their float32 sums
MOST_ENTRIES = 2**31 - 1  # of a span: class_order.py counts in int32
LENT = 0.75  # of grad_linear_weight, at most: frequent classes, the first of a tokenizer's, are to be dense


class SparseStep(OnePassStep):
    def __init__(
        self,
        call: WithGrad | Backward,
        kept: Kept,
        per_token: StepTokens,
        gradients: Gradients,
        finish_rows: FinishRows,
        room: int,
        chunks: list[slice],
        borrowed: Tensor | None,  # (N, R) int64, memory of grad_linear_weight for the lists
    ) -> None:
        cut = Cut(None, chunks, False, 0)
        super().__init__(call.operands, call.logits, kept, per_token, gradients, cut, finish_rows)
        self.options, self.room, self.borrowed = call.sparse, room, borrowed
        self.sparse_input, self.sparse_weight = call.sparse.products(call.output_mask)
        self.dense = NONE_DENSE
        if call.sparse.gradient_mode == "unbiased":  # what is to be dropped is dropped, whatever it takes
            self.dense = empty_dense(call.operands.linear_weight.shape[0], kept.order)
            if self.sparse_input:
                self.input_steps = self.dense.steps
            if self.sparse_weight:
                self.weight_gradient.blocks = self.dense.blocks

    def run_span(self, span: slice, cut: Cut) -> None:
        n, self.start, self.cut = span.stop - span.start, span.start, cut
        order = self.kept.order
        entries = order.new_empty(n, self.room, dtype=torch.int64) if self.borrowed is None else self.borrowed
        self.lists = Lists(entries, order.new_empty(n))
        self.run_chunks(cut.chunks)
        if self.sparse_weight:
            self.gather_weight(span)

    def exponentiate(
        self, chunk: slice, rows: Tensor, pieces: Pieces, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        """Lists besides. What a sparse gradient is made of after sees targets of dense classes alone."""
        tokens, finished = super().exponentiate(chunk, rows, pieces, scratch)
        ((_, exponentials),) = pieces
        row_sum, kept = self.row_sum, tokens.kept
        if chunk.start == 0 and self.dense.number is not None:
            threshold, hidden = self.options.gradient_threshold, rows.shape[1]
            lent = 0 if self.borrowed is None else triton.cdiv(self.borrowed.nbytes + 16, hidden * rows.itemsize)
            launch_sparse_or_dense(exponentials, row_sum, kept, threshold, hidden, self.dense, lent=lent)
        lists = self.lists_of(chunk)
        of_dense = launch_lists(exponentials, row_sum, finished, tokens.column, kept, self.options, lists, self.dense)
        self.column = tokens.column
        return tokens._replace(column=of_dense), finished

    def add_to_weight(self, tokens: Tokens, rows: Tensor, pieces: Pieces, finished: FinishedRows) -> None:
        if self.dense.number is not None or not self.sparse_weight:
            tokens = tokens if self.sparse_weight else tokens._replace(column=self.column)
            super().add_to_weight(tokens, rows, pieces, finished)

    def write_input(
        self, chunk: slice, tokens: Tokens, pieces: Pieces, finished: FinishedRows, product: Tensor
    ) -> None:
        has_dense = self.dense.number is not None
        if has_dense or not self.sparse_input:
            tokens = tokens if self.sparse_input else tokens._replace(column=self.column)
            super().write_input(chunk, tokens, pieces, finished, product)
        if self.sparse_input:
            table, out = self.operands.linear_weight, self.grad_input[chunk]
            launch_gather_rows(self.lists_of(chunk), table, out, add=has_dense)

    def gather_weight(self, span: slice) -> None:
        out = self.weight_gradient.out
        num_classes, hidden = out.shape
        at_most = pieces_at_most(self.lists.entries.numel(), hidden)
        classes = launch_class_order(self.lists, num_classes, self.kept.of(span), shortest=PIECE, pieces=at_most)
        sums = self.per_token.losses.new_empty(at_most, hidden)
        table, add = self.operands.input, span.start > 0
        launch_gather_classes(classes, self.dense.is_dense, sums, table, out, add=add)

    def lists_of(self, chunk: slice) -> Lists:
        return self.lists.of(slice(chunk.start - self.start, chunk.stop - self.start))


def run_spans(
    call: WithGrad | Backward, kept: Kept, per_token: StepTokens, gradients: Gradients, finish_rows: FinishRows
) -> list[slice]:
    """The chunks that it takes."""
    num_classes, tokens = call.operands.linear_weight.shape[0], kept.order.shape[0]
    slots = in_columns(call.operands.target).shape[1]
    room = room_of_row(call.sparse.gradient_threshold, num_classes, slots)
    _, sparse_weight = call.sparse.products(call.output_mask)  # else GEMMs write it while there are lists
    borrowed = borrowed_lists(gradients.linear_weight if sparse_weight else None, tokens, room)
    spans = slices(tokens, tokens if borrowed is not None else span_at_most(tokens, num_classes, room))
    cuts = [
        cut_beside(
            list_bytes(span.stop - span.start, 0 if borrowed is not None else room),
            span,
            call.operands.linear_weight,
            call.output_mask,
        )
        for span in spans
    ]
    chunks = [chunk for cut in cuts for chunk in cut.chunks]
    step = SparseStep(call, kept, per_token, gradients, finish_rows, room, chunks, borrowed)
    for span, cut in zip(spans, cuts):
        step.run_span(span, cut)
    return chunks


def borrowed_lists(grad_weight: Tensor | None, tokens: int, room: int) -> Tensor | None:  # (N, R) int64
    """The end of grad_linear_weight, where that has room for the lists and the workspace for what orders them."""
    entries = tokens * room
    if grad_weight is None or not grad_weight.is_contiguous() or entries > MOST_ENTRIES:
        return None
    each, fixed = order_bytes(grad_weight.shape[0], room)
    ordering = triton.cdiv(tokens, GROUP.value) * GROUP.value * each + fixed + PIECES_BYTES
    if 8 * entries > LENT * grad_weight.nbytes or ordering > matrix_bytes(tokens, TOKEN_BYTES):
        return None
    numbers = 8 // grad_weight.itemsize  # of an entry
    start = (grad_weight.numel() - numbers * entries) // (2 * numbers) * (2 * numbers)  # on 16 bytes
    return grad_weight.view(-1)[start : start + numbers * entries].view(torch.int64).view(tokens, room)


def pieces_at_most(entries: int, hidden: int) -> int:
    return max(min(PIECES_BYTES // (4 * hidden), 2 * entries // PIECE), 1)


def list_bytes(tokens: int, room: int) -> int:
    return tokens * (8 * room + 4)


def span_at_most(tokens: int, num_classes: int, room: int) -> int:
    """Tokens whose lists fit the workspace with what orders them."""
    each, fixed = order_bytes(num_classes, room)
    left = matrix_bytes(tokens, TOKEN_BYTES) - fixed - PIECES_BYTES
    fitting = min(left // (each + list_bytes(1, room)), MOST_ENTRIES // room)
    return max(fitting // GROUP.value, 1) * GROUP.value
