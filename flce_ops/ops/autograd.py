"""What each operator saves and what comes back; nothing here computes a logit.

    user -> entry -> forward        saves operands, lse         <- backward op
                  -> with_grad      saves the gradients made in the same pass <- times one scalar
            backward op             saves its inputs            <- double_backward op
            double_backward op      saves nothing               <- refused by name

One `torch.autograd.Function` per operator, with `setup_context` and `vmap`, is called from the Autograd key (eager,
AOTAutograd) and from the key on which torch.func intercepts calls; `torch.library.register_autograd` reaches only the
first.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from flce_ops.aten.backward_tangent import Direction, backward_tangent
from flce_ops.math.loss import loss_terms_of
from flce_ops.support.torch_private import (
    below_autograd,
    functorch_is_active,
    graph_is_kept_after_this_backward,
    is_batched,
    runs_in_this_backward,
)
from flce_ops.support.vendor import made_by_nvidia

# N tokens, D hidden, V vocabulary

# Constants of an operator (flce_ops/math/scalars.py); flce_ops/entry/learnt_scale.py is the way to a gradient.
SCALAR_OPTIONS = ("logit_scale", "softcap", "z_loss", "beta", "teacher_logit_scale", "teacher_softcap")

FORWARD_MODE_REFUSAL = (
    "linear_cross_entropy: forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; "
    "use reverse mode (grad, jacrev, and jacrev of jacrev for a Hessian)"
)


class ReverseModeOnly(Function):
    """A Function that refuses forward-mode differentiation by name and runs under vmap one element at a time."""

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(FORWARD_MODE_REFUSAL)

    @classmethod
    def vmap(cls, info, in_dims, *args):
        return vmap_by_loop(cls, info, in_dims, args)


class Forward(ReverseModeOnly):
    """target_logit, lse, logit_sum and expected_logit of linear_cross_entropy_forward; the others have no gradient."""

    @staticmethod
    def forward(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        ignore_index,
        logit_sum,
        softcap,
        logit_scale,
        vocab_start,
        vocab_size,
        expected_logit,
        argmax,
    ):
        return torch.ops.flce.linear_cross_entropy_forward(
            input,
            linear_weight,
            target,
            linear_bias,
            weight,
            ignore_index=ignore_index,
            logit_sum=logit_sum,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            expected_logit=expected_logit,
            argmax=argmax,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        *operands, ignore_index, logit_sum, softcap, logit_scale, vocab_start, vocab_size, expected_logit, _ = inputs
        _, lse, *others = output
        expected, lse_rest = others[1], others[-1]
        ctx.options = {"ignore_index": ignore_index, "vocab_start": vocab_start}
        ctx.set_materialize_grads(False)
        linear_bias = operands[3]
        ctx.may_be_empty = vocab_size is not None and linear_bias is not None
        ctx.asked_for = (logit_sum, expected_logit)
        has_gradient = (logit_sum, expected_logit, False, False, False)
        ctx.mark_non_differentiable(*(result for result, has in zip(others, has_gradient) if not has))
        ctx.save_for_backward(*operands, lse, softcap, logit_scale, expected, lse_rest)

    @staticmethod
    def backward(ctx, grad_target_logit, grad_lse, grad_logit_sum, grad_expected_logit, *_):
        logit_sum, expected = ctx.asked_for
        grad_logit_sum = grad_logit_sum if logit_sum else None
        grad_expected_logit = grad_expected_logit if expected else None
        cotangents = (grad_target_logit, grad_lse, grad_logit_sum)
        if grad_expected_logit is None and all(cotangent is None for cotangent in cotangents):
            return (None,) * 13
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        *operands, lse, softcap, logit_scale, expected_logit, lse_rest = ctx.saved_tensors
        options = {**ctx.options, "softcap": softcap, "logit_scale": logit_scale, "lse_rest": lse_rest}
        expectations = {}
        if grad_expected_logit is not None:
            if ctx.may_be_empty:
                expected_logit = finite_in_empty_rows(expected_logit, lse)
            expectations = {"grad_expected_logit": grad_expected_logit, "expected_logit": expected_logit}
        if ctx.may_be_empty:
            lse = finite_in_empty_rows(lse, lse)
        grads = torch.ops.flce.linear_cross_entropy_backward(
            *cotangents, *operands, lse, **options, output_mask=mask, **expectations
        )
        grad_input, grad_weight, grad_bias = (grad if wanted else None for grad, wanted in zip(grads, mask))
        return grad_input, grad_weight, None, grad_bias, *(None,) * 9


def finite_in_empty_rows(numbers: Tensor, lse: Tensor) -> Tensor:  # (N,), of a vocabulary shard
    """A bias of -inf may switch off all classes of one shard: exp(-inf - lse) is to be 0 there, not nan."""
    return numbers.masked_fill(lse == -torch.inf, 0.0)


class Backward(ReverseModeOnly):
    """(grad_input, grad_linear_weight, grad_linear_bias) of linear_cross_entropy_backward."""

    @staticmethod
    def forward(
        grad_target_logit,
        grad_lse,
        grad_logit_sum,
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        lse,
        ignore_index,
        softcap,
        logit_scale,
        vocab_start,
        output_mask,
        grad_expected_logit,
        expected_logit,
        lse_rest,
    ):
        return torch.ops.flce.linear_cross_entropy_backward(
            grad_target_logit,
            grad_lse,
            grad_logit_sum,
            input,
            linear_weight,
            target,
            linear_bias,
            weight,
            lse,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_start=vocab_start,
            output_mask=output_mask,
            grad_expected_logit=grad_expected_logit,
            expected_logit=expected_logit,
            lse_rest=lse_rest,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        *operands, ignore_index, softcap, logit_scale, vocab_start, output_mask, grad_expected_logit, _, rest = inputs
        ctx.options = {"ignore_index": ignore_index, "vocab_start": vocab_start}
        ctx.output_mask = output_mask
        ctx.has_expectation = grad_expected_logit is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for result, wanted in zip(output, output_mask) if not wanted))
        ctx.save_for_backward(*operands, softcap, logit_scale, rest)

    @staticmethod
    def backward(ctx, *grad_grads):
        grad_grads = tuple(grad if wanted else None for grad, wanted in zip(grad_grads, ctx.output_mask))
        if all(grad is None for grad in grad_grads):
            return (None,) * 17
        if ctx.has_expectation:
            raise NotImplementedError(
                "linear_log_probs: second derivatives through the entropy are not implemented; detach the entropy, or "
                "compute it from F.linear's logits"
            )
        *operands, softcap, logit_scale, lse_rest = ctx.saved_tensors
        *per_row, grad_input, grad_weight, grad_bias = torch.ops.flce.linear_cross_entropy_double_backward(
            *grad_grads, *operands, **ctx.options, softcap=softcap, logit_scale=logit_scale, lse_rest=lse_rest
        )
        grads = (*per_row, grad_input, grad_weight, None, grad_bias, None, None)
        wanted = ctx.needs_input_grad
        return *(grad if wanted[i] else None for i, grad in enumerate(grads)), *(None,) * 8


class WithGrad(ReverseModeOnly):
    """loss of linear_cross_entropy_with_grad; its other results carry no gradient.

    The gradients exist already, up to the scalar d(objective)/d(loss). They are multiplied in place when nobody can
    read them again, which keeps one copy of grad_linear_weight in memory, and out of place under retain_graph.
    """

    @staticmethod
    def forward(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        row_scale,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        output_mask,
        argmax,
    ):
        return torch.ops.flce.linear_cross_entropy_with_grad(
            input,
            linear_weight,
            target,
            linear_bias,
            weight,
            row_scale,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            output_mask=output_mask,
            argmax=argmax,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        *operands, ctx.ignore_index, ctx.label_smoothing, z_loss, softcap, logit_scale, ctx.output_mask, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*operands, z_loss, softcap, logit_scale, *output[1:5])

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return (None,) * 13
        *operands, z_loss, softcap, logit_scale, losses, grad_input, grad_weight, grad_bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_row_scale = None
        if torch.is_grad_enabled():  # create_graph: the saved gradients have no graph
            *operands, row_scale = operands
            grads, grad_row_scale = differentiable_gradients(
                *operands,
                row_scale,
                grad_loss,
                ignore_index=ctx.ignore_index,
                label_smoothing=ctx.label_smoothing,
                z_loss=z_loss,
                softcap=softcap,
                logit_scale=logit_scale,
                output_mask=ctx.output_mask,
            )
        else:
            made = [grad if want else None for grad, want in zip((grad_input, grad_weight, grad_bias), ctx.output_mask)]
            input, linear_weight, _, linear_bias, *_ = operands
            leaf = next(t for t, need in ((linear_weight, needs[1]), (linear_bias, needs[3]), (input, True)) if need)
            grads = multiply_by_upstream(made, grad_loss, leaf)
            if needs[5]:
                grad_row_scale = losses * grad_loss
        grad_input, grad_weight, grad_bias = (
            grad if need else None for grad, need in zip(grads, (needs[0], needs[1], needs[3]))
        )
        return grad_input, grad_weight, None, grad_bias, None, grad_row_scale, *(None,) * 7


def differentiable_gradients(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (N,)
    linear_bias: Tensor | None,  # (V,)
    weight: Tensor | None,  # (V,)
    row_scale: Tensor,  # (N,)
    grad_loss: Tensor,  # ()
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
    logit_scale: Tensor | None,  # ()
    output_mask: list[bool],
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The gradients of sum_i row_scale_i loss_i, and that of row_scale, as functions of the operands.

    They are built from the operators that have derivatives, not by asking autograd for the gradient by the operands:
    these carry the graph that made them, and a path from one to another would be taken here and again by the caller.
    """
    operands = (input, linear_weight, target, linear_bias, weight)
    logits = {"ignore_index": ignore_index, "softcap": softcap, "logit_scale": logit_scale}
    target_logit, lse, logit_sum, *_, lse_rest = torch.ops.flce.linear_cross_entropy_forward(
        *operands, logit_sum=label_smoothing != 0.0, **logits
    )
    terms = loss_terms_of(target, weight, linear_weight.shape[0], label_smoothing, z_loss, lse.dtype)
    valid = target != ignore_index
    losses = torch.where(valid, terms.loss(target_logit, lse, logit_sum if label_smoothing else None, lse_rest), 0.0)
    cotangents = terms.cotangents(lse, torch.where(valid, row_scale, 0.0) * grad_loss)
    grads = torch.ops.flce.linear_cross_entropy_backward(
        *cotangents, *operands, lse, **logits, output_mask=output_mask, lse_rest=lse_rest
    )
    return grads, losses * grad_loss


