"""What the operators of linear_kl_div save for backward, and what backward calls. Nothing here computes a logit.

    user -> entry -> forward        saves operands, row statistics             <- backward op
                  -> with_grad      saves the gradients made in the same pass  <- times one scalar: made_in_forward.py
            backward op             saves nothing                              <- refused with an error

The teacher is constant. Requesting a gradient for it is an error.
"""

from ..math.options import TEACHER
from ..meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from ..meta.checks import check_constants
from ..objectives.divergence import DIVERGENCES
from .function import OperatorFunction, WithoutDerivative, wanted, where_wanted
from .made_in_forward import MadeInForward

# N tokens, D hidden, V vocabulary


class KlDivFunction(OperatorFunction):
    function = "linear_kl_div"
    learns = ("logit_scale",)
    reverse_modes = "grad, jacrev"

    @classmethod
    def check(cls, values):
        check_constants(cls.arguments.op, "teacher", **{name: values[cls.arguments.index[name]] for name in TEACHER})


class ForwardFunction(KlDivFunction):
    arguments = KlDivForward
    with_derivative = ("divergence",)

    @classmethod
    def for_backward(cls, ctx, values, results):
        return results[not DIVERGENCES[values[KlDivForward.index["kind"]]].shifted :]

    @classmethod
    def gradients(cls, ctx, values, saved, grad_divergence, *_):
        *mask, scale_gradient = wanted(ctx, KlDivForward, *KlDivBackward.made)
        *divergence, pair, teacher_pair, student_kl = saved
        rows = {"lse_pair": pair, "teacher_lse_pair": teacher_pair, "student_kl": student_kl}
        rows["divergence"] = divergence[0] if divergence else None
        asked = {"output_mask": mask, "scale_gradient": scale_gradient}
        gradients = KlDivBackward.dispatched(
            KlDivBackward.like(KlDivForward.of(values), grad=grad_divergence, **rows, **asked)
        )
        return where_wanted(gradients, [*mask, scale_gradient], KlDivBackward.made)


class BackwardFunction(WithoutDerivative, KlDivFunction):
    arguments = KlDivBackward
    second_derivative = "second of a divergence"


class WithGradFunction(KlDivFunction, MadeInForward):
    arguments = KlDivWithGrad
    second_derivative = "second of a divergence"

    @classmethod
    def for_backward(cls, ctx, values, results):
        """Drops the arguments that only forward reads, so that they are not kept until backward. Drops input, too, if
        `leaf` can be a parameter (made_in_forward.py).
        """
        index = KlDivWithGrad.index
        for name in (*TEACHER, "valid", "row_scale", *(["input"] if any(values[index["output_mask"]][1:]) else [])):
            values[index[name]] = None
        return super().for_backward(ctx, values, results)
