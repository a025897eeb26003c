"""linear_cross_entropy on DTensors: local tensors out, the registered operators on them, a DTensor back.

    input, target ...  --redistribute-->  local (N, D), (N,)  --tokens sharded-->      entry on this rank's tokens
                                                              --vocabulary sharded-->  this rank's classes
    denominator        --all_reduce of one number, over the ranks that share the tokens
    loss               <--all_reduce of one number--  sum over this rank's tokens / denominator

The result is Replicate on every mesh dimension for a scalar; for reduction="none" it is sharded as the tokens are.
"""

from typing import cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate

from flce_ops.distributed import one_pass
from flce_ops.distributed.layout import Layout, check_plain_target, layout_of, splits
from flce_ops.distributed.local import localize, localize_head, localize_per_slot
from flce_ops.distributed.sparse_seed import sparse_of_rank
from flce_ops.distributed.vocab_parallel import vocab_parallel_losses
from flce_ops.entry.arguments import check_arguments
from flce_ops.entry.plain import OP, losses_from_forward, one_pass_of, token_losses
from flce_ops.entry.schemas import CrossEntropy, CrossEntropyMetrics
from flce_ops.entry.sparse_gradient import OVER_SHARDS, check_sparse_gradient, refuse_sparse_gradient
from flce_ops.entry.weighted import weighted_loss, weighted_losses
from flce_ops.entry.weightless import without_weightless
from flce_ops.math.options import Operands, Statistics, TokenStatistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import (
    accuracy_of,
    count_right_and_valid,
    mean_denominator,
    nan_for_nothing,
    row_factor,
    target_is_argmax,
    weighted_sum,
)
from flce_ops.ops.autocast import autocast_head

# N tokens of this rank, D hidden, V vocabulary, v of them on this rank


def dtensor_composite(call: CrossEntropy, asked: Statistics) -> tuple[DTensor, TokenStatistics]:
    """flce_ops.entry.plain.loss_and_statistics when an argument is a DTensor.

    All of them are, or plain tensors that are the same on every rank.
    """
    others = ("target", "linear_bias", "weight", "token_weight", "normalizer", "target_weight")
    layout = layout_of(call.input, call.linear_weight, **{name: getattr(call, name) for name in others})
    call.sparse = sparse_of_rank(layout, call.sparse)
    check_plain_target(call.target, call.input)
    autocast_head(call)
    check_arguments(call)
    check_sparse_gradient(OP, call)
    if call.gradient_class_order is not None:
        refuse_sparse_gradient(OP, call, "of DTensors with gradient_class_order")
    if call.sparse.gradient_mode == "tiles" and layout.splits_vocabulary:
        refuse_sparse_gradient(OP, call, "of mode 'tiles' over a sharded vocabulary")
    reduction, num_classes, shape = call.reduction, call.linear_weight.shape[0], call.input.shape[:-1]
    tokens_shape, (input, linear_weight, target, linear_bias) = localize_head(
        layout, call.input, call.linear_weight, call.target, call.linear_bias
    )
    accumulate = accumulation_dtype(input.dtype)
    weight = localize(layout, call.weight, layout.replicated)
    token_weight = localize(layout, call.token_weight, layout.tokens)
    number_gradient = layout.placements(tokens=Partial())
    normalizer = localize(layout, call.normalizer, layout.replicated, gradient=number_gradient)
    if call.target_weight is not None:
        call.target_weight = localize_per_slot(layout, call.target_weight, tokens_shape)
    problem = token_losses(call, Operands(input, linear_weight, target, linear_bias, weight), asked)
    problem = problem._replace(target_weight=call.target_weight, sparse=call.sparse)
    valid = problem.valid
    denominator = denominator_over_tokens(
        layout, reduction, normalizer, valid, accumulate, target, problem.denominator_weight
    )
    token_weight = None if token_weight is None else token_weight.reshape(-1).to(accumulate)

    if layout.splits_vocabulary:
        factor = row_factor(valid, token_weight, denominator, accumulate)
        problem = without_weightless(problem, token_weight, factor, num_classes)
        if reduction != "none" and one_pass.applies(layout, problem, num_classes):
            local_loss, losses, statistics = one_pass.loss(layout, problem, num_classes, factor)
        else:
            refuse_sparse_gradient(OP, call, OVER_SHARDS)
            losses, statistics = vocab_parallel_losses(layout, problem, num_classes)
            local_loss = losses * factor if reduction == "none" else (losses * factor).sum()
        total = None if reduction == "none" else weighted_sum(valid, token_weight, losses)
    elif reduction == "none":
        local_loss, statistics = weighted_losses(problem, valid, token_weight, losses_from_forward)
    else:
        with_grad = one_pass_of(problem)
        local_loss, total, statistics = weighted_loss(
            problem, valid, token_weight, denominator, losses_from_forward, with_grad
        )
    statistics = statistics.changed(lambda local: per_token(layout, local.reshape(tokens_shape), shape))
    if reduction != "none":
        return quotient_over_tokens(layout, local_loss, total, denominator), statistics
    return per_token(layout, local_loss.reshape(tokens_shape), shape), statistics