class DoubleBackward(ReverseModeOnly):
    """Results of linear_cross_entropy_double_backward, which has derivatives by its first three arguments only.

    They are cotangents, in which it is linear: torch.autograd.functional.hvp differentiates by them.
    """

    @staticmethod
    def forward(*args):
        *operands, ignore_index, softcap, logit_scale, vocab_start, lse_rest = args
        return torch.ops.flce.linear_cross_entropy_double_backward(
            *operands,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_start=vocab_start,
            lse_rest=lse_rest,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        *operands, ignore_index, softcap, logit_scale, vocab_start, lse_rest = inputs
        ctx.options = {"ignore_index": ignore_index, "vocab_start": vocab_start}
        ctx.tensors = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands[3:], softcap, logit_scale, lse_rest)

    @staticmethod
    def backward(ctx, *direction):
        edges = zip(ctx.tensors, ctx.next_functions)
        others = any(runs_in_this_backward(node) for index, (node, _) in edges if index >= 3 and node is not None)
        if others or torch.is_grad_enabled():
            raise NotImplementedError(
                "linear_cross_entropy: third derivatives are not implemented; use F.cross_entropy(F.linear(...)) for "
                "them"
            )
        *operands, softcap, logit_scale, lse_rest = ctx.saved_tensors
        changes = backward_tangent(
            Direction(*direction),
            *operands,
            **ctx.options,
            softcap=softcap,
            logit_scale=logit_scale,
            lse_rest=lse_rest,
        )
        return *(change if need else None for change, need in zip(changes, ctx.needs_input_grad)), *(None,) * 14


