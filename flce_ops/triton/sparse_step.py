"""A one-pass step whose logit gradient is sparse: one GEMM, then lists in place of the other two.

    E, losses, row factors of a chunk                                                              one_pass_step.py
    lists[rows]         = the entries of G = c E that are kept                                      sparse_lists.py
    after the first chunk: are the lists short?                                                    sparse_or_dense.py
    grad_input[rows]    = sum of value linear_weight[class] over a row's list                        gather_sums.py
    after the last chunk of a span
        the lists by class                                                                           class_order.py
        grad_linear_weight (+)= sum of value input[token] over a class's list                        gather_sums.py

Where rows are flat, as a model's are before it is trained, lists are long and GEMMs are faster: those of an exact step
run, whose gradient has the right mean as well. The device decides. The host launches both; either sees the kept tokens
or none, and leaves at once.

A span is as many tokens as fit the workspace with their lists and what orders these: all of them, unless it is small or
the lists are long. The exponentials of a chunk, beside the span's lists, are gone when these are ordered.
"""

import torch
from torch import Tensor

from flce_ops.math.slots import in_columns
from flce_ops.math.sparse_gradient import room_of_row
from flce_ops.meta.arguments import Backward, WithGrad
from flce_ops.support.workspace import matrix_bytes
from flce_ops.triton.chunks import TOKEN_BYTES, rows_that_fit, slices
from flce_ops.triton.class_order import GROUP, launch_class_order, order_bytes
from flce_ops.triton.cut import Cut
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.gather_sums import launch_gather_classes, launch_gather_rows
from flce_ops.triton.gradients import Gradients
from flce_ops.triton.input_gradient import Pieces
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.one_pass_step import FinishRows, OnePassStep, StepTokens
from flce_ops.triton.sparse_lists import Lists, launch_lists
from flce_ops.triton.sparse_or_dense import launch_sparse_or_dense

# N tokens, n rows of a chunk, D hidden, V vocabulary, R room of a row's list

PIECE = 256  # entries of a class beyond which it is cut: 3.0 ms; with 1024 3.1, 128 3.7 (8192x4096x128256)
PIECES_BYTES = 64 << 20  # of their float32 sums
SPARSE_NOTE = "a sparse gradient, dense where its lists are long"
MOST_ENTRIES = 2**31 - 1  # of a span: class_order.py counts in int32


class SparseStep(OnePassStep):
    def __init__(
        self,
        call: WithGrad | Backward,
        kept: Kept,
        per_token: StepTokens,
        gradients: Gradients,
        chunks: list[slice],
        finish_rows: FinishRows,
        room: int,
    ) -> None:
        sums: list[Tensor] = []

        def noting_sums(tokens: Tokens, row_sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
            sums[:] = [row_sums.exponentials]
            return finish_rows(tokens, row_sums)

        cut = Cut(None, chunks, False, 0)
        super().__init__(call.operands, call.logits, kept, per_token, gradients, cut, noting_sums)
        self.sums, self.options, self.room = sums, call.sparse, room
        self.sparse_input, self.sparse_weight = call.sparse.products(call.output_mask)
        self.sparse_total, self.dense_total = kept.order.new_empty(2).unbind()  # kept tokens, or 0

    def run_span(self, span: slice, chunks: list[slice]) -> None:
        n, self.start = span.stop - span.start, span.start
        order = self.kept.order
        self.lists = Lists(order.new_empty(n, self.room, dtype=torch.int64), order.new_empty(n))
        self.run_chunks(chunks)
        if self.sparse_weight:
            self.gather_weight(span)

    def exponentiate(
        self, chunk: slice, rows: Tensor, pieces: Pieces, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        """Lists besides. What comes after is done to the kept tokens of a gradient that is dense."""
        tokens, finished = super().exponentiate(chunk, rows, pieces, scratch)
        ((_, exponentials),) = pieces
        kept, lists = tokens.kept, self.lists_of(chunk)
        first = chunk.start == 0
        of_lists = kept if first else kept._replace(total=self.sparse_total)
        launch_lists(exponentials, self.sums[0], finished, tokens.column, of_lists, self.options, lists)
        if first:
            launch_sparse_or_dense(
                lists, exponentials.shape[1], kept, self.options, self.sparse_total, self.dense_total
            )
        return tokens._replace(kept=kept._replace(total=self.dense_total)), finished

    def add_to_weight(self, tokens: Tokens, rows: Tensor, pieces: Pieces, finished: FinishedRows) -> None:
        super().add_to_weight(tokens if self.sparse_weight else self.of_all(tokens), rows, pieces, finished)

    def write_input(
        self, chunk: slice, tokens: Tokens, pieces: Pieces, finished: FinishedRows, product: Tensor
    ) -> None:
        if not self.sparse_input:
            tokens = self.of_all(tokens)
        else:
            launch_gather_rows(self.lists_of(chunk), self.operands.linear_weight, self.grad_input[chunk])
        super().write_input(chunk, tokens, pieces, finished, product)

    def gather_weight(self, span: slice) -> None:
        out = self.weight_gradient.out
        num_classes, hidden = out.shape
        at_most = pieces_at_most(self.lists.entries.numel(), hidden)
        classes = launch_class_order(self.lists, num_classes, self.kept.of(span), shortest=PIECE, pieces=at_most)
        sums = self.per_token.losses.new_empty(at_most, hidden)
        launch_gather_classes(classes, self.sparse_total, sums, self.operands.input, out, add=span.start > 0)

    def of_all(self, tokens: Tokens) -> Tokens:
        """For a gradient that is to be dense, whatever the lists are."""
        return tokens._replace(kept=tokens.kept._replace(total=self.kept.total))

    def lists_of(self, chunk: slice) -> Lists:
        return self.lists.of(slice(chunk.start - self.start, chunk.stop - self.start))


def run_spans(
    call: WithGrad | Backward, kept: Kept, per_token: StepTokens, gradients: Gradients, finish_rows: FinishRows
) -> list[slice]:
    """The chunks that it takes."""
    input, linear_weight = call.operands[:2]
    (tokens, hidden), num_classes, size = input.shape, linear_weight.shape[0], input.dtype.itemsize
    target = call.operands.target
    room = room_of_row(call.sparse.gradient_threshold, num_classes, in_columns(target).shape[1])
    row_bytes = 0 if gradients.input is not None else hidden * size
    spans = {}
    for span in slices(tokens, span_at_most(tokens, num_classes, room)):
        n = span.stop - span.start
        fitting = rows_that_fit(tokens, num_classes, size, list_bytes(n, room), row_bytes)
        spans[span.start, span.stop] = [slice(span.start + c.start, span.start + c.stop) for c in slices(n, fitting)]
    chunks = [chunk for of_span in spans.values() for chunk in of_span]
    step = SparseStep(call, kept, per_token, gradients, chunks, finish_rows, room)
    for (start, stop), of_span in spans.items():
        step.run_span(slice(start, stop), of_span)
    return chunks


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
