"""The derivative of a scalar loss whose gradients forward has made, except for the factor d(objective)/d(loss).

    forward     keeps its arguments, the losses, the gradients made in the same pass
    backward    multiplies them by one scalar: in place if nobody can read them again, which keeps one copy of
                grad_linear_weight in memory; out of place under retain_graph

Not for float16, whose loss scale only backward knows: NOT_FLOAT16 in paths.py. Saved gradients have no graph. Under
create_graph they are made again, by the operators that have derivatives. `..._with_grad_` of given logits writes the
gradient over the logits.
"""

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._ops import ops
from ..math.options import TEACHER, Operands, tokens_that_count
from ..math.statistics import Rows, log_probs_of_targets, surprisal
from ..meta.arguments import Backward, Forward, KlDivWithGrad, WithGrad, WithGradInPlace
from ..objectives.cross_entropy import cross_entropy_of
from ..objectives.token_function import FunctionObjective, token_loss_named, zero_where
from ..support import has_triton, made_by_nvidia
from ..support.refusals import refuse_hole, running
from ..support.sizes import is_fake
from ..support.torch_private import (
    functorch_is_active,
    graph_is_kept_after_this_backward,
    has_hooks,
    is_batched,
    root_of,
    written_over_where_donated,
)
from .autograd import KlDivFunction
from .function import OPERANDS, OperatorFunction, gradients_asked_for, restore, save

# N tokens, D hidden, V vocabulary

MULTIPLY = "linear_cross_entropy_upstream"


def multiplied(made: list[Tensor], factor: Tensor, leaf: Tensor) -> list[Tensor]:
    """Each gradient in `made` times `factor`. Multiplies in place if nobody else can read the gradients."""
    if torch.compiler.is_dynamo_compiling():  # compiled autograd, whose graph may run again
        return getattr(ops, MULTIPLY).default(made, factor, leaf)
    plain = type(factor) is Tensor
    for grad in made:
        plain &= type(grad) is Tensor
    if is_batched(factor):  # is_grads_batched=True: a batch of factors
        return multiply(made, factor)
    if not plain and not is_fake(factor):
        # A tensor subclass (functional, fake) means that the call is traced. AOTAutograd refuses a second derivative
        # only if the backward graph reads a tensor that requires a gradient. Gradients made in forward require none,
        # and would silently be treated as constants.
        op, in_place = (getattr(ops, name).default for name in (MULTIPLY, f"{MULTIPLY}_"))
        written_over_where_donated(op, in_place)
        return op(made, factor, leaf)
    if graph_is_kept_after_this_backward():
        return multiply(made, factor)
    multiply_in_place(made, factor)
    return made


def multiply(made: Sequence[Tensor], factor: Tensor, leaf: Tensor | None = None) -> list[Tensor]:
    """Multiplies out of place. Traced graphs call this as an operator, and its argument `leaf` makes them read that
    tensor.
    """
    return [grad * factor for grad in made]


