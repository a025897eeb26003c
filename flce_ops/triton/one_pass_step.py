"""Chunks of rows in one pass over the logits: three GEMMs, on one rank or on ranks that share the vocabulary.

    E = exp(z - reference), row sums s              Triton GEMM, the exponentials rounded once     exponentials.py
    losses, row factors c, E[i, y_i]                the row finisher the step was given            finish_rows.py
    grad_linear_weight += E.T @ (c input)           cuBLAS                    of few rows:         split_product.py
    grad_input[rows]    = c (E @ linear_weight)     cuBLAS into float32 blocks, one rounding       grad_input.py

The logit gradient is G = c E by rows: c goes to the (n, D) operands, and E is written once and read by GEMMs only.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flce_ops.math.options import LogitOptions, Operands
from flce_ops.triton.chunks import padded
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.cut import Cut
from flce_ops.triton.exponentials import RowSums, launch_exponentials
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.gemm import Gradients, accumulate
from flce_ops.triton.grad_input import float32_memory, write_grad_input
from flce_ops.triton.lead import Lead, places, scratch_of
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.scale_rows import launch_scale_rows
from flce_ops.triton.set_entries import launch_set_entries
from flce_ops.triton.smoothing import SmoothingTerms
from flce_ops.triton.split_product import SPLIT_AT_MOST, add_split_product

# N tokens, n rows of a chunk, D hidden, V vocabulary (of this rank)

Pieces = list[tuple[slice, Tensor]]  # columns of the vocabulary, (n, columns) of E
# What the rows of a chunk make, and their argmax if it is asked for. Between ranks the sums are exchanged here.
FinishRows = Callable[[Tokens, RowSums], tuple[FinishedRows, Tensor | None]]


def tokens_of(
    operands: Operands,
    logit_options: LogitOptions,
    target_weight: Tensor | None,  # (N,) float32
    row_scale: Tensor,  # (N,)
    losses: Tensor,  # (N,) out
    *,
    ignore_index: int,
    vocab_start: int = 0,
) -> Tokens:
    at_target = launch_reference_logit(operands, logit_options, ignore_index=ignore_index, vocab_start=vocab_start)
    return Tokens(*at_target, operands.target, target_weight, row_scale, losses)


class OnePassStep:
    """What the chunks of a step share."""

    def __init__(
        self,
        operands: Operands,
        logit_options: LogitOptions,
        tokens: Tokens,
        gradients: Gradients,
        argmax: Tensor | None,  # (N,) out
        cut: Cut,
        finish_rows: FinishRows,
        smoothing: SmoothingTerms | None = None,
    ) -> None:
        self.input, self.linear_weight, _, self.linear_bias, _ = operands
        self.logit_options, self.tokens, self.argmax = logit_options, tokens, argmax
        self.grad_input, self.grad_weight, self.bias_sum = gradients
        self.cut, self.finish_rows, self.smoothing = cut, finish_rows, smoothing
        self.grad_weight_acc = self.grad_weight
        if cut.accum_float32 and not cut.recompute:
            self.grad_weight_acc = torch.empty_like(self.grad_weight, dtype=torch.float32)
        self.weight_is_empty = True
        if smoothing is not None and self.grad_weight is not None:
            smoothing.start_weight_gradient(self.grad_weight_acc)
            self.weight_is_empty = False

    def run_chunks(self, chunks: list[slice]) -> None:
        if not chunks:
            return
        count = chunks[0].stop - chunks[0].start
        num_classes, size = self.linear_weight.shape[0], self.input.dtype.itemsize
        exponentials = self.input.new_empty(count, padded(num_classes, size))
        # c input is held in the rows of grad_input, which are written after its last use
        apart = self.input.new_empty(count, self.input.shape[1]) if self.grad_input is None else None
        for rows in chunks:
            pieces = [(slice(0, num_classes), exponentials[: rows.stop - rows.start, :num_classes])]
            finished = self.exponentiate(rows, pieces)
            scaled = self.grad_input[rows] if apart is None else apart[: rows.stop - rows.start]
            self.add_to_weight(rows, pieces, finished, scaled)
            self.write_input(rows, pieces, finished)

    def run_lead(self, lead: Lead) -> None:
        rows = slice(0, lead.rows)
        pieces = list(zip(lead.columns, places(lead, self.grad_weight, self.input.new_empty(lead.workspace_numbers))))
        scratch = scratch_of(lead, self.grad_weight)
        finished = self.exponentiate(rows, pieces, scratch)
        self.write_input(rows, pieces, finished, scratch)  # first, because add_to_weight overwrites E
        later = slice(lead.rows, 2 * lead.rows)
        apart = self.input.new_empty(lead.rows, self.input.shape[1]) if lead.scaled_apart else None
        self.add_to_weight(rows, pieces[::-1], finished, self.grad_input[later] if apart is None else apart)

    def exponentiate(self, rows: slice, pieces: Pieces, scratch: Tensor | None = None) -> FinishedRows:
        """E' into the pieces, the rows' losses, their share of grad_linear_bias."""
        tokens = self.tokens.of(rows)
        sums = launch_exponentials(
            self.input[rows],
            self.linear_weight,
            self.linear_bias,
            None if self.smoothing is None else self.smoothing.class_weight,
            reference_logit=tokens.target_logit.clone(),
            pieces=pieces,
            logit_sum=self.smoothing is not None,
            argmax=self.argmax is not None,
            logit_options=self.logit_options,
            scratch=scratch,
        )
        finished, argmax = self.finish_rows(tokens, sums)
        if self.argmax is not None:
            self.argmax[rows] = argmax
        for cols, piece in pieces:
            launch_set_entries(piece, tokens.column, finished.entry, start=cols.start)
            if self.bias_sum is not None:
                self.bias_sum[cols] += weighted_column_sum(piece, finished.weight_factor)
        return finished

    def add_to_weight(self, rows: slice, pieces: Pieces, finished: FinishedRows, scaled: Tensor) -> None:
        """grad_linear_weight += E'.T @ (c input); `scaled`, (n, D), is memory for c input."""
        if self.grad_weight is None:
            return
        few = self.input.shape[0] <= SPLIT_AT_MOST
        if not few:
            launch_scale_rows(self.input[rows], finished.weight_factor, scaled)
        for cols, piece in pieces:
            out, first = self.grad_weight_acc[cols], self.weight_is_empty
            if few:
                add_split_product(out, piece, self.input[rows], finished.weight_factor, first=first)
            else:
                accumulate(out, piece.T, scaled, first=first)
        self.weight_is_empty = False

    def write_input(self, rows: slice, pieces: Pieces, finished: FinishedRows, memory: Tensor | None = None) -> None:
        """grad_input[rows] = c (E' @ linear_weight) and the residual.

        `memory`, flat float32, is for the product: rows of grad_input that nothing has written, if it is None.
        """
        if self.grad_input is None:
            return
        write_grad_input(
            self.grad_input[rows],
            pieces,
            self.linear_weight,
            self.tokens.column[rows],
            finished.row_factor,
            finished.residual,
            nbytes=self.cut.product_bytes,
            memory=float32_memory(self.grad_input[rows.stop :]) if memory is None else memory,
            copies=self.cut.copies,
            outer=None if self.smoothing is None else self.smoothing.input_terms(rows),
        )

    def finish(self) -> None:
        """grad_linear_weight, rounded; what smoothing takes from grad_linear_bias."""
        if self.grad_weight_acc is not self.grad_weight:
            self.grad_weight.copy_(self.grad_weight_acc)
        if self.bias_sum is not None and self.smoothing is not None:
            self.smoothing.subtract_from_bias(self.bias_sum)
