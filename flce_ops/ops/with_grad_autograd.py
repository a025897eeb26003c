"""The derivatives of the scalar losses of a head, and how their gradients are made under create_graph.

Forward makes the gradients. Under create_graph they are made again, by the operators that have derivatives.
"""

import torch

from ..math.options import Operands, tokens_that_count
from ..math.statistics import Rows, log_probs_of_targets, surprisal
from ..meta.arguments import Backward, Forward, WithGrad
from ..meta.checks import check_constants
from ..objectives.cross_entropy import cross_entropy_of_call
from ..objectives.token_function import FunctionObjective, token_loss_named, zero_where
from ..support.holes import refuse_hole
from .made_in_forward import MadeInForward

# N tokens, D hidden, V vocabulary


class WithGradFunction(MadeInForward):
    arguments = WithGrad
    learns = ("logit_scale",)

    @classmethod
    def check(cls, values):
        name = values[WithGrad.index["function"]]
        if name is not None:
            for place, tensor in enumerate(values[WithGrad.index["tensors"]]):
                check_constants(WithGrad.op, **{token_loss_named(name).name_of_tensor(place): tensor})

    @classmethod
    def for_backward(cls, ctx, values, results):
        name = values[WithGrad.index["function"]]
        # a function without a registered name lives as long as this
        ctx.token_loss = None if name is None else token_loss_named(name)
        return super().for_backward(ctx, values, results)

    @classmethod
    def made_again(cls, ctx, call, grad_loss):
        """Computed by the operators that have derivatives, not by torch.autograd.grad on the operands: the operands
        carry the graph that made them, and a path from one operand to another would be counted here and again by the
        caller.
        """
        of_cross_entropy = call.function is None
        assert call.group is None, "distributed/vocab_parallel.py has this derivative"
        if of_cross_entropy and call.sparse.gradient_threshold:
            refuse_hole(cls.called(), "second of a sparse gradient")
        operands = Operands(*call.operands)
        smoothed = of_cross_entropy and call.loss.label_smoothing != 0.0
        found = Forward.dispatched(Forward.like(call, operands=operands, logit_sum=smoothed))
        rows, retained = Rows.of_forward(found), found[-1]
        valid, dtype = tokens_that_count(operands.target, call.ignore_index), rows.lse_pair.dtype
        if of_cross_entropy:
            objective = cross_entropy_of_call(call, operands, operands.num_classes, dtype)
            surprisals = surprisal(rows.target_logit, rows.lse_pair)
        else:
            counts = operands.target != call.ignore_index
            surprisals = -log_probs_of_targets(counts, rows.target_logit, rows.lse_pair)
            tensors = tuple(zero_where(~valid, tensor) for tensor in call.tensors)
            objective = FunctionObjective(token_loss_named(call.function), tensors, counts)
        losses, slopes = objective.losses_and_slopes(surprisals, rows.lse, rows.logit_sum if smoothed else None)
        scale = call.reduction.scale_of_tokens(valid, dtype)
        cotangents = objective.cotangents(slopes, scale * grad_loss)
        known = {"lse_pair": rows.lse_pair, "retained": retained if retained.shape[0] else None}
        gradients = Backward.dispatched(Backward.like(call, cotangents=cotangents, operands=operands, **known))
        return gradients, torch.where(valid, losses, 0.0)
