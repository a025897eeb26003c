"""Losses per token when each rank holds some classes: O(N) numbers cross the ranks, never a logit or a weight.

    rank r:   lse_r = logsumexp of its z_ij      t_r = z_iy or 0      s_r = sum of its w_j z_ij

         (1 to 3, N) of every rank                one all_gather
    lse = logsumexp_r lse_r      target_logit = sum_r t_r      logit_sum = sum_r s_r    N numbers each, on every rank

Backward: d lse / d lse_r = exp(lse_r - lse), so each rank takes its own row of the cotangents and nothing is sent; what
remains is the sum of grad_input over ranks, which belongs to the caller's placements.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flce_ops import meta
from flce_ops.distributed.layout import Layout
from flce_ops.distributed.local import localize
from flce_ops.functional import class_weight_of
from flce_ops.loss import loss_terms

# N tokens of this rank, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


def vocab_parallel_losses(
    layout: Layout,
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (v, D)
    target: Tensor,  # (N,), classes of the whole vocabulary
    linear_bias: Tensor | None,  # (v,)
    weight: Tensor | None,  # (V,)
    *,
    num_classes: int,  # V
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
) -> Tensor:  # (N,), the same on every rank of the vocabulary; 0 where ignored
    start, size = layout.vocabulary_range(num_classes)
    smoothed = label_smoothing != 0.0
    if size == 0:
        per_shard = without_classes(input, linear_weight, linear_bias, 2 + smoothed)
    else:
        target_logit, lse, logit_sum = torch.ops.flce.linear_cross_entropy_forward(
            input,
            linear_weight,
            target,
            linear_bias,
            None if weight is None else weight[start : start + size],
            ignore_index=ignore_index,
            logit_sum=smoothed,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_start=start,
            vocab_size=num_classes,
        )
        per_shard = torch.stack([lse, target_logit, logit_sum] if smoothed else [lse, target_logit])
    gathered = gather_shards(layout, per_shard)
    lse = gathered[:, 0].logsumexp(0)
    target_logit = gathered[:, 1].sum(0)
    logit_sum = gathered[:, 2].sum(0) if smoothed else None

    target_weight = weight_sum = None
    if weight is not None:
        target_weight = class_weight_of(target, weight, lse.dtype)
        weight_sum = weight.to(lse.dtype).sum()
    terms = loss_terms(target_weight, weight_sum, num_classes, label_smoothing, z_loss)
    return torch.where(target != ignore_index, terms.loss(target_logit, lse, logit_sum), 0.0)


def gather_shards(layout: Layout, per_shard: Tensor) -> Tensor:  # (k, N) -> (R, k, N)
    """Rows of every shard of the vocabulary; backward hands each rank its own, without communication.

    Mesh dimensions that shard tokens are called Replicate here, so that nothing moves along them.
    """
    shards = DTensor.from_local(
        per_shard.unsqueeze(0), layout.mesh, layout.placements(vocabulary=Shard(0)), run_check=False
    )
    return localize(layout, shards, layout.replicated)


def without_classes(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, rows: int) -> Tensor:  # (k, N)
    """What a rank contributes that got no class (V < R, or ceil-sized chunks used up): lse -inf, sums 0.

    Made from empty slices, so that every argument gets its zero gradient and joins the collectives of backward.
    """
    accumulate = meta.accumulation_dtype(input.dtype)
    zero = input[:, :0].sum(1).to(accumulate) + linear_weight.sum().to(accumulate)
    if linear_bias is not None:
        zero = zero + linear_bias.sum().to(accumulate)
    return torch.stack([zero - torch.inf, *(zero,) * (rows - 1)])
