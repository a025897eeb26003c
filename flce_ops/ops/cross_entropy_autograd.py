"""What each operator of given logits saves for backward, and what backward calls.

forward            saves its arguments, lse                               <- backward
backward           saves its arguments                                    <- the plain formula: second_order.py
with_grad          saves the gradient made in the same pass               <- that gradient times one scalar
with_grad_         saves the same gradient, which overwrote the logits
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ..math.options import Cotangents
from ..meta.arguments import LogitsBackward, LogitsForward, LogitsWithGrad, LogitsWithGradInPlace
from ..support.holes import refuse_hole, running
from ..support.torch_private import functorch_is_active, has_hooks, root_of
from .autograd import of_lse
from .function import OperatorFunction, asked, save
from .made_in_forward import MadeInForward
from .second_order import second_derivatives

# N tokens, V vocabulary

USED_AFTERWARDS = (
    "cross_entropy: with inplace_backward=True the logits hold their gradient after the call, but something computed "
    "from them since then wants a gradient; compute it before the loss, or pass inplace_backward=False"
)
ASKED_AFTERWARDS = (
    "cross_entropy: with inplace_backward=True the logits hold their gradient after the call, and no gradient reaches "
    "a retain_grad() or a hook that was set on them since then; set it before the loss, or pass inplace_backward=False"
)


class ForwardFunction(OperatorFunction):
    arguments = LogitsForward
    function = "cross_entropy"
    with_derivative = ("target_logit", "lse_pair", "logit_sum")

    @classmethod
    def for_backward(cls, ctx, values, results):
        return (results[1],)

    @classmethod
    def gradients(cls, ctx, values, saved, grad_target_logit, grad_pair, grad_logit_sum, *_):
        cotangents = Cotangents(grad_target_logit, of_lse(grad_pair), grad_logit_sum)
        values = LogitsBackward.like(LogitsForward.of(values), cotangents=cotangents, lse_pair=saved[0])
        return {"logits": LogitsBackward.dispatched(values)}


class BackwardFunction(OperatorFunction):
    arguments = LogitsBackward
    function = "cross_entropy"
    with_derivative = ("grad_logits",)

    @classmethod
    def gradients(cls, ctx, values, saved, grad_grad_logits):
        return second_derivatives(LogitsBackward.of(values), [grad_grad_logits], asked(ctx))


class WithGradFunction(MadeInForward):
    """Does not keep the logits until backward, so that they can be freed."""

    arguments = LogitsWithGrad
    function = "cross_entropy"
    second_derivative = "second of given logits"

    @classmethod
    def for_backward(cls, ctx, values, results):
        values[:] = [traced_leaf(values[0])] + [None] * (len(values) - 1)
        return super().for_backward(ctx, values, results)


class WithGradInPlaceFunction(WithGradFunction):
    """Same as the class above, but the gradient overwrites the logits. The root is the tensor whose elements the logits
    are a view of. The root is returned, too, and marked dirty, so autograd's version check refuses backward functions
    that saved it earlier. If a gradient arrives for the returned root, some code has read the gradient as if it were
    logits, and an error says so. (Marking the view instead of the root dirty would copy the root.) The gradient of the
    logits flows to the operation that computed them.
    """

    arguments = LogitsWithGradInPlace

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
    def forward(cls, logits, target, *others):
        *others, root = others
        logits = root.view(logits.shape)
        return *super().forward(logits, target, *others), root

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        _, losses, argmax, grad_logits = output
        ctx.set_materialize_grads(False)
        ctx.function, ctx.handed_over, ctx.shape = running.function, None, inputs[0].shape
        leaf = traced_leaf(inputs[-1])  # must be found before autograd makes this node the root's grad_fn
        ctx.mark_dirty(grad_logits)
        ctx.mark_non_differentiable(losses, argmax)
        save(ctx, cls.arguments, [leaf] + [None] * (len(cls.arguments.index) - 1), losses, grad_logits)

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

    A compiled backward refuses to be differentiated only if it reads such a tensor. `multiply_by_grad_output` would
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
