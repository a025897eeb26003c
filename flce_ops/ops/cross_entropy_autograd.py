"""What each operator of given logits saves and what comes back.

    forward            saves its arguments, lse                               <- backward
    backward           saves its arguments                                    <- ATen that can be differentiated
    with_grad          saves the gradient made in the same pass               <- times one scalar
    with_grad_         the same, which stands where the logits were

With z, p, f' and d as in flce_ops/aten/double_backward.py and H the cotangent of G = d f', the backward operator's are

    z' = f' H     lse' = sum_j p z'     dL/da = z'_y     dL/dl = lse'     dL/dm = sum_j w z'
    dL/du = l p (z' - lse') f' + d f'' H
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flce_ops.math.options import Cotangents, LogitOptions
from flce_ops.meta.arguments import LogitsBackward, LogitsForward, LogitsWithGrad, LogitsWithGradInPlace
from flce_ops.ops.formula import Formula, autograd_kernel, save, saved, wanted, where_wanted
from flce_ops.ops.upstream import multiply_by_upstream
from flce_ops.support.torch_private import below_autograd, functorch_is_active, root_of

# N tokens, V vocabulary

FORWARD_MODE_REFUSAL = (
    "cross_entropy: forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; use reverse "
    "mode (grad, jacrev, and jacrev of jacrev for a Hessian)"
)
SECOND_DERIVATIVE_REFUSAL = (
    "cross_entropy: second derivatives of a scalar loss are not implemented, as its gradient was made in forward and "
    'the logits were not kept; use reduction="none" and reduce the losses, which can be differentiated twice'
)
USED_AFTERWARDS = (
    "cross_entropy: with inplace_backward=True the logits hold their gradient after the call, but something computed "
    "from them since then wants a gradient; compute it before the loss, or pass inplace_backward=False"
)
ASKED_AFTERWARDS = (
    "cross_entropy: with inplace_backward=True the logits hold their gradient after the call, and no gradient reaches "
    "a retain_grad() or a hook that was set on them since then; set it before the loss, or pass inplace_backward=False"
)
TRANSFORM_REFUSAL = (
    "cross_entropy_with_grad_: torch.func transforms are not implemented; call flce_ops.cross_entropy, which has them"
)


class LogitsFormula(Formula):
    forward_mode_refusal = FORWARD_MODE_REFUSAL


class ForwardFormula(LogitsFormula):
    """target_logit, lse and logit_sum have a gradient; the others have none."""

    arguments = LogitsForward
    op = "cross_entropy_forward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = LogitsForward.of(inputs)
        _, lse, logit_sum, argmax, lse_rest = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(argmax, lse_rest, *([] if call.logit_sum else [logit_sum]))
        save(ctx, inputs, lse, lse_rest)

    @staticmethod
    def backward(ctx, grad_target_logit, grad_lse, grad_logit_sum, *_):
        call, rows = saved(ctx, LogitsForward)
        cotangents = Cotangents(grad_target_logit, grad_lse, grad_logit_sum if call.logit_sum else None)
        if all(cotangent is None for cotangent in cotangents):
            return LogitsForward.gradients()
        grad_logits = torch.ops.flce.cross_entropy_backward(
            *cotangents, *call.operands, *rows, ignore_index=call.ignore_index, **call.logits._asdict()
        )
        return LogitsForward.gradients(logits=grad_logits)


class BackwardFormula(LogitsFormula):
    """In whole matrices: the logits are in memory anyway, and so derivatives of any order are autograd's."""

    arguments = LogitsBackward
    op = "cross_entropy_backward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        save(ctx, inputs)

    @staticmethod
    def backward(ctx, grad_grad_logits: Tensor):
        call, _ = saved(ctx, LogitsBackward)
        names = (*Cotangents._fields, "logits")
        found, needs = second_derivatives(call, grad_grad_logits), wanted(ctx, LogitsBackward, *names)
        return LogitsBackward.gradients(**where_wanted(found, needs, names))


def second_derivatives(call: Any, h: Tensor) -> tuple[Tensor | None, ...]:
    """Of target_logit's, lse's and logit_sum's cotangents, (N,) each, and of the logits, (N, V)."""
    logits, target, weight = call.operands
    dtype = call.lse.dtype
    valid = (target != call.ignore_index)[:, None]
    column = torch.where(valid, target[:, None], 0).long()
    h = torch.where(valid, h, 0.0).to(dtype)
    z, slope, slope_slope = activated(torch.where(valid, logits, 0.0).to(dtype), call.logits)
    p = z.softmax(1)
    a, l, m = (None if cotangent is None else cotangent[:, None].to(dtype) for cotangent in call.cotangents)  # noqa: E741
    w = z.new_ones(z.shape[1]) if weight is None else weight.to(dtype)
    z_dot = h * slope
    lse_dot = (p * z_dot).sum(1, keepdim=True)
    d_u = torch.zeros_like(z)
    if l is not None:
        d_u = d_u + l * p * (z_dot - lse_dot) * slope
    if slope_slope is not None:
        d = torch.zeros_like(z)
        for factor, of in ((l, p), (m, w), (a, torch.zeros_like(z).scatter(1, column, 1.0))):
            d = d if factor is None else d + factor * of
        d_u = d_u + d * slope_slope * h
    d_u = torch.where(valid, d_u, 0.0).to(logits.dtype)
    return z_dot.gather(1, column).squeeze(1), lse_dot.squeeze(1), (z_dot * w).sum(1), d_u


