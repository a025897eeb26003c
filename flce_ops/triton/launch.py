"""The CUDA kernels of the operators: chunks of rows, Triton for the logits, cuBLAS for the two gradient GEMMs.

with_grad, for each chunk of n rows:

    E  = exp(z - reference), row sums s                  Triton GEMM, exponentials rounded once    (references.py)
    c, losses, E[i, y_i] -= s_i f_i / L_i                one small kernel                          (rows.py)
    grad_linear_weight += E.T @ (c input)                cuBLAS
    grad_input[rows]    = c (E @ linear_weight)          cuBLAS into float32, then one rounding

Label smoothing adds -a_i eps/V w_j to every G_ij: a rank-1 matrix, whose products with linear_weight and input are two
vectors (see `SmoothingTerms`), so E stays as it is.
"""

import math

import torch
import triton
from torch import Tensor

from flce_ops import meta, reference
from flce_ops.path import Path, record_path
from flce_ops.target_range import check_target_range
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.logits_gemm import fits_tma, launch_logits_gemm
from flce_ops.triton.references import launch_exponentials
from flce_ops.triton.rows import launch_finish_rows, launch_reference_logit
from flce_ops.triton.tiles import tiles_for
from flce_ops.workspace import get_workspace

# N tokens, n rows of a chunk, D hidden, V vocabulary, T tiles along the vocabulary

LOG2E = math.log2(math.e)
ROWS_MULTIPLE = 128


