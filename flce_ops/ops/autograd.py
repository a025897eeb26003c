"""What the forward and the backward operators save for backward, and what backward calls. No logit is computed.

forward            saves its arguments, lse_pair, saved logits           <- backward
backward           saves its arguments                                   <- the plain formula: second_derivatives.py
kl_div_forward     saves its operands, row statistics                    <- kl_div_backward
kl_div_backward    saves nothing                                         <- refused with an error

A teacher is constant: requesting a gradient for it is an error.
"""

import torch
from torch import Tensor

from ..math.options import TEACHER, Cotangents
from ..meta.arguments import (
    Backward,
    BackwardInPlace,
    Forward,
    KlDivBackward,
    KlDivForward,
)
from ..meta.checks import check_constants
from ..objectives.divergence import DIVERGENCES
from ..support.refusals import refuse_hole
from ..support.torch_private import differentiated
from .function import OperatorFunction, WithoutDerivative, gradients_asked_for, wanted, where_wanted
from .saved_logits import saved_rows, saves_logits
from .second_derivatives import second_derivatives

# N tokens, D hidden, V vocabulary


class ForwardFunction(OperatorFunction):
    arguments = Forward
    learns = ("logit_scale",)
    with_derivative = ("target_logit", "lse_pair", "logit_sum", "expected_log_prob")

    @classmethod
    def with_gradient(cls, values):
        retain = Forward.index["retain"]
        if not saves_logits(values[retain]):
            values[retain] = saved_rows(Forward.of(values))

    @classmethod
    def for_backward(cls, ctx, values, results):
        _, pair, _, expected_log_prob, *_, retained = results
        buffer = Forward.index["main_grad"]
        # Not saved by autograd, which would refuse the buffer if another micro-batch's backward has added to it since.
        ctx.main_grad, values[buffer] = values[buffer], None
        return pair, expected_log_prob, *([retained] if saves_logits(values[Forward.index["retain"]]) else [])

    @classmethod
    def gradients(cls, ctx, values, saved, *cotangents):
        call = Forward.of(values)
        pair, expected_log_prob, *retained = saved
        grad_target_logit, grad_pair, grad_logit_sum, grad_expected_log_prob = cotangents[:4]
        if call.sparse.gradient_threshold and grad_expected_log_prob is not None:
            refuse_hole("linear_log_probs", "sparse entropy")
        if not (call.expected_log_prob and (grad_expected_log_prob is not None or call.batch_invariant)):
            expected_log_prob = None
        if call.vocab_size is not None and call.operands.linear_bias is not None:
            if expected_log_prob is not None:
                expected_log_prob = finite_in_empty_rows(expected_log_prob, pair)
            pair = finite_in_empty_rows(pair.T, pair).T
        *mask, scale_gradient = wanted(ctx, Forward, *Backward.made)
        backward, into = Backward, {}
        # a backward that asks only for other gradients leaves main_grad alone, as it leaves .grad alone
        if ctx.main_grad is not None and mask[1]:
            backward, into = BackwardInPlace, {"main_grad": ctx.main_grad}
        values = backward.like(
            call,
            cotangents=Cotangents(grad_target_logit, of_lse(grad_pair), grad_logit_sum),
            lse_pair=pair,
            output_mask=mask,
            scale_gradient=scale_gradient,
            grad_expected_log_prob=grad_expected_log_prob,
            expected_log_prob=expected_log_prob,
            retained=retained[0] if retained else None,
            **into,
        )
        gradients = backward.dispatched(values)
        if into:
            mask[1] = False
        return where_wanted(gradients, [*mask, scale_gradient], Backward.made)


def of_lse(grad_pair: Tensor | None) -> Tensor | None:  # (N, 2) -> (N,)
    return None if grad_pair is None else grad_pair[:, 1]


def finite_in_empty_rows(numbers: Tensor, pair: Tensor) -> Tensor:  # (..., N) and (N, 2), of a vocabulary shard
    """Replaces -inf by 0. A bias of -inf may switch off all classes of one shard: exp(-inf - lse) must be 0 there, not
    nan.
    """
    return numbers.masked_fill(pair[:, 1] == -torch.inf, 0.0)


class BackwardFunction(OperatorFunction):
    arguments = Backward
    learns = ("logit_scale",)
    with_derivative = ("grad_input", "grad_linear_weight", "grad_linear_bias", "grad_logit_scale")

    @classmethod
    def for_backward(cls, ctx, values, results):
        values[Backward.index["retained"]] = None
        return ()

    @classmethod
    def gradients(cls, ctx, values, saved, *grad_grads):
        call = Backward.of(values)
        if call.sparse.gradient_threshold:
            refuse_hole(cls.called(), "second of a sparse gradient")
        return second_derivatives(call, grad_grads, gradients_asked_for(ctx))


class BackwardInPlaceFunction(OperatorFunction):
    """Its results have no derivative: what it adds to main_grad is not differentiated."""

    arguments = BackwardInPlace

    @classmethod
    def check(cls, values):
        tensors = (value for value in values if isinstance(value, Tensor))
        if differentiated(*tensors):
            refuse_hole(cls.called(), "second of main_grad")


class KlDivFunction(OperatorFunction):
    function = "linear_kl_div"
    learns = ("logit_scale",)
    reverse_modes = "grad, jacrev"

    @classmethod
    def check(cls, values):
        check_constants(cls.arguments.op, "teacher", **{name: values[cls.arguments.index[name]] for name in TEACHER})


class KlDivForwardFunction(KlDivFunction):
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


class KlDivBackwardFunction(WithoutDerivative, KlDivFunction):
    arguments = KlDivBackward
    second_derivative = "second of a divergence"