def dtensor_composite_metrics(call: CrossEntropyMetrics) -> tuple[Tensor, ...]:
    """flce_ops.entry.cross_entropy.composite_metrics when an argument is a DTensor."""
    call.target = target_beside_tokens(call.input, call.linear_weight, call.target)
    target = call.target
    loss, statistics = dtensor_composite(call, call.statistics)
    top1: tuple[DTensor | None, DTensor | None] = (None, None)
    if statistics.argmax is not None:
        top1 = accuracy_and_top1(cast(DTensor, statistics.argmax), target, call.ignore_index)
    local = loss.to_local()
    return loss, *(local.new_zeros(0) if result is None else result for result in (*top1, *statistics))


def denominator_over_tokens(
    layout: Layout,
    reduction: str,
    normalizer: Tensor | None,  # ()
    valid: Tensor,  # (N,)
    dtype: torch.dtype,
    target: Tensor,  # (N,)
    weight: Tensor | None,  # (V,)
) -> Tensor | None:  # ()
    """denominator_of_all where the tokens are those of all ranks; None for "none", too."""
    if reduction == "none":
        return None
    denominator = mean_denominator(reduction, normalizer, valid, dtype, target, weight)
    if denominator is None or normalizer is not None:
        return denominator
    denominator = sum_over_tokens(layout, denominator).to_local()
    return denominator if weight is None else nan_for_nothing(denominator)


def per_token(layout: Layout, local: Tensor, shape: torch.Size) -> DTensor:  # (...), sharded as the tokens are
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, layout.mesh, layout.tokens, run_check=False, shape=shape, stride=stride)


def target_beside_tokens(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:  # (...) -> (...)
    """A target DTensor in the placements that its tokens are needed in, so that it moves once for loss and accuracy."""
    layout = layout_of(input, linear_weight)
    fits = target.shape == input.shape[:-1]  # what does not is refused by name later
    if isinstance(target, DTensor) and target.device_mesh == layout.mesh and fits:
        return target.redistribute(layout.mesh, layout.tokens)
    return target


def accuracy_and_top1(argmax: DTensor, target: Tensor, ignore_index: int) -> tuple[DTensor, DTensor]:  # (), (...)
    """The first of all ranks' tokens, on every rank: one all_reduce of two counts where the tokens are sharded."""
    mesh, tokens = argmax.device_mesh, argmax.placements
    everywhere = (Replicate(),) * mesh.ndim
    if not isinstance(target, DTensor):
        target = DTensor.from_local(target, mesh, everywhere, run_check=False)
    own = target.redistribute(mesh, tokens).to_local()
    is_top1 = target_is_argmax(argmax.to_local(), own, ignore_index)
    counts = count_right_and_valid(is_top1, own, ignore_index)
    shares = [Partial() if splits(placement) else Replicate() for placement in tokens]
    counts = DTensor.from_local(counts, mesh, shares, run_check=False).redistribute(mesh, everywhere)
    accuracy = DTensor.from_local(accuracy_of(counts.to_local()), mesh, everywhere, run_check=False)
    shape, stride = argmax.shape, argmax.stride()
    return accuracy, DTensor.from_local(is_top1, mesh, tokens, run_check=False, shape=shape, stride=stride)


def sum_over_tokens(layout: Layout, local: Tensor) -> DTensor:  # () -> ()
    """Sum of one number per rank over the ranks that share the tokens, on every rank."""
    return SumOverTokens.apply(layout, local)


def quotient_over_tokens(
    layout: Layout, local_loss: Tensor | None, local_total: Tensor, denominator: Tensor | None
) -> DTensor:  # () each
    """flce_ops.math.reduction.quotient of all ranks' tokens: their sums are added before they are divided."""
    return SumOverTokens.apply(layout, local_loss, local_total, denominator)


class SumOverTokens(Function):
    """Partial to Replicate. Backward can be differentiated: each rank's use of the gradient is a part of a sum.

    The sum is that of `total`, divided by `denominator`, where they are given; the gradient is that of `local`'s sum.
    The division is of local tensors: torch 2.13 cannot compile a graph that divides DTensors here.
    """

    @staticmethod
    def forward(
        ctx, layout: Layout, local: Tensor, total: Tensor | None = None, denominator: Tensor | None = None
    ) -> DTensor:
        ctx.layout = layout
        partial = layout.placements(tokens=Partial())
        part = (local if total is None else total).detach()
        summed = DTensor.from_local(part, layout.mesh, partial, run_check=False)
        summed = summed.redistribute(layout.mesh, layout.replicated)
        if denominator is None:
            return summed
        quotient = summed.to_local() / denominator.detach()
        return DTensor.from_local(quotient, layout.mesh, layout.replicated, run_check=False)

    @staticmethod
    def backward(ctx, grad: DTensor):
        layout = ctx.layout
        local = localize(layout, grad, layout.replicated, gradient=layout.placements(tokens=Partial()))
        return None, local, None, None
