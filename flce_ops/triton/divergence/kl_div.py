"""CUDA implementations of linear_kl_div's three operators. All three run the step in kl_div_step.py.

forward      row sums, no G
with_grad    row sums and G
backward     G, from the numbers of each row that forward returned
"""

import torch
from torch import Tensor

from ... import meta
from ...math.reduction import Reduction
from ...meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from ...meta.call import takes
from ..gemm.padded_features import with_padded_features
from ..rows.sum_losses import launch_sum_losses
from ..rows.valid_tokens import ValidTokens, compact_tokens
from ..steps.chunks import contiguous, record_chunks
from ..steps.gradients import Gradients, finish_gradients, wanted_gradients
from .divergence_rows import RowResults, RowScale
from .kl_div_step import KlDivStep

# N tokens

NO_GRADIENTS = Gradients(None, None, None)


@takes(KlDivForward)
@with_padded_features
def launch_kl_div_forward(call: KlDivForward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.outputs(call)
    with torch.cuda.device_of(call.operands.input):
        results = RowResults(*(out if out.numel() else None for out in outputs))
        valid_tokens, _ = prepared(call)
        chunks = KlDivStep(call.operands, call.options, valid_tokens, NO_GRADIENTS, results).run()
    record_chunks(call, call.operands.linear_weight, chunks)
    return outputs


@takes(KlDivWithGrad)
@with_padded_features
def launch_kl_div_with_grad(call: KlDivWithGrad) -> tuple[Tensor, ...]:
    outputs = meta.outputs(call)
    call.row_scale = call.row_scale.contiguous()
    loss, divergence, *grads = outputs
    with torch.cuda.device_of(call.operands.input):
        valid_tokens, place = prepared(call)
        gradients = wanted_gradients(grads, call)
        scale = RowScale(call.row_scale, call.options.logit_scale)
        chunks = KlDivStep(call.operands, call.options, valid_tokens, gradients, RowResults(divergence), scale).run()
        finish_gradients(grads, gradients, valid_tokens, place, call)
        launch_sum_losses(divergence, Reduction(call.row_scale), valid_tokens.total, loss)
    record_chunks(call, call.operands.linear_weight, chunks)
    return outputs


@takes(KlDivBackward)
@with_padded_features
def launch_kl_div_backward(call: KlDivBackward) -> meta.Gradients:
    outputs = meta.outputs(call)
    call.grad, call.shift, call.teacher_shift, call.student_kl, call.divergence = contiguous(
        call.grad, call.shift, call.teacher_shift, call.student_kl, call.divergence
    )
    of_rows = (numbers if numbers.numel() else None for numbers in (call.shift, call.teacher_shift, call.student_kl))
    known, scale = RowResults(call.divergence, *of_rows), RowScale(call.grad, call.options.logit_scale)
    with torch.cuda.device_of(call.operands.input):
        valid_tokens, place = prepared(call)
        gradients = wanted_gradients(outputs, call)
        chunks = KlDivStep(call.operands, call.options, valid_tokens, gradients, RowResults(), scale, known).run()
        finish_gradients(outputs, gradients, valid_tokens, place, call)
    record_chunks(call, call.operands.linear_weight, chunks)
    return outputs


def prepared(call: KlDivForward | KlDivWithGrad | KlDivBackward) -> tuple[ValidTokens, Tensor]:
    """Makes the call's vectors contiguous. Returns the tokens for which `valid` is not 0, and each token's place."""
    operands, valid = call.operands, call.operands.valid
    linear_bias, teacher_bias = contiguous(operands.linear_bias, operands.teacher_bias)
    if valid is None:
        valid = torch.ones(operands.input.shape[0], dtype=torch.bool, device=operands.input.device)
    valid = valid.contiguous()
    call.operands = operands._replace(linear_bias=linear_bias, teacher_bias=teacher_bias, valid=valid)
    return compact_tokens(valid.view(torch.uint8), 0, operands.linear_weight.shape[0])
