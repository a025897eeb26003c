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

from flce_ops.distributed.layout import Layout
from flce_ops.distributed.vocab_parallel import vocab_parallel_losses
from flce_ops.math.shards import shard_rows
from flce_ops.ops.autograd import multiply_by_upstream
from flce_ops.ops.paths import gradients_in_the_same_pass
from flce_ops.ops.vocab_parallel import NAME

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


def applies(layout: Layout, operands: tuple[Tensor | None, ...], num_classes: int) -> bool:
    """Whether all ranks take this path: the answer must not depend on the rank."""
    input, linear_weight, _, linear_bias = operands
    if sum(layout.vocabulary) != 1:
        return False
    ranks = layout.mesh.size(layout.vocabulary.index(True))
    every_rank_has_classes = shard_rows(num_classes, ranks) * (ranks - 1) < num_classes
    return every_rank_has_classes and gradients_in_the_same_pass(input, linear_weight, linear_bias)


class VocabParallelWithGrad(Function):
    """loss of the operator, the tokens' losses and argmax, both constants; its gradients wait for the upstream scalar,
    as in flce_ops/ops/autograd.py.
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
