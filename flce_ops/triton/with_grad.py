"""CUDA kernel of linear_cross_entropy_with_grad: loss and gradients in one pass over the logits, three GEMMs.

one_pass_step.py says what is done for each chunk of n tokens. The first of them is larger where its exponentials can
wait in grad_linear_weight (lead.py). cut.py says which tokens go how; ignored ones cost nothing (kept_tokens.py).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.math.loss import class_weight_of, weight_of_slots
from flce_ops.math.options import TokenStatistics
from flce_ops.math.reduction import Reduction
from flce_ops.meta.arguments import WithGrad
from flce_ops.meta.call import takes
from flce_ops.support.target_range import assert_in_range
from flce_ops.triton.chunks import record_chunks, with_contiguous_vectors
from flce_ops.triton.cut import Cut, cut_tokens
from flce_ops.triton.even_features import with_even_features
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens, launch_finish_rows
from flce_ops.triton.finish_soft_rows import launch_finish_soft_rows
from flce_ops.triton.gradients import finish_gradients, wanted_gradients
from flce_ops.triton.kept_tokens import keep_tokens
from flce_ops.triton.one_pass_step import OnePassStep, StepTokens
from flce_ops.triton.recompute import recompute_step
from flce_ops.triton.replay import repeated
from flce_ops.triton.row_loss import RowLoss
from flce_ops.triton.row_statistics import sum_pairs
from flce_ops.triton.smoothing import SmoothingTerms
from flce_ops.triton.sparse_run import is_sparse, run_sparse, sparse_notes
from flce_ops.triton.sum_losses import launch_sum_losses

# N tokens, D hidden, V vocabulary


@takes(WithGrad)
@with_even_features
def launch_with_grad(call: WithGrad) -> meta.Outputs:
    outputs = meta.outputs(call)
    input, linear_weight, target, *_ = call.operands = with_contiguous_vectors(call.operands)
    if call.reduction.row_scale is not None:
        call.reduction = Reduction(call.reduction.row_scale.contiguous())
    in_range = target.new_empty((), dtype=torch.bool)
    with torch.cuda.device_of(input):
        weights = weights_of(call)
        chunks, notes = repeated(with_grad_step, call, weights, fresh=(in_range, *outputs))
        assert_in_range(in_range, target, linear_weight.shape[0], call.ignore_index)
    record_chunks(call, linear_weight, chunks, *notes)
    return outputs


class Weights(NamedTuple):  # float32; None for 1, 1 and V
    of_target: Tensor | None  # (N,) w_y, or of a soft target (N, K) q_k w_yk
    of_class: Tensor | None  # (V,)
    sum: Tensor | None  # ()


def weights_of(call: WithGrad) -> Weights:
    target, weight = call.operands.target, call.operands.weight
    of_target = of_class = total = None
    if weight is not None:
        of_class = weight.to(torch.float32, copy=True)  # what shares memory is not repeated
        of_target, total = class_weight_of(target, weight, torch.float32), of_class.sum()
    if call.target_weight is not None:
        of_slots = weight_of_slots(target, call.target_weight, call.ignore_index, torch.float32)
        of_target = (of_slots if of_target is None else of_slots * of_target).contiguous()
    return Weights(of_target, of_class, total)


def with_grad_step(
    call: WithGrad,
    weights: Weights,
    in_range: Tensor,  # () bool, out
    *outputs: Tensor,  # of the operator
) -> tuple[list[slice], list[str]]:
    """The chunks it took, and notes on them."""
    loss, losses, *grads = outputs[:5]
    statistics = TokenStatistics.found(call.statistics, outputs[5:])
    operands, reduction, loss_options, logit_options = call.operands, call.reduction, call.loss, call.logits
    input, linear_weight, target, _, _ = operands
    num_classes = linear_weight.shape[0]
    cut = cut_tokens(
        input,
        linear_weight,
        call.output_mask,
        smoothed=bool(loss_options.label_smoothing),
        sum_pairs=sum_pairs(call.statistics),
    )
    kept, place = keep_tokens(target, call.ignore_index, num_classes, in_range)
    gradients = wanted_gradients(grads, call.output_mask)
    target_weight, class_weight, class_weight_sum = weights
    smoothing = None
    row_loss = RowLoss(class_weight_sum, num_classes, loss_options)
    if loss_options.label_smoothing and not cut.recompute:  # which makes it with the rest of G
        smoothing = SmoothingTerms(operands, class_weight, kept, reduction, row_loss, logit_options.logit_scale)

    def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
        launch = launch_finish_rows if target.dim() == 1 else launch_finish_soft_rows
        return launch(tokens, sums, row_loss, input.dtype, logit_scale=logit_options.logit_scale), sums.argmax

    per_token = StepTokens(target_weight, reduction, losses, statistics)
    if is_sparse(call):
        chunks = run_sparse(call, kept, per_token, gradients, finish_rows)
        cut = Cut(None, chunks, False, 0)
    else:
        step = OnePassStep(
            operands, logit_options, kept, per_token, gradients, cut, finish_rows, smoothing, call.ignore_index
        )
        chunks = step.run(partial(recompute_step, call, place, per_token))
    if smoothing is not None and gradients.bias_sum is not None:
        smoothing.add_to_bias(gradients.bias_sum)
    finish_gradients(grads, gradients, kept, place)
    launch_sum_losses(losses, reduction, kept.total, loss)
    return chunks, cut.notes + sparse_notes(call)
