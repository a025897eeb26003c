"""A sharded vocabulary's scalar loss and its gradients in one pass over the logits: 3 GEMM passes instead of 4.

For each chunk of n rows, with this rank's classes:

    E = exp(z - reference)                       the chunk's only GEMM for logits
    (lse_r, t_r, s_r), 2 or 3 numbers a row      all_gather: the one thing that crosses ranks before E can be used
    lse, target_logit, logit_sum, losses         as vocab_parallel.py, on every rank
    grad_linear_weight += G.T @ input            G from E and lse
    grad_input[rows]    = G @ linear_weight      this rank's part of a sum over ranks, left to the caller

Every rank must cut the same chunks: they follow from the largest shard, ceil(V / R) rows, and the workspace, which
therefore has to be the same on all ranks.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.flop_counter import register_flop_formula

from flce_ops import meta
from flce_ops.autograd import multiply_by_upstream
from flce_ops.chunks import product_is_rounded, row_chunks
from flce_ops.compile_cache import keyed
from flce_ops.distributed.layout import Layout
from flce_ops.distributed.vocab_parallel import argmax_of_shards, lse_of_shards, vocab_parallel_losses
from flce_ops.flops import with_grad_flops
from flce_ops.functional import gradients_in_the_same_pass
from flce_ops.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.loss import LossTerms, class_weight_of, loss_terms
from flce_ops.reference import (
    add_target_and_sum,
    apply_slope,
    chunk_logits_with_slope,
    exponentiate_rows,
    target_columns,
    weighted_sum,
)
from flce_ops.target_range import check_target_range
from flce_ops.vendor import made_by_nvidia

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary

NAME = "linear_cross_entropy_vocab_parallel_with_grad"

library = torch.library.Library("flce", "FRAGMENT")
library.define(
    f"{NAME}(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor row_scale, "
    "*, str group, int ranks, SymInt vocab_start, SymInt vocab_size, int ignore_index=-100, float label_smoothing=0.0, "
    "Tensor? z_loss=None, Tensor? softcap=None, Tensor? logit_scale=None, bool[3] output_mask, bool argmax=False) "
    "-> (Tensor loss, Tensor losses, Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias, "
    "Tensor argmax)",
    tags=torch.Tag.pt2_compliant_tag,
)


def outputs(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight, row_scale, **options
):
    """Fake kernel, and allocation of the others. `weight` has all V classes, the other operands v."""
    wanted = {"output_mask": options["output_mask"], "argmax": options.get("argmax", False)}
    return meta.with_grad_outputs(input, linear_weight, target, linear_bias, None, row_scale, **wanted)


def applies(layout: Layout, operands: tuple[Tensor | None, ...], num_classes: int) -> bool:
    """Whether all ranks take this path: the answer must not depend on the rank."""
    input, linear_weight, _, linear_bias = operands
    if sum(layout.vocabulary) != 1:
        return False
    ranks = layout.mesh.size(layout.vocabulary.index(True))
    every_rank_has_classes = shard_rows(num_classes, ranks) * (ranks - 1) < num_classes
    return every_rank_has_classes and gradients_in_the_same_pass(input, linear_weight, linear_bias)


def shard_rows(num_classes: int, ranks: int) -> int:
    """Rows of the largest shard."""
    return -(-num_classes // ranks)


class VocabParallelWithGrad(Function):
    """loss of the operator, the tokens' losses and argmax, both constants; its gradients wait for the upstream scalar,
    as in flce_ops/autograd.py.
    """

    @staticmethod
    def forward(
        ctx, layout, num_classes, options, argmax, input, linear_weight, target, linear_bias, weight, row_scale
    ):
        dim = layout.vocabulary.index(True)
        start, _ = layout.vocabulary_range(num_classes)
        mask = [ctx.needs_input_grad[4], ctx.needs_input_grad[5], ctx.needs_input_grad[7]]
        loss, losses, *grads, largest = getattr(torch.ops.flce, NAME)(
            input,
            linear_weight,
            target,
            linear_bias,
            weight,
            row_scale,
            group=layout.mesh.get_group(dim).group_name,
            ranks=layout.mesh.size(dim),
            vocab_start=start,
            vocab_size=num_classes,
            output_mask=mask,
            argmax=argmax,
            **options,
        )
        ctx.mark_non_differentiable(losses, largest)
        ctx.layout, ctx.num_classes, ctx.options, ctx.mask = layout, num_classes, options, mask
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, linear_weight, target, linear_bias, weight, row_scale, losses, *grads)
        return loss, losses, largest

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return (None,) * 10
        *operands, row_scale, losses, grad_input, grad_weight, grad_bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: saved gradients have no graph
            grads = VocabParallelWithGrad.differentiable_gradients(ctx, operands, row_scale, grad_loss)
        else:
            made = [grad if wanted else None for grad, wanted in zip((grad_input, grad_weight, grad_bias), ctx.mask)]
            leaf = next(operand for operand, need in zip((*operands, row_scale), ctx.needs_input_grad[4:]) if need)
            grads = multiply_by_upstream(made, grad_loss, leaf)
            grads.append(losses * grad_loss if ctx.needs_input_grad[9] else None)
        grad_input, grad_weight, grad_bias, grad_row_scale = grads
        return None, None, None, None, grad_input, grad_weight, None, grad_bias, None, grad_row_scale

    @staticmethod
    def differentiable_gradients(ctx, operands, row_scale, grad_loss) -> list[Tensor | None]:
        # Asking for gradients by the operands is right for local tensors: each comes out of ToLocal and nothing else is
        # made from it, so no path leads from one to another.
        input, linear_weight, _, linear_bias, _ = operands
        losses, _ = vocab_parallel_losses(ctx.layout, *operands, num_classes=ctx.num_classes, **ctx.options)
        leaves = (input, linear_weight, linear_bias, row_scale)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        grads = torch.autograd.grad((row_scale * losses).sum(), wanted, grad_loss, create_graph=True)
        by_leaf = {id(leaf): grad for leaf, grad in zip(wanted, grads)}
        return [by_leaf.get(id(leaf)) for leaf in leaves]


class Exchange:
    """Combines per-shard numbers of a chunk into those of whole rows, and into losses."""

    def __init__(
        self,
        target: Tensor,  # (N,)
        weight: Tensor | None,  # (V,)
        group: str,
        ranks: int,
        vocab_size: int,
        label_smoothing: float,
        z_loss: Tensor | None,  # ()
        dtype: torch.dtype,
    ) -> None:
        self.group, self.ranks = group, ranks
        self.arguments = (vocab_size, label_smoothing, z_loss)
        self.target_weight = None if weight is None else class_weight_of(target, weight, dtype)  # (N,)
        self.weight_sum = None if weight is None else weight.to(dtype).sum()

    def whole_rows(
        self, per_shard: list[Tensor], largest: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """lse, target_logit, logit_sum and argmax (n,) from this rank's two or three, and its (max_logit, argmax).

        Behind lse comes this rank's share of the softmax's denominator. The shares of a row add up to 1 whatever lse is
        rounded to.
        """
        if self.ranks == 1:
            lse, *others = per_shard
            missing = (None,) * (2 - len(others))
            return lse, torch.ones_like(lse), *others, *missing, None if largest is None else largest[1]
        smoothed = len(per_shard) == 3
        numbers = per_shard if largest is None else [*per_shard, *(part.to(per_shard[0].dtype) for part in largest)]
        gathered = self.gather(torch.stack(numbers))
        lse, sums = lse_of_shards(gathered[:, 0]), gathered[:, 1:3].sum(0)
        share = (per_shard[0] - lse).exp() / (gathered[:, 0] - lse).exp().sum(0)
        column = None if largest is None else argmax_of_shards(gathered[:, -2], gathered[:, -1])
        return lse, share, sums[0], sums[1] if smoothed else None, column

    def gather(self, numbers: Tensor) -> Tensor:  # (k, n) -> (R, k, n)
        if self.ranks == 1:
            return numbers[None]
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(numbers, self.ranks, self.group)
        return torch.ops._c10d_functional.wait_tensor(gathered).view(self.ranks, *numbers.shape)

    def terms(self, rows: slice) -> LossTerms:
        target_weight = None if self.target_weight is None else self.target_weight[rows]
        return loss_terms(target_weight, self.weight_sum, *self.arguments)


def aten_kernel(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (v, D)
    target: Tensor,  # (N,)
    linear_bias: Tensor | None,  # (v,)
    weight: Tensor | None,  # (V,)
    row_scale: Tensor,  # (N,)
    *,
    group: str,
    ranks: int,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: Tensor | None = None,  # ()
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    output_mask: list[bool],
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, losses, *grads, largest = outputs(
        input, linear_weight, target, linear_bias, weight, row_scale, output_mask=output_mask, argmax=argmax
    )
    own = linear_weight.shape[0]
    check_target_range(target, vocab_size, ignore_index)
    valid, hit, column = target_columns(target, ignore_index, vocab_start, own)
    accumulate = meta.accumulation_dtype(input.dtype)
    scale = torch.where(valid, row_scale, 0.0).to(accumulate)
    exchange = Exchange(target, weight, group, ranks, vocab_size, label_smoothing, z_loss, accumulate)
    own_weight = None if weight is None else weight[vocab_start : vocab_start + own].to(accumulate)
    matrices = product_is_rounded(input) + (softcap is not None)
    step = rows_beside_gradients(input, shard_rows(vocab_size, ranks), output_mask[1], matrices=matrices)
    gradients = GradientAccumulator(input, linear_weight, tuple(grads), output_mask, step)
    for rows in row_chunks(NAME, input, step):
        logits, slope = chunk_logits_with_slope(input[rows], linear_weight, linear_bias, logit_scale, softcap)
        per_shard = [torch.where(hit[rows], logits.gather(1, column[rows]).squeeze(1), 0.0)]
        if label_smoothing:
            per_shard.append(weighted_sum(logits, own_weight))
        own_largest = None
        if argmax:
            max_logit, own_column = logits.max(1)
            own_largest = (max_logit, own_column + vocab_start)
        row_max, row_sum = exponentiate_rows(logits)
        own_lse = row_max + row_sum.log()
        lse, share, target_logit, logit_sum, column_of_largest = exchange.whole_rows([own_lse, *per_shard], own_largest)
        if argmax:
            largest[rows] = column_of_largest
        terms = exchange.terms(rows)
        losses[rows] = torch.where(valid[rows], terms.loss(target_logit, lse, logit_sum), 0.0)
        # E = exp(z - row_max) becomes exp(z - lse); a bias of -inf may switch off all of this rank's classes
        normalization = torch.where(row_sum > 0.0, share / row_sum, 0.0 * share)
        grad_logits = logits.mul_((scale[rows] * terms.d_lse(lse) * normalization)[:, None])
        add_target_and_sum(
            grad_logits,
            column[rows],
            torch.where(hit[rows], -terms.target_factor * scale[rows], 0.0),
            -terms.smoothing * scale[rows] if label_smoothing else None,
            own_weight,
        )
        gradients.add(rows, apply_slope(grad_logits, slope))
        del logits, grad_logits, slope  # before the next chunk is allocated
    gradients.finish()
    torch.sum(row_scale * losses, dim=0, out=loss)
    return loss, losses, *grads, largest


def cuda_kernel(input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    smoothed = options.get("label_smoothing")
    if not made_by_nvidia() or input.dtype != torch.bfloat16 or input.numel() == 0 or smoothed:
        return aten_kernel(input, *args, **options)
    from flce_ops.distributed.one_pass_triton import launch_vocab_parallel_with_grad

    return launch_vocab_parallel_with_grad(input, *args, **options)


library.impl(NAME, aten_kernel, "CompositeExplicitAutograd")
library.impl(NAME, cuda_kernel, "CUDA")
torch.library.register_fake(f"flce::{NAME}", keyed(outputs), lib=library)
register_flop_formula(getattr(torch.ops.flce, NAME), get_raw=True)(with_grad_flops)  # takes shapes already