def rows_per_chunk(op: str, input: Tensor, linear_weight: Tensor, row_bytes: int) -> int:
    rows = get_workspace() // row_bytes // ROWS_MULTIPLE * ROWS_MULTIPLE
    rows = min(max(rows, ROWS_MULTIPLE), input.shape[0])
    tma = tiles_for(input, linear_weight).tma and fits_tma(input) and fits_tma(linear_weight)
    reason = f"{input.dtype} on {input.device.type}, {'TMA' if tma else 'pointer'} tiles"
    record_path(Path(op, "triton", reason, rows, -(-input.shape[0] // rows)))
    return rows


def vocab_tiles(input: Tensor, linear_weight: Tensor) -> int:
    return triton.cdiv(linear_weight.shape[0], tiles_for(input, linear_weight).block_v)


def padded(columns: int, dtype: torch.dtype) -> int:
    """Columns of a row that starts on 16 bytes, as TMA and cuBLAS want it."""
    multiple = 16 // dtype.itemsize
    return -(-columns // multiple) * multiple


def launch_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_sum: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight)
    target_logit, lse, sums = meta.forward_outputs(*operands, logit_sum=logit_sum)
    check_target_range(target, linear_weight.shape[0] if vocab_size is None else vocab_size, ignore_index)
    tiles = vocab_tiles(input, linear_weight)
    row_bytes = tiles * 4 * (2 + logit_sum)
    rows_at_a_time = min(
        FORWARD_ROWS, rows_per_chunk("linear_cross_entropy_forward", input, linear_weight, row_bytes)
    )
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    with torch.cuda.device_of(input):
        target_logit2, hit = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=vocab_start, **logits
        )
        class_weight = weight.float() if weight is not None and logit_sum else None
        reference2 = target_logit2.clone()
        for start in range(0, input.shape[0], rows_at_a_time):
            rows = slice(start, start + rows_at_a_time)
            row_sum, sums2 = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                reference=reference2[rows],
                out=None,
                logit_sum=logit_sum,
                tile_columns=tiles_for(input, linear_weight).block_v,
                **logits,
            )
            lse[rows] = (reference2[rows] + row_sum.log2()) / LOG2E
            if logit_sum:
                sums[rows] = sums2 / LOG2E
        target_logit.copy_(torch.where(hit.bool(), target_logit2 / LOG2E, 0.0))
    return target_logit, lse, sums


# Rows whose partial sums are held at a time without gradients: 4096 rows of 501 tiles are 16 MiB (V = 128256).
FORWARD_ROWS = 4096


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
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, row_scale)
    loss, losses, *grads = meta.with_grad_outputs(*operands, output_mask=output_mask)
    num_classes, hidden = linear_weight.shape
    check_target_range(target, num_classes, ignore_index)
    want_input, want_weight, want_bias = output_mask
    columns = padded(num_classes, input.dtype)
    size = input.dtype.itemsize
    tiles = vocab_tiles(input, linear_weight)
    row_bytes = columns * size + tiles * 4 * (2 + bool(label_smoothing))
    row_bytes += hidden * (4 * want_input + size * (want_weight and not want_input))
    step = rows_per_chunk("linear_cross_entropy_with_grad", input, linear_weight, row_bytes)
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    with torch.cuda.device_of(input):
        target_logit, _ = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=0, **logits
        )
        class_weight = None if weight is None else weight.float()
        weight_sum = None if weight is None else class_weight.sum()
        valid_scale = torch.where(target != ignore_index, row_scale, 0.0)
        exponentials = torch.empty(step, columns, dtype=input.dtype, device=input.device)
        row_factor = torch.empty(step, dtype=torch.float32, device=input.device)
        scratch = None if want_input or not want_weight else torch.empty(step, hidden, dtype=input.dtype, device=input.device)
        bias_sum = torch.zeros(num_classes, dtype=torch.float32, device=input.device) if want_bias else None
        smoothing = None
        if label_smoothing:
            smoothing = SmoothingTerms(
                input, linear_weight, class_weight, valid_scale, label_smoothing * logit_scale / num_classes
            )
        for start in range(0, input.shape[0], step):
            rows = slice(start, min(start + step, input.shape[0]))
            count = rows.stop - rows.start
            chunk = exponentials[:count, :num_classes]
            factor = row_factor[:count]
            reference2 = target_logit[rows].clone()
            row_sum, logit_sum = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                reference=reference2,
                out=chunk,
                logit_sum=bool(label_smoothing),
                tile_columns=tiles_for(input, linear_weight).block_v,
                **logits,
            )
            launch_finish_rows(
                row_sum=row_sum,
                reference=reference2,
                target_logit=target_logit[rows],
                target=target[rows],
                row_scale=row_scale[rows],
                class_weight=class_weight,
                weight_sum=weight_sum,
                logit_sum=logit_sum,
                out=chunk,
                losses=losses[rows],
                row_factor=factor,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                **logits,
            )
            grad_input, grad_weight, _ = grads
            if want_bias:
                bias_sum += weighted_column_sum(chunk, factor)
            if want_weight:
                # grad_input's rows hold c * input until they are overwritten below
                scaled = grad_input[rows] if want_input else scratch[:count]
                torch.mul(input[rows], factor[:, None], out=scaled)
                if start == 0:
                    torch.mm(chunk.T, scaled, out=grad_weight)
                else:
                    grad_weight.addmm_(chunk.T, scaled)
            if want_input:
                product = mm_float32(chunk, linear_weight).mul_(factor[:, None])
                if smoothing is not None:
                    smoothing.subtract_from_input(product, rows)
                grad_input[rows] = product
        if want_bias:
            if smoothing is not None:
                smoothing.subtract_from_bias(bias_sum)
            grads[2].copy_(bias_sum)
        if want_weight and smoothing is not None:
            smoothing.subtract_from_weight(grads[1])
        torch.sum(row_scale * losses, dim=0, out=loss)
    return loss, losses, *grads