FORMULAS = {
    "linear_cross_entropy_forward": Forward,
    "linear_cross_entropy_backward": Backward,
    "linear_cross_entropy_with_grad": WithGrad,
    "linear_cross_entropy_double_backward": DoubleBackward,
}


def multiply_by_upstream(grads: list[Tensor | None], factor: Tensor, leaf: Tensor) -> list[Tensor | None]:
    """grads * factor, in the same memory where these are the last users of it."""
    if is_batched(factor):  # is_grads_batched: a batch of factors
        return [None if grad is None else grad * factor for grad in grads]
    plain = type(factor) is Tensor and all(grad is None or type(grad) is Tensor for grad in grads)
    if not plain:
        # A subclass is a tracer (functional, fake): record ordinary multiplications. AOTAutograd refuses a second
        # derivative only where the backward graph reads a tensor that requires one; gradients made in forward do not,
        # and would be differentiated as constants in silence.
        factor = torch.ops.flce.linear_cross_entropy_upstream(factor, leaf)
    if not plain or graph_is_kept_after_this_backward():
        return [None if grad is None else grad * factor for grad in grads]
    for grad in grads:
        if grad is None:
            continue
        if grad.device.type == "cuda" and made_by_nvidia() and grad.dtype in (torch.bfloat16, torch.float16):
            from flce_ops.triton import launch_scale_in_place

            launch_scale_in_place(grad, factor)
        else:
            grad.mul_(factor)
    return grads


def vmap_by_loop(function: type[Function], info, in_dims, args):
    """One call per element of the batch: right for every argument, no faster than a Python loop."""
    if info.batch_size == 0:
        raise NotImplementedError(
            "flce_ops: vmap over an empty batch is not implemented; leave the call out where it is"
        )
    results = []
    for index in range(info.batch_size):
        element = [
            arg.select(dim, index) if isinstance(arg, Tensor) and dim is not None else arg
            for arg, dim in zip(args, in_dims)
        ]
        results.append(function.apply(*element))
    stacked = tuple(torch.stack(parts) for parts in zip(*results))
    return stacked, (0,) * len(stacked)


def kernel(op: torch._ops.OpOverload, function: type[Function]) -> Callable:
    """The kernel of `op` on the autograd keys: `function` when a gradient can flow, straight down otherwise."""
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    scalars = [names.index(name) for name in SCALAR_OPTIONS if name in names]
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}

    def run(*args, **kwargs):
        values = {**defaults, **dict(zip(names, args)), **kwargs}
        flat = [values[name] for name in names]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        refuse_forward_mode(tensors)
        for index in scalars:
            if flat[index] is not None and flat[index].requires_grad and torch.is_grad_enabled():
                raise NotImplementedError(f"{schema.name}: {names[index]} gets no gradient here; pass it detached")
        if functorch_is_active() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return function.apply(*flat)
        with below_autograd():
            return op(*args, **kwargs)

    return run


def refuse_forward_mode(tensors: list[Tensor]) -> None:
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(FORWARD_MODE_REFUSAL)
