"""A sharded vocabulary's scalar loss and its gradients in one pass over the logits: 3 GEMM passes instead of 4.

For each chunk of n rows, every rank runs this for its own classes:

    E = exp(z - reference)                       the chunk's only GEMM for logits
    lse, target_logit, logit_sum of the shard    all_gather of 2 to 4 numbers a row: the only communication
    lse, target_logit, logit_sum, losses         as in vocab_parallel.py, on every rank
    grad_linear_weight += G.T @ input            G from E and lse
    grad_input[rows]    = G @ linear_weight      this rank's part of a sum over ranks, which the caller adds

All ranks must use the same chunks. Chunks depend on the largest shard, ceil(V / R) rows, and on the workspace, which
must therefore be the same on all ranks.
"""

import torch
from torch import Tensor

from ..math.options import TokenLosses, TokenStatistics
from ..math.reduction import Reduction
from ..meta.arguments import VocabParallelWithGrad
from ..objectives.cross_entropy import losses_of_rows
from ..ops.call_facts import gradients_wanted, options_in_facts, sharding_of
from ..ops.function import OPERANDS
from ..ops.made_in_forward import MadeInForward
from ..ops.paths import gradients_in_the_same_pass
from ..support.holes import refuse_hole
from .layout import Layout
from .vocab_parallel import vocab_parallel_rows

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


def applies(layout: Layout, problem: TokenLosses) -> bool:
    """Whether all ranks take this path. The answer must not depend on the rank."""
    if problem.batch_invariant:  # forward's operator exchanges tiles' numbers, this one shards'
        return False
    known = sharding_of(layout.vocabulary, layout.mesh.shape, layout.num_classes)
    known |= options_in_facts(problem.loss, problem.logits)
    known |= {"topk": problem.operands.target.dim() == 2, "sparse": problem.sparse.gradient_threshold != 0.0}
    title = "a scalar loss over a sharded vocabulary"
    return gradients_in_the_same_pass(problem.operands, title=title, **known)


def loss(layout: Layout, problem: TokenLosses, reduction: Reduction) -> tuple[Tensor, Tensor, TokenStatistics]:
    """Returns the loss () with a gradient, and the tokens' losses and statistics, which are constants."""
    start, _ = layout.vocabulary_range(layout.num_classes)
    call = VocabParallelWithGrad.like(
        problem,
        row_scale=reduction.row_scale,
        **layout.sharing(),
        vocab_start=start,
        output_mask=gradients_wanted(problem.operands),
    )
    loss, losses, _, _, _, *found = VocabParallelFunction.apply(*call.values(), layout)
    return loss, losses, TokenStatistics.found(problem.statistics, found)


class VocabParallelFunction(MadeInForward):
    """The derivative of the operator. `apply` takes the operator's arguments, then the layout."""

    arguments = VocabParallelWithGrad

    @classmethod
    def forward(cls, *values):
        return super().forward(*values[:-1])

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        ctx.layout = inputs[-1]
        super().setup_context(ctx, inputs[:-1], output)

    @classmethod
    def backward(cls, ctx, *cotangents):
        return *super().backward(ctx, *cotangents), None

    @classmethod
    def gradients(cls, ctx, call, saved, grad_loss, *_):
        if not torch.is_grad_enabled():
            return super().gradients(ctx, call, saved, grad_loss)
        if call.sparse.gradient_threshold:
            refuse_hole(cls.called(), "second of a sparse gradient")
        leaves = [*(getattr(call.operands, name) for name in OPERANDS), call.row_scale]
        gradients = differentiable_gradients(ctx.layout, call, leaves, grad_loss)
        return dict(zip((*OPERANDS, "row_scale"), gradients))


def differentiable_gradients(
    layout: Layout, call: VocabParallelWithGrad, leaves: list[Tensor | None], grad_loss: Tensor
) -> list[Tensor | None]:
    # torch.autograd.grad by the operands is correct for local tensors: each is a result of ToLocal and nothing else is
    # made from it, so no path leads from one operand to another.
    problem = TokenLosses(call.operands, call.ignore_index, call.loss, call.logits)
    rows = vocab_parallel_rows(layout, problem)
    losses = losses_of_rows(problem, layout.num_classes, *rows[:4])
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    gradients = torch.autograd.grad((call.row_scale * losses).sum(), wanted, grad_loss, create_graph=True)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, gradients)}
    return [by_leaf.get(id(leaf)) for leaf in leaves]
