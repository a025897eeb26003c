"""What each operator saves and what comes back; nothing here computes a logit.

    user -> entry -> forward        saves operands, row statistics             <- backward op
                  -> with_grad      saves the gradients made in the same pass  <- times one scalar
            backward op             saves nothing                              <- refused by name

The teacher is constant: it gets no gradient, and asking for one is refused.
"""

import torch

from flce_ops.math.kl_div_arguments import TEACHER
from flce_ops.meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from flce_ops.meta.kl_div_checks import check_no_teacher_gradient
from flce_ops.ops.formula import OPERANDS, Formula, save, saved, wanted, where_wanted
from flce_ops.ops.upstream import multiply_by_upstream

# N tokens, D hidden, V vocabulary

FORWARD_MODE_REFUSAL = (
    "linear_kl_div: forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; use reverse "
    "mode (grad, jacrev)"
)
SECOND_DERIVATIVE_REFUSAL = (
    "linear_kl_div: second derivatives are not implemented; use F.kl_div on the logits, "
    "F.linear(input, linear_weight), for them"
)


class KlDivFormula(Formula):
    forward_mode_refusal = FORWARD_MODE_REFUSAL

    @classmethod
    def check(cls, op, values):
        teacher = {name: values[cls.arguments.index[name]] for name in TEACHER}
        check_no_teacher_gradient(op._schema.name.removeprefix("flce::"), **teacher)


class ForwardFormula(KlDivFormula):
    """(divergence, shift, teacher_shift, student_kl); only the first has a gradient."""

    arguments = KlDivForward
    op = "linear_kl_div_forward"
    per_token = ("input", "teacher_input", "teacher_probs", "valid")
    token_dim = -1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, *output[1:])

    @staticmethod
    def backward(ctx, grad_divergence, *_):
        if grad_divergence is None:
            return KlDivForward.gradients()
        call, row_statistics = saved(ctx, KlDivForward)
        mask = wanted(ctx, KlDivForward, *OPERANDS)
        gradients = torch.ops.flce.linear_kl_div_backward(
            grad_divergence, *call.operands, *row_statistics, **call.options._asdict(), output_mask=mask
        )
        return KlDivForward.gradients(**where_wanted(gradients, mask))


class BackwardFormula(KlDivFormula):
    """It has no derivative."""

    arguments = KlDivBackward
    op = "linear_kl_div_backward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(SECOND_DERIVATIVE_REFUSAL)


class WithGradFormula(KlDivFormula):
    """loss; the other results carry no gradient.

    The teacher's tensors are not held until backward: the gradients exist already, up to one factor.
    """

    arguments = KlDivWithGrad
    op = "linear_kl_div_with_grad"

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = KlDivWithGrad.of(inputs)
        input, linear_weight, linear_bias = call.operands[:3]
        ctx.output_mask = call.output_mask
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        _, wants_weight, wants_bias = call.output_mask
        leaf = linear_weight if wants_weight else linear_bias if wants_bias else input
        ctx.save_for_backward(leaf, *output[1:])

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return KlDivWithGrad.gradients()
        if torch.is_grad_enabled():  # create_graph: saved gradients have no graph
            raise NotImplementedError(SECOND_DERIVATIVE_REFUSAL)
        leaf, divergence, *made = ctx.saved_tensors
        gradients = multiply_by_upstream(made, ctx.output_mask, grad_loss, leaf)
        (needs_row_scale,) = wanted(ctx, KlDivWithGrad, "row_scale")
        grad_row_scale = divergence * grad_loss if needs_row_scale else None
        return KlDivWithGrad.gradients(**where_wanted(gradients, ctx.output_mask), row_scale=grad_row_scale)
