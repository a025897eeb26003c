"""CUDA kernel of linear_cross_entropy_with_grad: loss and gradients in one pass over the logits, three GEMMs.

For each chunk of n rows, the first of them larger where its exponentials can wait in grad_linear_weight (lead.py):

    E = exp(z - reference), row sums s              Triton GEMM, the exponentials rounded once     exponentials.py
    losses, row factors c, E[i, y_i]                one small kernel                               finish_rows.py
    grad_linear_weight += E.T @ (c input)           cuBLAS                    of few rows:         split_product.py
    grad_input[rows]    = c (E @ linear_weight)     cuBLAS into float32 blocks, one rounding       grad_input.py

The logit gradient is G = c E by rows: c goes to the (n, D) operands, and E is written once and read by GEMMs only.

grad_linear_weight is rounded, read and written once a chunk. cut.py says which tokens go how.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.loss import class_weight_of
from flce_ops.math_options import LossOptions
from flce_ops.readable import copy_bytes
from flce_ops.target_range import check_target_range
from flce_ops.triton.chunks import contiguous, padded
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.cut import Cut, cut_tokens
from flce_ops.triton.exponentials import launch_exponentials
from flce_ops.triton.finish_rows import Rows, finished_rows, launch_finish_rows
from flce_ops.triton.gemm import accumulate
from flce_ops.triton.grad_input import float32_memory, write_grad_input
from flce_ops.triton.lead import Lead, places, scratch_of
from flce_ops.triton.recompute import recompute_step
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.scale_rows import launch_scale_rows
from flce_ops.triton.set_entries import launch_set_entries
from flce_ops.triton.smoothing import SmoothingTerms
from flce_ops.triton.split_product import SPLIT_AT_MOST, add_split_product

# N tokens, n rows of a chunk, D hidden, V vocabulary


def launch_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    row_scale: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: Tensor | None = None,  # ()
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    output_mask: list[bool],
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, row_scale)
    outputs = meta.with_grad_outputs(*operands, output_mask=output_mask, argmax=argmax)
    loss, losses, *_ = outputs
    check_target_range(target, linear_weight.shape[0], ignore_index)
    target, linear_bias, weight, row_scale = contiguous(target, linear_bias, weight, row_scale)
    cut = cut_tokens(input, linear_weight, output_mask, smoothed=bool(label_smoothing), argmax=argmax)
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
    }
    with torch.cuda.device_of(input):
        step = OnePassStep(
            input, linear_weight, target, linear_bias, weight, row_scale, outputs, output_mask, cut, options
        )
        if cut.lead is not None:
            step.run_lead(cut.lead)
        if cut.recompute:
            step.recompute(cut.chunks)
        else:
            step.run_chunks(cut.chunks)
        step.finish()
        torch.sum(row_scale * losses, dim=0, out=loss)
    cut.record(input, linear_weight)
    return outputs


class OnePassStep:
    """What the chunks of a step share."""

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None,
        weight: Tensor | None,
        row_scale: Tensor,
        outputs: tuple[Tensor, ...],
        output_mask: list[bool],
        cut: Cut,
        options: dict,
    ) -> None:
        self.input, self.linear_weight, self.target = input, linear_weight, target
        self.linear_bias, self.weight, self.row_scale = linear_bias, weight, row_scale
        _, self.losses, self.grad_input, self.grad_weight, self.grad_bias, largest = outputs
        self.largest = largest if largest.numel() else None  # argmax, where it is asked for
        self.options = options
        self.want_input, self.want_weight, want_bias = output_mask
        self.bias_sum = torch.zeros_like(self.grad_bias, dtype=torch.float32) if want_bias else None
        logit_scale = options["logit_scale"]
        self.logits = {"softcap": options["softcap"], "logit_scale": logit_scale}
        self.class_weight = None if weight is None else weight.float()
        self.class_weight_sum = None if weight is None else self.class_weight.sum()
        self.target_weight = None if weight is None else class_weight_of(target, weight, torch.float32)
        # a sum over one chunk is rounded once anyway
        self.weight_gradient = (
            torch.empty_like(self.grad_weight, dtype=torch.float32)
            if cut.exact and not cut.recompute
            else self.grad_weight
        )
        self.weight_is_empty = True
        self.product_bytes = cut.product_bytes
        self.smoothing = None
        if cut.recompute and cut.lead is None:
            return
        self.target_logit, self.target_dz_du, self.column = launch_reference_logit(
            input,
            linear_weight,
            target,
            linear_bias,
            ignore_index=options["ignore_index"],
            vocab_start=0,
            **self.logits,
        )
        self.reference = self.target_logit.clone()  # becomes lse in chunks that are rescued
        if options["label_smoothing"]:
            valid_scale = torch.where(target != options["ignore_index"], row_scale, 0.0)
            kappa = options["label_smoothing"] / linear_weight.shape[0]
            if logit_scale is not None:
                kappa = kappa * logit_scale
            self.smoothing = SmoothingTerms(input, linear_weight, self.class_weight, valid_scale, kappa)
            if self.want_weight:
                self.smoothing.start_weight_gradient(self.weight_gradient)
                self.weight_is_empty = False

    def run_chunks(self, chunks: list[slice]) -> None:
        if not chunks:
            return
        count = chunks[0].stop - chunks[0].start
        num_classes, size = self.linear_weight.shape[0], self.input.dtype.itemsize
        exponentials = torch.empty(count, padded(num_classes, size), dtype=self.input.dtype, device=self.input.device)
        # c * input waits in the rows of grad_input, which are written after its last use
        apart = None if self.want_input else self.input.new_empty(count, self.input.shape[1])
        for rows in chunks:
            pieces = [(slice(0, num_classes), exponentials[: rows.stop - rows.start, :num_classes])]
            factors = self.exponentiate(rows, pieces)
            scaled = self.grad_input[rows] if self.want_input else apart[: rows.stop - rows.start]
            self.add_to_weight(rows, pieces, factors, scaled)
            self.write_input(rows, pieces, factors, float32_memory(self.grad_input[rows.stop :]))

    def run_lead(self, lead: Lead) -> None:
        rows = slice(0, lead.rows)
        first = torch.empty(lead.workspace_numbers, dtype=self.input.dtype, device=self.input.device)
        pieces = list(zip(lead.columns, places(lead, self.grad_weight, first)))
        scratch = scratch_of(lead, self.grad_weight)
        factors = self.exponentiate(rows, pieces, scratch)
        self.write_input(rows, pieces, factors, scratch)  # first: grad_linear_weight is about to take E's memory
        later = slice(lead.rows, 2 * lead.rows)
        apart = self.input.new_empty(lead.rows, self.input.shape[1]) if lead.scaled_apart else None
        scaled = self.grad_input[later] if apart is None else apart
        self.add_to_weight(rows, pieces[::-1], factors, scaled)

    def exponentiate(
        self, rows: slice, pieces: list[tuple[slice, Tensor]], scratch: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """E' into the pieces, the rows' losses, their share of grad_linear_bias; row, weight factors and residuals."""
        reference = self.reference[rows]
        row_sums = launch_exponentials(
            self.input[rows],
            self.linear_weight,
            self.linear_bias,
            self.class_weight,
            reference=reference,
            pieces=pieces,
            logit_sum=self.smoothing is not None,
            argmax=self.largest is not None,
            **self.logits,
            scratch=scratch,
        )
        if self.largest is not None:
            self.largest[rows] = row_sums.argmax
        finished = finished_rows(self.losses[rows], self.input.dtype)
        _, entry, row_factor, weight_factor, residual = finished
        launch_finish_rows(
            Rows(
                row_sum=row_sums.exponentials,
                reference_logit=reference,
                target_logit=self.target_logit[rows],
                target_dz_du=None if self.target_dz_du is None else self.target_dz_du[rows],
                logit_sum=row_sums.logits,
                column=self.column[rows],
                target=self.target[rows],
                target_weight=None if self.target_weight is None else self.target_weight[rows],
                row_scale=self.row_scale[rows],
            ),
            finished,
            self.class_weight_sum,
            self.linear_weight.shape[0],
            LossOptions(self.options["label_smoothing"], self.options["z_loss"]),
            logit_scale=self.options["logit_scale"],
            ignore_index=self.options["ignore_index"],
        )
        for cols, piece in pieces:
            launch_set_entries(piece, self.column[rows], entry, start=cols.start)
            if self.bias_sum is not None:
                self.bias_sum[cols] += weighted_column_sum(piece, weight_factor)
        return row_factor, weight_factor, residual

    def add_to_weight(
        self, rows: slice, pieces: list[tuple[slice, Tensor]], factors: tuple[Tensor, Tensor, Tensor], scaled: Tensor
    ) -> None:
        """grad_linear_weight += E'.T @ (c input); `scaled`, (n, D), is memory for c input."""
        if not self.want_weight:
            return
        few = self.input.shape[0] <= SPLIT_AT_MOST
        if not few:
            launch_scale_rows(self.input[rows], factors[1], scaled)
        for cols, piece in pieces:
            out, first = self.weight_gradient[cols], self.weight_is_empty
            if few:
                add_split_product(out, piece, self.input[rows], factors[1], first=first)
            else:
                accumulate(out, piece.T, scaled, first=first)
        self.weight_is_empty = False

    def write_input(
        self,
        rows: slice,
        pieces: list[tuple[slice, Tensor]],
        factors: tuple[Tensor, Tensor, Tensor],
        memory: Tensor,
    ) -> None:
        """grad_input[rows] = c (E' @ linear_weight) and the residual; `memory` (flat float32) for the product."""
        if not self.want_input:
            return
        row_factor, _, residual = factors
        write_grad_input(
            self.grad_input[rows],
            pieces,
            self.linear_weight,
            self.column[rows],
            row_factor,
            residual,
            nbytes=self.product_bytes,
            memory=memory,
            copies=copy_bytes(self.linear_weight),
            outer=None if self.smoothing is None else self.smoothing.input_terms(rows),
        )

    def recompute(self, chunks: list[slice]) -> None:
        """The chunks' tokens with four GEMM passes (recompute.py)."""
        for rows in chunks:
            recompute_step(
                self.input[rows],
                self.linear_weight,
                self.target[rows],
                self.linear_bias,
                self.weight,
                self.row_scale[rows],
                self.losses[rows],
                None if self.largest is None else self.largest[rows],
                self.grad_input[rows] if self.want_input else None,
                self.grad_weight if self.want_weight else None,
                self.bias_sum,
                first=self.weight_is_empty,
                **self.options,
            )

    def finish(self) -> None:
        if self.weight_gradient is not self.grad_weight:
            self.grad_weight.copy_(self.weight_gradient)
        if self.bias_sum is not None:
            if self.smoothing is not None:
                self.smoothing.subtract_from_bias(self.bias_sum)
            self.grad_bias.copy_(self.bias_sum)