def activated(u: Tensor, options: LogitOptions) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """z, dz/du and d2z/du2, which is None for 0; differentiable."""
    softcap, logit_scale = options
    scale = 1.0 if logit_scale is None else logit_scale
    if softcap is None:
        return scale * u, scale, None
    tanh = torch.tanh(scale * u / softcap)
    slope = scale / torch.cosh(scale * u / softcap).square()
    return softcap * tanh, slope, -2.0 * scale / softcap * tanh * slope


class WithGradFormula(LogitsFormula):
    """loss; the other results carry no gradient.

    The gradient exists already, up to one scalar. The logits are not held until backward, so that they can be freed.
    """

    arguments = LogitsWithGrad
    op = "cross_entropy_with_grad"

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, losses, grad_logits, _ = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(losses, grad_logits, traced_leaf(inputs[0]))

    @staticmethod
    def backward(ctx, grad_loss, *_):
        return gradients(ctx, LogitsWithGrad, grad_loss)


class WithGradInPlaceFormula(LogitsFormula):
    """As above. The tensor that the logits are all of, written in place, is an output too: autograd refuses what was
    saved of it before by its version, and a gradient that comes back through it is of something that read the gradient
    as logits. (Work on a view would copy its base.) The logits' own goes the way that they came from it.
    """

    arguments = LogitsWithGradInPlace

    @classmethod
    def with_gradient(cls, values):
        values.append(root_of(values[0]))

    @staticmethod
    def forward(logits, target, *others):
        *others, root = others
        logits = root.view(target.shape[0], root.numel() // target.shape[0])
        with below_autograd():
            results = LogitsWithGradInPlace.run(torch.ops.flce.cross_entropy_with_grad_, (logits, target, *others))
        return *results, root

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, losses, argmax, grad_logits = output
        ctx.set_materialize_grads(False)
        ctx.handed_over = None
        leaf = traced_leaf(inputs[-1])  # before the root's history is this node
        ctx.mark_dirty(grad_logits)
        ctx.mark_non_differentiable(losses, argmax)
        ctx.save_for_backward(losses, grad_logits, leaf)

    @staticmethod
    def backward(ctx, grad_loss, _losses, _argmax, grad_of_gradient):
        if grad_of_gradient is not None:
            raise RuntimeError(USED_AFTERWARDS)
        if ctx.handed_over is not None and asked_since(*ctx.handed_over):
            raise RuntimeError(ASKED_AFTERWARDS)
        return *gradients(ctx, LogitsWithGradInPlace, grad_loss), None


def remember_handed_over(loss: Tensor, logits: Tensor) -> None:
    """`logits` are the caller's own tensor, which may be a view of the root."""
    if hasattr(loss.grad_fn, "handed_over"):  # written in place
        loss.grad_fn.handed_over = weakref.ref(logits), gradient_readers(logits)


def gradient_readers(logits: Tensor) -> tuple[bool, bool]:
    """Whether retain_grad() was called, and whether a hook was set: further hooks are of the same operation then."""
    return logits.retains_grad, bool(logits._backward_hooks)


def asked_since(reference: Callable, before: tuple[bool, bool]) -> bool:
    logits = reference()
    return logits is not None and any(now and not then for now, then in zip(gradient_readers(logits), before))


def traced_leaf(logits: Tensor) -> Tensor | None:
    """While AOTAutograd traces, the nearest tensor that the logits are computed from and that nothing computed.

    Its compiled backward refuses to be differentiated only where it reads such a tensor. The logits themselves, as
    `multiply_by_upstream` would have them, are not to be kept.
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


def in_place_kernel(op: torch._ops.OpOverload, formula: type[Formula]) -> Callable:
    """As `kernel` of formula.py, without the root that the formula gives back."""
    run = autograd_kernel(op, formula)

    def without_root(*args, **kwargs):
        if functorch_is_active():
            raise NotImplementedError(TRANSFORM_REFUSAL)
        return run(*args, **kwargs)[:3]

    return without_root


def gradients(ctx, arguments: type[LogitsWithGrad], grad_loss: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return arguments.gradients()
    if torch.is_grad_enabled():  # create_graph: the saved gradient has no graph
        raise NotImplementedError(SECOND_DERIVATIVE_REFUSAL)
    losses, made, leaf = ctx.saved_tensors
    made = made.detach()
    if arguments is LogitsWithGradInPlace:  # of the root's shape
        made = made.reshape(losses.shape[0], -1)
    needs_logits, needs_row_scale = wanted(ctx, arguments, "logits", "row_scale")
    (grad_logits,) = multiply_by_upstream([made], [needs_logits], grad_loss, leaf)
    return arguments.gradients(logits=grad_logits, row_scale=losses * grad_loss if needs_row_scale else None)
