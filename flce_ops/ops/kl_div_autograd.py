"""What the operators of linear_kl_div save and what comes back; nothing here computes a logit.

    user -> entry -> forward        saves operands, row statistics             <- backward op
                  -> with_grad      saves the gradients made in the same pass  <- times one scalar: made_in_forward.py
            backward op             saves nothing                              <- refused by name

The teacher is constant: it gets no gradient, and asking for one is refused.
"""

import torch

from flce_ops.math.kl_div_arguments import TEACHER
from flce_ops.meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from flce_ops.meta.kl_div_checks import check_no_teacher_gradient
from flce_ops.ops.formula import OPERANDS, Formula, save, saved, wanted, where_wanted
from flce_ops.ops.made_in_forward import MadeInForward

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


class WithGradFormula(KlDivFormula, MadeInForward):
    arguments = KlDivWithGrad
    op = "linear_kl_div_with_grad"

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        """What forward alone reads is not held until backward, nor is input where a parameter may be its leaf."""
        call = KlDivWithGrad.of(inputs)
        call.operands = call.operands._replace(**dict.fromkeys(TEACHER), valid=None)
        call.row_scale = None
        if any(call.output_mask[1:]):
            call.operands = call.operands._replace(input=None)
        super().setup_context(ctx, call.values(), output)

    @classmethod
    def made_again(cls, call, grad_loss):
        raise NotImplementedError(SECOND_DERIVATIVE_REFUSAL)