class SmoothingTerms:
    """Products of the rank-1 matrix  K_ij = kappa a_i w_j  that label smoothing subtracts from G, kappa = eps logit_scale / V.

    K @ linear_weight = kappa a (w @ linear_weight)      K.T @ input = kappa w (a @ input)      K.T @ 1 = kappa w sum(a)
    """

    def __init__(self, input: Tensor, linear_weight: Tensor, class_weight: Tensor | None, row_scale: Tensor, kappa: float):
        self.kappa = kappa
        self.class_weight = class_weight
        self.row_scale = row_scale
        self.weight_columns = weighted_column_sum(linear_weight, class_weight)  # (D,)
        self.input_columns = weighted_column_sum(input, row_scale)  # (D,)

    def subtract_from_input(self, grad_input: Tensor, rows: slice) -> None:
        grad_input.addr_(self.row_scale[rows], self.weight_columns, alpha=-self.kappa)

    def subtract_from_weight(self, grad_weight: Tensor) -> None:
        columns = self.input_columns.to(grad_weight.dtype)
        if self.class_weight is None:
            grad_weight.sub_(columns, alpha=self.kappa)
        else:
            grad_weight.addr_(self.class_weight.to(grad_weight.dtype), columns, alpha=-self.kappa)

    def subtract_from_bias(self, grad_bias: Tensor) -> None:
        total = self.kappa * self.row_scale.sum()
        grad_bias -= total if self.class_weight is None else total * self.class_weight


def mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with cuBLAS's float32 accumulator as the result."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def launch_backward(
    grad_target_logit: Tensor | None,
    grad_lse: Tensor | None,
    grad_logit_sum: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_start: int = 0,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """lse is known, so G leaves the epilogue finished; only the target's entry, which cancels, is computed apart."""
    operands = (input, linear_weight, target, linear_bias, weight, lse)
    grads = meta.backward_outputs(grad_target_logit, grad_lse, grad_logit_sum, *operands, output_mask=output_mask)
    grad_input, grad_weight, grad_bias = grads
    want_input, want_weight, want_bias = output_mask
    num_classes = linear_weight.shape[0]
    columns = padded(num_classes, input.dtype)
    step = rows_per_chunk("linear_cross_entropy_backward", input, linear_weight, columns * input.dtype.itemsize)
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    with torch.cuda.device_of(input):
        target_logit2, hit = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=vocab_start, **logits
        )
        valid, hit, column = reference.target_columns(target, ignore_index, vocab_start, num_classes)
        class_weight = weight.float() if weight is not None and grad_logit_sum is not None else None
        lse2 = lse * LOG2E
        zeros = torch.zeros_like(lse)
        row_factor = zeros if grad_lse is None else torch.where(valid, grad_lse, 0.0)
        sum_factor = None if grad_logit_sum is None else torch.where(valid, grad_logit_sum, 0.0)
        target_gradient = row_factor * torch.exp2(target_logit2 - lse2)
        if grad_target_logit is not None:
            target_gradient += torch.where(hit, grad_target_logit, 0.0)
        if sum_factor is not None:
            target_gradient += sum_factor if class_weight is None else sum_factor * class_weight[column.squeeze(1)]
        if softcap is not None:
            target_gradient *= 1.0 - (target_logit2 / (LOG2E * softcap)).square()
        target_gradient = (target_gradient * logit_scale).to(input.dtype)
        row_factor = row_factor * logit_scale
        sum_factor = None if sum_factor is None else sum_factor * logit_scale
        gradient = torch.empty(step, columns, dtype=input.dtype, device=input.device)
        bias_sum = torch.zeros(num_classes, dtype=torch.float32, device=input.device) if want_bias else None
        for start in range(0, input.shape[0], step):
            rows = slice(start, min(start + step, input.shape[0]))
            chunk = gradient[: rows.stop - rows.start, :num_classes]
            launch_logits_gemm(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                epilogue="gradient",
                reference=lse2[rows],
                row_factor=row_factor[rows],
                sum_factor=None if sum_factor is None else sum_factor[rows],
                out=chunk,
                **logits,
            )
            chunk.scatter_(1, column[rows], target_gradient[rows, None])
            if want_bias:
                bias_sum += weighted_column_sum(chunk, None)
            if want_input:
                torch.mm(chunk, linear_weight, out=grad_input[rows])
            if want_weight:
                if start == 0:
                    torch.mm(chunk.T, input[rows], out=grad_weight)
                else:
                    grad_weight.addmm_(chunk.T, input[rows])
        if want_bias:
            grad_bias.copy_(bias_sum)
    return grads
