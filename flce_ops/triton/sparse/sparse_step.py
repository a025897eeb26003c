"""A one-pass step whose logit gradient is sparse: one GEMM, then lists instead of the other two.

    E, losses, row factors of a chunk                                                              one_pass_step.py
    in the first chunk: which blocks of classes have a dense gradient                              sparse_or_dense.py
    lists[rows]         = the kept entries of G = c E, in the other blocks                          sparse_lists.py
    grad_linear_weight += E.T @ (c rows), grad_input[rows] = c (E @ linear_weight): the GEMMs of an exact step, over
                          the dense blocks only                                                    gemm/tiles.py
    after the last chunk of a span
        grad_input (+)= sum of value linear_weight[class] over a token's list                       gather_sums.py
        the lists are sorted by class                                                            sparse_or_dense.py
        grad_linear_weight (+)= sum of value input[token] over a class's list                        gather_sums.py

If many tokens keep a class, a GEMM is faster than lists, and the gradient of that class is then exact. If the
probabilities are nearly uniform, as before training, the GEMMs take all classes. The host launches both ways, and the
device decides how much each has to do.

A span is as many tokens as fit the workspace with their lists and the memory that sorts the lists. That is all tokens,
unless the workspace is small or the lists are long. The exponentials of one chunk are in memory beside the span's
lists. Their memory is reused when the lists are sorted.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...math.options import in_columns
from ...math.sparse_gradient import room_of_row
from ...support.workspace import matrix_bytes, reserved
from ..gemm.tiles import matrix_of
from ..rows.valid_tokens import ValidTokens
from ..steps.chunks import MULTIPLE, TOKEN_BYTES, Chunking, best_chunking, problem_of, slices
from ..steps.gradients import ChunkGradient, Gradients
from ..steps.one_pass_step import OnePassStep, StepTokens
from .gather_sums import CLASS_COLUMNS, SPLIT, TOKEN_COLUMNS, Lists, cut_lists, launch_gather_lists
from .sparse_lists import launch_lists
from .sparse_or_dense import NONE_DENSE, Call, SparseRows, empty_dense, launch_class_order, launch_sparse_or_dense

# N tokens, n rows of a chunk, D hidden, V vocabulary, R room of a row's list

SPLITS_BYTES = 64 << 20  # memory for the float32 sums of splits
BLOCK_TOKENS = 32  # tokens whose places in the lists of the classes one program hands out
MOST_ENTRIES = 2**31 - 1  # limit for the lists of a span, because counts are int32


class SparseStep(OnePassStep):
    """A step whose gradient GEMMs cover only the dense classes. The gradients of the other classes come from lists of
    entries, which are made and summed span by span.
    """

    def __init__(
        self, call: Call, valid_tokens: ValidTokens, per_token: StepTokens, gradients: Gradients, chunks: list[slice]
    ) -> None:
        self.options, self.all_gradients = call.sparse, gradients
        self.sparse_input, self.sparse_weight = call.sparse.products(call.output_mask)
        super().__init__(call, valid_tokens, per_token, of_gemms(call, gradients), chunks)
        self.dense, self.seed = NONE_DENSE, None
        if call.sparse.gradient_mode == "unbiased":
            self.seed = call.sparse.gradient_seed
            self.dense = empty_dense(call.operands.linear_weight.shape[0], valid_tokens.order)
            if self.sparse_input:
                self.gemms.input_blocks = self.dense.blocks
            if self.sparse_weight:
                self.gemms.weight_gradient.blocks = self.dense.blocks

    def run_span(self, span: slice, chunking: Chunking, room: int) -> None:
        n, self.start = span.stop - span.start, span.start
        order = self.valid_tokens.order
        self.lists = Lists(order.new_empty(n, room, dtype=torch.int64), order.new_empty(n), room)
        self.run(chunking)
        if self.sparse_input:
            self.gather_input(span)
        if self.sparse_weight:
            self.gather_weight(span)

    def make_gradient(self, chunk: slice, valid_tokens: ValidTokens, rows: Tensor) -> ChunkGradient:
        """Also makes the chunk's lists. The GEMMs of a gradient that has lists only see targets of dense classes."""
        gradient = super().make_gradient(chunk, valid_tokens, rows)
        exponentials, finish = gradient.matrix, gradient.finish
        of_rows = matrix_of(exponentials), self.row_sum, valid_tokens, self.dense
        listed = SparseRows(*of_rows, exponentials.shape[1], self.options.gradient_threshold, self.seed)
        if chunk.start == 0 and self.dense.number is not None:
            launch_sparse_or_dense(listed, rows.shape[1])
        lists = self.lists.of(slice(chunk.start - self.start, chunk.stop - self.start))
        of_dense = launch_lists(listed, finish, lists)
        if self.sparse_weight and gradient.of_targets is not None:
            gradient = gradient._replace(of_targets=(gradient.of_targets[0], of_dense))
        return gradient._replace(finish=finish._replace(column=of_dense)) if self.sparse_input else gradient

    def gather_input(self, span: slice) -> None:
        """Gathers all chunks in one launch, so the GPU waits for the longest lists only once."""
        out, table, add = self.all_gradients.input[span], self.operands.linear_weight, self.dense.number is not None
        splits = splits_at_most(self.lists, table)
        launch_gather_lists(cut_lists(self.lists, splits), table, out, add=add, columns=TOKEN_COLUMNS, splits=splits)

    def gather_weight(self, span: slice) -> None:
        out, table, add = self.all_gradients.linear_weight, self.operands.input, span.start > 0
        splits, order = splits_at_most(self.lists, table), self.valid_tokens.of(span).order
        lists = launch_class_order(self.lists, out.shape[0], rows=BLOCK_TOKENS, splits=splits, order=order)
        is_dense = self.dense.is_dense
        launch_gather_lists(lists, table, out, add=add, columns=CLASS_COLUMNS, splits=splits, is_dense=is_dense)


