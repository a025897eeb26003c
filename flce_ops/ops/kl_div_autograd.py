"""What each operator saves and what comes back; nothing here computes a logit.

    user -> entry -> forward        saves operands, row statistics             <- backward op
                  -> with_grad      saves the gradients made in the same pass  <- times one scalar
            backward op             saves nothing                              <- refused by name

The teacher is constant: it gets no gradient, and asking for one is refused.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce_ops.math.kl_div_arguments import Operands, Options
from flce_ops.meta.kl_div_checks import check_no_teacher_gradient
from flce_ops.ops import autograd
from flce_ops.ops.autograd import multiply_by_upstream

# N tokens, D hidden, V vocabulary

TENSORS = len(Operands._fields)
OPTION_NAMES = tuple(Options.__dataclass_fields__)
SCALARS = ("beta", "logit_scale", "softcap", "teacher_logit_scale", "teacher_softcap")  # tensors among them

FORWARD_MODE_REFUSAL = (
    "linear_kl_div: forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; use reverse "
    "mode (grad, jacrev)"
)
SECOND_DERIVATIVE_REFUSAL = (
    "linear_kl_div: second derivatives are not implemented; use F.kl_div on the logits, "
    "F.linear(input, linear_weight), for them"
)


class ReverseModeOnly(autograd.ReverseModeOnly):
    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(FORWARD_MODE_REFUSAL)


class Forward(ReverseModeOnly):
    """(divergence, shift, teacher_shift, student_kl) of linear_kl_div_forward; only the first has a gradient."""

    @staticmethod
    def forward(*args):
        return torch.ops.flce.linear_kl_div_forward(*args[:TENSORS], **dict(zip(OPTION_NAMES, args[TENSORS:])))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = dict(zip(OPTION_NAMES, inputs[TENSORS:]))
        scalars = [ctx.options.pop(name) for name in SCALARS]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*scalars, *inputs[:TENSORS], *output[1:])

    @staticmethod
    def backward(ctx, grad_divergence, *_):
        nothing = (None,) * (TENSORS + len(OPTION_NAMES))
        if grad_divergence is None:
            return nothing
        mask = list(ctx.needs_input_grad[:3])
        saved = ctx.saved_tensors
        scalars, tensors = saved[: len(SCALARS)], saved[len(SCALARS) :]
        grads = torch.ops.flce.linear_kl_div_backward(
            grad_divergence, *tensors, **dict(zip(SCALARS, scalars)), **ctx.options, output_mask=mask
        )
        return *(grad if wanted else None for grad, wanted in zip(grads, mask)), *nothing[3:]


class Backward(ReverseModeOnly):
    """(grad_input, grad_linear_weight, grad_linear_bias) of linear_kl_div_backward, which has no derivative."""

    @staticmethod
    def forward(*args):
        *tensors, output_mask = (*args[: TENSORS + 4], args[-1])
        options = dict(zip(OPTION_NAMES, args[TENSORS + 4 : -1]))
        return torch.ops.flce.linear_kl_div_backward(*tensors, **options, output_mask=output_mask)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(SECOND_DERIVATIVE_REFUSAL)


class WithGrad(ReverseModeOnly):
    """loss of linear_kl_div_with_grad; its other results carry no gradient.

    The teacher's tensors are not held until backward: the gradients exist already, up to one factor.
    """

    @staticmethod
    def forward(*args):
        options = dict(zip(OPTION_NAMES, args[TENSORS + 1 : -1]))
        return torch.ops.flce.linear_kl_div_with_grad(*args[: TENSORS + 1], **options, output_mask=args[-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, linear_weight, linear_bias = inputs[:3]
        ctx.output_mask = inputs[-1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        wants_input, wants_weight, wants_bias = ctx.output_mask
        leaf = linear_weight if wants_weight else linear_bias if wants_bias else input
        ctx.save_for_backward(leaf, *output[1:])

    @staticmethod
    def backward(ctx, grad_loss, *_):
        nothing = (None,) * (TENSORS + 1 + len(OPTION_NAMES) + 1)
        if grad_loss is None:
            return nothing
        if torch.is_grad_enabled():  # create_graph: saved gradients have no graph
            raise NotImplementedError(SECOND_DERIVATIVE_REFUSAL)
        leaf, divergence, *grads = ctx.saved_tensors
        made = [grad if wanted else None for grad, wanted in zip(grads, ctx.output_mask)]
        grads = multiply_by_upstream(made, grad_loss, leaf)
        grad_row_scale = divergence * grad_loss if ctx.needs_input_grad[TENSORS] else None
        return *grads, *nothing[3:TENSORS], grad_row_scale, *nothing[TENSORS + 1 :]


FORMULAS = {
    "linear_kl_div_forward": Forward,
    "linear_kl_div_backward": Backward,
    "linear_kl_div_with_grad": WithGrad,
}


def kernel(op: torch._ops.OpOverload, function: type[ReverseModeOnly]) -> Callable:
    """The kernel of `op` on the autograd keys, after refusals under this operator's name."""
    names = [argument.name for argument in op._schema.arguments]
    run = autograd.kernel(op, function)

    def checked(*args, **kwargs):
        for tensor in args:
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(FORWARD_MODE_REFUSAL)
        named = {**dict(zip(names, args)), **kwargs}
        check_no_teacher_gradient(op._schema.name.removeprefix("flce::"), **named)
        return run(*args, **kwargs)

    return checked