def multiply_in_place(made: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies in place. On NVIDIA GPUs a kernel does it, which returns immediately if the factor is 1."""
    nvidia = bool(made) and made[0].device.type == "cuda" and made_by_nvidia() and not is_fake(factor)
    if nvidia and made[0].dtype != torch.float64 and has_triton():
        from ..triton import launch_scale_in_place

        launch_scale_in_place(made, factor)
    else:
        for grad in made:
            grad.mul_(factor)


class MadeInForward(OperatorFunction):
    """For an operator that returns loss, losses (N,), the gradients, and constants. Only the loss has a derivative."""

    with_derivative = ("loss",)
    kept: ClassVar[Callable]  # of the results: the losses, and the gradients
    second_derivative: ClassVar[str] = ""  # if there is no second derivative: the entry of HOLES with the reason

    @classmethod
    def made_again(cls, ctx, call: Any, grad_loss: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The gradients, multiplied by grad_loss, and the losses, as functions of the operands."""
        refuse_hole(cls.called(), cls.second_derivative)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "arguments"):
            cls.kept = itemgetter(1, *cls.arguments.made_at)

    @classmethod
    def for_backward(cls, ctx, values, results):
        return cls.kept(results)

    @classmethod
    def made(cls, ctx, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients among the saved results."""
        return saved[1:]

    @classmethod
    def of_cotangents(cls, arguments, ctx, grad_loss, *_):
        index, found = arguments.index, [None] * len(arguments.index)
        if grad_loss is None:
            return tuple(found)
        needs = gradients_asked_for(ctx)
        outer, running.function = running.function, ctx.function
        try:
            values, saved = restore(ctx, arguments)
            losses, leaf, here, places = saved[0], saved[0], [], []
            if torch.is_grad_enabled():  # true under create_graph
                values[index["output_mask"]] = [needs[index[name]] for name in OPERANDS]
                values[index["scale_gradient"]] = needs[index["logit_scale"]]
                products, losses = cls.made_again(ctx, arguments.of(values), grad_loss)
                places = [index[name] for name in arguments.made]
            else:
                mask = [*values[index["output_mask"]], values[index["scale_gradient"]]]
                for name, was_made, gradient in zip(arguments.made, mask, cls.made(ctx, saved)):
                    place = index[name]
                    if was_made and needs[place]:
                        here.append(gradient)
                        places.append(place)
                    # takes the last operand that needs a gradient, rather a parameter than input: parameters stay in
                    # memory anyway, but a compiled graph would have to save input
                    if was_made and name in OPERANDS:
                        leaf = values[place]
                products = multiplied(here, grad_loss, leaf)
            for place, product in zip(places, products):
                found[place] = product if needs[place] else None
            if "row_scale" in index and needs[index["row_scale"]]:
                found[index["row_scale"]] = losses * grad_loss
            return tuple(found)
        finally:
            running.function = outer


class WithGradFunction(MadeInForward):
    arguments = WithGrad
    learns = ("logit_scale",)

    @classmethod
    def for_backward(cls, ctx, values, results):
        name = values[cls.arguments.index["function"]]
        # a function without a registered name lives as long as this
        ctx.token_loss = None if name is None else token_loss_named(name)
        if values[cls.head] is None:  # given logits are not kept until backward, so that they can be freed
            leaf = traced_leaf(values[0])
            for place in cls.arguments.tensor_places:
                values[place] = None
            values[0] = leaf
        return cls.kept(results)

    @classmethod
    def made_again(cls, ctx, call, grad_loss):
        """Computed by the operators that have derivatives, not by torch.autograd.grad on the operands: the operands
        carry the graph that made them, and a path from one operand to another would be counted here and again by the
        caller.
        """
        of_cross_entropy = call.function is None
        if call.operands.linear_weight is None:
            refuse_hole(cls.called(), "second of given logits")
        assert call.group is None, "distributed/vocab_parallel.py has this derivative"
        if of_cross_entropy and call.sparse.gradient_threshold:
            refuse_hole(cls.called(), "second of a sparse gradient")
        operands = Operands(*call.operands)
        smoothed = of_cross_entropy and call.loss.label_smoothing != 0.0
        found = Forward.dispatched(Forward.like(call, operands=operands, logit_sum=smoothed))
        rows, retained = Rows.of_forward(found), found[-1]
        valid, dtype = tokens_that_count(operands.target, call.ignore_index), rows.lse_pair.dtype
        if of_cross_entropy:
            objective = cross_entropy_of(call, operands.num_classes, dtype)
            surprisals = surprisal(rows.target_logit, rows.lse_pair)
        else:
            counts = operands.target != call.ignore_index
            surprisals = -log_probs_of_targets(counts, rows.target_logit, rows.lse_pair)
            tensors = tuple(zero_where(~valid, tensor) for tensor in call.tensors)
            objective = FunctionObjective(token_loss_named(call.function), tensors, counts)
        losses, slopes = objective.losses_and_slopes(surprisals, rows.lse, rows.logit_sum if smoothed else None)
        scale, _ = call.reduction.scale_of_tokens(valid, dtype)
        cotangents = objective.cotangents(slopes, scale * grad_loss)
        known = {"lse_pair": rows.lse_pair, "retained": retained if retained.shape[0] else None}
        gradients = Backward.dispatched(Backward.like(call, cotangents=cotangents, operands=operands, **known))
        return gradients, torch.where(valid, losses, 0.0)


USED_AFTERWARDS = (
    "cross_entropy: with inplace_backward=True the logits hold their gradient after the call, but something computed "
    "from them since then wants a gradient; compute it before the loss, or pass inplace_backward=False"
)
ASKED_AFTERWARDS = (
    "cross_entropy: with inplace_backward=True the logits hold their gradient after the call, and no gradient reaches "
    "a retain_grad() or a hook that was set on them since then; set it before the loss, or pass inplace_backward=False"
)


class WithGradInPlaceFunction(WithGradFunction):
    """A WithGradFunction whose gradient overwrites the logits. The root is the tensor whose elements the logits are a
    view of. The root is returned, too, and marked dirty, so autograd's version check refuses backward functions that
    saved it earlier. If a gradient arrives for the returned root, some code has read the gradient as if it were logits,
    and an error says so. (Marking the view instead of the root dirty would copy the root.) The gradient of the logits
    flows to the operation that computed them.
    """

    arguments = WithGradInPlace
    function = "cross_entropy"

    @classmethod
    def with_gradient(cls, values):
        values.append(root_of(values[0]))

    @classmethod
    def run(cls, values):
        """Leaves out the root, which this Function adds to the results."""
        if functorch_is_active():
            refuse_hole("cross_entropy_with_grad_", "handed over in torch.func")
        return super().run(values)[:3]

    @classmethod
    def forward(cls, *values):
        logits, *values, root = values
        return *super().forward(root.view(logits.shape), *values), root

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        _, losses, argmax, grad_logits = output
        ctx.set_materialize_grads(False)
        ctx.function, ctx.handed_over, ctx.shape = running.function, None, inputs[0].shape
        leaf = traced_leaf(inputs[-1])  # must be found before autograd makes this node the root's grad_fn
        ctx.mark_dirty(grad_logits)
        ctx.mark_non_differentiable(losses, argmax)
        values = [leaf] + [None] * (len(cls.arguments.index) - 1)
        values[cls.arguments.index["output_mask"]] = [True, False, False]
        save(ctx, cls.arguments, values, losses, grad_logits)

    @classmethod
    def check_cotangents(cls, ctx, grad_loss, _losses, _argmax, grad_of_gradient):
        if grad_of_gradient is not None:
            raise RuntimeError(USED_AFTERWARDS)
        if ctx.handed_over is not None and asked_since(*ctx.handed_over):
            raise RuntimeError(ASKED_AFTERWARDS)

    @classmethod
    def gradients_beside(cls, ctx):
        """None for the root. Compiled autograd adds the gradients of the root and of its view, and cannot add None."""
        if isinstance(ctx, torch.autograd.function.BackwardCFunction):
            return (None,)
        grad_logits = ctx.saved_tensors[-1]
        return (grad_logits.new_zeros(()).expand(grad_logits.shape),)

    @classmethod
    def made(cls, ctx, saved):
        return [saved[1].detach().view(ctx.shape)]  # from the root's shape


def remember_handed_over(loss: Tensor, logits: Tensor) -> None:
    """Remembers the caller's own tensor, which may be a view of the root."""
    if hasattr(loss.grad_fn, "handed_over"):  # only if the logits were overwritten
        loss.grad_fn.handed_over = weakref.ref(logits), gradient_readers(logits)


def gradient_readers(logits: Tensor) -> tuple[bool, bool]:
    """Whether retain_grad() was called and whether a hook was set. A tensor that has a hook already gets further hooks
    on the same operation.
    """
    return logits.retains_grad, has_hooks(logits)


def asked_since(reference: Callable, before: tuple[bool, bool]) -> bool:
    logits = reference()
    return logits is not None and any(now and not then for now, then in zip(gradient_readers(logits), before))


def traced_leaf(logits: Tensor) -> Tensor | None:
    """While AOTAutograd traces: the nearest tensor from which the logits are computed and which no operation made.

    A compiled backward refuses to be differentiated only if it reads such a tensor. `multiplied` would
    take the logits themselves, but they must not be kept.
    """
    if type(logits) in (Tensor, torch.nn.Parameter):
        return None
    if logits.grad_fn is None:
        return logits
    nodes = [logits.grad_fn]
    for node in nodes:
        if hasattr(node, "variable"):
            return node.variable
        nodes += [before for before, _ in node.next_functions if before is not None and before not in nodes]
    return logits


class KlDivWithGradFunction(KlDivFunction, MadeInForward):
    arguments = KlDivWithGrad
    second_derivative = "second of a divergence"

    @classmethod
    def for_backward(cls, ctx, values, results):
        """Drops the arguments that only forward reads, so that they are not kept until backward. Drops input, too, if
        the `leaf` of of_cotangents can be a parameter.
        """
        index = KlDivWithGrad.index
        for name in (*TEACHER, "valid", "row_scale", *(["input"] if any(values[index["output_mask"]][1:]) else [])):
            values[index[name]] = None
        return cls.kept(results)