def of_gemms(call: Call, gradients: Gradients) -> Gradients:
    """Those that GEMMs make. "drop" has no dense classes, whatever time its lists take."""
    if call.sparse.gradient_mode == "drop":
        sparse_input, sparse_weight = call.sparse.products(call.output_mask)
        input, weight = None if sparse_input else gradients.input, None if sparse_weight else gradients.linear_weight
        return gradients._replace(input=input, linear_weight=weight)
    return gradients


def run_spans(call: Call, valid_tokens: ValidTokens, per_token: StepTokens, gradients: Gradients) -> list[slice]:
    """Runs the step and returns its chunks."""
    num_classes, tokens = call.operands.linear_weight.shape[0], valid_tokens.order.shape[0]
    topk = in_columns(call.operands.target).shape[1]
    room = room_of_row(call.sparse.gradient_threshold, num_classes, topk)
    spans = slices(tokens, span_at_most(tokens, num_classes, room))
    chunkings, wanted = [], [gradient is not None for gradient in of_gemms(call, gradients)[:3]]
    for span in spans:  # the chunks of a span are in memory beside its lists
        with reserved(list_bytes(span.stop - span.start, room)):
            found = best_chunking(problem_of(span.stop - span.start, call.operands.linear_weight, wanted))
        moved = [slice(span.start + chunk.start, span.start + chunk.stop) for chunk in found.chunks]
        chunkings.append(replace(found, chunks=moved))
    chunks = [chunk for chunking in chunkings for chunk in chunking.chunks]
    step = SparseStep(call, valid_tokens, per_token, gradients, chunks)
    for span, chunking in zip(spans, chunkings):
        step.run_span(span, chunking, room)
    return chunks


def splits_at_most(lists: Lists, table: Tensor) -> int:  # (T, D)
    return max(min(SPLITS_BYTES // (4 * table.shape[1]), 2 * lists.entries.numel() // SPLIT), 1)


def list_bytes(tokens: int, room: int) -> int:
    return tokens * (8 * room + 4)


def span_at_most(tokens: int, num_classes: int, room: int) -> int:
    """Tokens whose lists fit the workspace, together with the lists of the classes and the table that sorts them."""
    each = list_bytes(1, room) + 8 * room + 4 * num_classes // BLOCK_TOKENS
    left = matrix_bytes(tokens, TOKEN_BYTES) - 16 * num_classes - SPLITS_BYTES
    fitting = min(left // each, MOST_ENTRIES // room)
    return max(fitting // MULTIPLE, 1) * MULTIPLE
