"""CUDA kernel of linear_cross_entropy_with_grad: loss and gradients in one pass over the logits, three GEMMs.

one_pass_step.py says what is done for each chunk of n rows. The first of them is larger where its exponentials can
wait in grad_linear_weight (lead.py). grad_linear_weight is rounded, read and written once a chunk. cut.py says which
tokens go how.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.math.loss import class_weight_of
from flce_ops.math.options import Operands
from flce_ops.meta.arguments import WithGrad, takes
from flce_ops.support.target_range import check_target_range
from flce_ops.triton.chunks import contiguous
from flce_ops.triton.cut import Cut, cut_tokens
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens, launch_finish_rows
from flce_ops.triton.gemm import Gradients, wanted_gradients
from flce_ops.triton.one_pass_step import OnePassStep, tokens_of
from flce_ops.triton.recompute import recompute_step
from flce_ops.triton.row_loss import RowLoss
from flce_ops.triton.smoothing import SmoothingTerms

# N tokens, D hidden, V vocabulary


@takes(WithGrad)
def launch_with_grad(call: WithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.with_grad_outputs(call)
    loss, losses, *grads, columns = outputs
    columns = columns if call.argmax else None
    input, linear_weight, target, linear_bias, weight = call.operands
    check_target_range(target, linear_weight.shape[0], call.ignore_index)
    target, linear_bias, weight, call.row_scale = contiguous(target, linear_bias, weight, call.row_scale)
    call.operands = Operands(input, linear_weight, target, linear_bias, weight)
    smoothed = bool(call.loss.label_smoothing)
    cut = cut_tokens(input, linear_weight, call.output_mask, smoothed=smoothed, argmax=call.argmax)
    with torch.cuda.device_of(input):
        gradients = wanted_gradients(grads, call.output_mask)
        if cut.lead is not None or not cut.recompute:
            one_pass(call, losses, gradients, columns, cut)
        if cut.recompute:
            (rows,) = cut.chunks
            recompute_step(
                call.rows(rows),
                losses[rows],
                gradients._replace(input=None if gradients.input is None else gradients.input[rows]),
                None if columns is None else columns[rows],
                first=cut.lead is None,
            )
        if gradients.bias_sum is not None:
            grads[2].copy_(gradients.bias_sum)
        torch.sum(call.row_scale * losses, dim=0, out=loss)
    cut.record(input, linear_weight)
    return outputs


def one_pass(
    call: WithGrad,
    losses: Tensor,  # (N,) out
    gradients: Gradients,
    argmax: Tensor | None,  # (N,) out
    cut: Cut,
) -> None:
    """The lead chunk, and the others unless they are recomputed."""
    operands, row_scale, ignore_index = call.operands, call.row_scale, call.ignore_index
    input, linear_weight, target, _, weight = operands
    loss_options, logit_options = call.loss, call.logits
    num_classes = linear_weight.shape[0]
    target_weight = class_weight = class_weight_sum = smoothing = None
    if weight is not None:
        target_weight, class_weight = class_weight_of(target, weight, torch.float32), weight.float()
        class_weight_sum = class_weight.sum()
    if loss_options.label_smoothing:
        kappa: float | Tensor = loss_options.label_smoothing / num_classes
        if logit_options.logit_scale is not None:
            kappa = kappa * logit_options.logit_scale
        valid_scale = torch.where(target != ignore_index, row_scale, 0.0)
        smoothing = SmoothingTerms(input, linear_weight, class_weight, valid_scale, kappa)
    row_loss = RowLoss(class_weight_sum, num_classes, loss_options)

    def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
        finished = launch_finish_rows(
            tokens, sums, row_loss, input.dtype, logit_scale=logit_options.logit_scale, ignore_index=ignore_index
        )
        return finished, sums.argmax

    tokens = tokens_of(operands, logit_options, target_weight, row_scale, losses, ignore_index=ignore_index)
    step = OnePassStep(operands, logit_options, tokens, gradients, argmax, cut, finish_rows, smoothing)
    if cut.lead is not None:
        step.run_lead(cut.lead)
    if not cut.recompute:
        step.run_chunks(cut.chunks)
    step.finish()
