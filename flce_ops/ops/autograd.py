"""What the operators of a head save and what comes back; nothing here computes a logit.

forward            saves its arguments, lse, retained logits                 <- backward
with_grad          saves its arguments, the gradients made in the same pass  <- times one scalar:
                                                                                made_in_forward.py
backward           saves its arguments                                       <- double_backward
double_backward    saves its arguments but the first three, in which         <- their change along a direction;
                   it is linear                                                 third derivatives are refused
"""

import torch
from torch import Tensor

from flce_ops.aten.backward_tangent import Direction, backward_tangent
from flce_ops.math.options import Cotangents
from flce_ops.meta.arguments import Backward, BackwardInPlace, DoubleBackward, Forward, GradGrads
from flce_ops.ops.formula import (
    OPERANDS,
    SPARSE_SECOND_DERIVATIVE_REFUSAL,
    Formula,
    save,
    saved,
    wanted,
    where_wanted,
)
from flce_ops.ops.paths import choice_of
from flce_ops.ops.retained import retained_rows
from flce_ops.support.differentiated import differentiated
from flce_ops.support.torch_private import runs_in_this_backward, save_without_version_check, traced_input

# N tokens, D hidden, V vocabulary

SPARSE_ENTROPY_REFUSAL = (
    "linear_log_probs: the gradient of the entropy with gradient_threshold is not implemented, as it is not made of "
    "probabilities alone; detach the entropy, or leave gradient_threshold out"
)


class ForwardFormula(Formula):
    """target_logit, lse, logit_sum and expected_log_prob have a gradient; the others are constants."""

    arguments = Forward
    op = "linear_cross_entropy_forward"
    per_token = ("input", "target")

    @classmethod
    def with_gradient(cls, values):
        retain = Forward.index["retain"]
        values[retain] = values[retain] or retained_rows(Forward.of(values))

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = Forward.of(inputs)
        _, lse, logit_sum, expected_log_prob, *others = output
        ctx.set_materialize_grads(False)
        *constants, lse_rest, retained = others
        constants += [lse_rest, retained]
        constants += [] if call.logit_sum else [logit_sum]
        constants += [] if call.expected_log_prob else [expected_log_prob]
        ctx.mark_non_differentiable(*constants)
        # Not saved: autograd would refuse it once the backward of another micro-batch has added to it.
        ctx.main_grad, call.main_grad = call.main_grad, None
        ctx.traced = None if ctx.main_grad is None else traced_input(ctx.main_grad)
        save(ctx, call.values(), lse, expected_log_prob, lse_rest, *([retained] if call.retain else []))

    @staticmethod
    def backward(ctx, grad_target_logit, grad_lse, grad_logit_sum, grad_expected_log_prob, *_):
        call, (lse, expected_log_prob, lse_rest, *retained) = saved(ctx, Forward)
        grad_logit_sum = grad_logit_sum if call.logit_sum else None
        grad_expected_log_prob = grad_expected_log_prob if call.expected_log_prob else None
        cotangents = Cotangents(grad_target_logit, grad_lse, grad_logit_sum)
        if all(cotangent is None for cotangent in (*cotangents, grad_expected_log_prob)):
            return Forward.gradients()
        if call.sparse.gradient_threshold and grad_expected_log_prob is not None:
            raise NotImplementedError(SPARSE_ENTROPY_REFUSAL)
        expected_log_prob = None if grad_expected_log_prob is None else expected_log_prob
        if call.vocab_size is not None and call.operands.linear_bias is not None:
            if expected_log_prob is not None:
                expected_log_prob = finite_in_empty_rows(expected_log_prob, lse)
            lse = finite_in_empty_rows(lse, lse)
        mask = wanted(ctx, Forward, *OPERANDS)
        backward, into = torch.ops.flce.linear_cross_entropy_backward, {}
        if ctx.main_grad is not None and mask[1]:
            # as .grad, it stays as it is in a backward that was asked for other gradients alone
            mask[1] = runs_in_this_backward(ctx.next_functions[1][0])
            if mask[1]:
                backward, into = torch.ops.flce.linear_cross_entropy_backward_, {"main_grad": ctx.main_grad}
        if ctx.traced is not None:  # here: all of the traced forward is known
            save_without_version_check(ctx.traced, torch.ops.flce.linear_cross_entropy_forward.default)
        gradients = backward(
            *cotangents,
            *call.operands,
            lse,
            ignore_index=call.ignore_index,
            **call.logits._asdict(),
            vocab_start=call.vocab_start,
            output_mask=mask,
            grad_expected_log_prob=grad_expected_log_prob,
            expected_log_prob=expected_log_prob,
            lse_rest=lse_rest,
            retained=retained[0] if retained else None,
            **call.sparse._asdict(),
            **into,
        )
        if into:
            mask[1] = False
        return Forward.gradients(**where_wanted(gradients, mask))


def finite_in_empty_rows(numbers: Tensor, lse: Tensor) -> Tensor:  # (N,), of a vocabulary shard
    """A bias of -inf may switch off all classes of one shard: exp(-inf - lse) is to be 0 there, not nan."""
    return numbers.masked_fill(lse == -torch.inf, 0.0)


class BackwardFormula(Formula):
    arguments = Backward
    op = "linear_cross_entropy_backward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = Backward.of(inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for result, want in zip(output, call.output_mask) if not want))
        ctx.has_expectation = call.grad_expected_log_prob is not None
        call.grad_expected_log_prob = call.expected_log_prob = call.retained = None
        save(ctx, call.values())

    @staticmethod
    def backward(ctx, *grad_grads):
        call, _ = saved(ctx, Backward)
        grad_grads = [grad if want else None for grad, want in zip(grad_grads, call.output_mask)]
        if all(grad is None for grad in grad_grads):
            return Backward.gradients()
        if call.sparse.gradient_threshold:
            raise NotImplementedError(SPARSE_SECOND_DERIVATIVE_REFUSAL)
        if ctx.has_expectation:
            raise NotImplementedError(
                "linear_log_probs: second derivatives through the entropy are not implemented; detach the entropy, or "
                "compute it from F.linear's logits"
            )
        found = torch.ops.flce.linear_cross_entropy_double_backward(
            *grad_grads,
            *call.cotangents,
            *call.operands,
            call.lse,
            ignore_index=call.ignore_index,
            **call.logits._asdict(),
            vocab_start=call.vocab_start,
            lse_rest=call.lse_rest,
        )
        names = (*Cotangents._fields, *OPERANDS)
        return Backward.gradients(**where_wanted(found, wanted(ctx, Backward, *names), names))


class BackwardInPlaceFormula(Formula):
    """None: what was added to main_grad has no derivative."""

    arguments = BackwardInPlace
    op = "linear_cross_entropy_backward_"

    @classmethod
    def check(cls, op, values):
        tensors = (value for value in values if isinstance(value, Tensor))
        if differentiated(*tensors):
            raise NotImplementedError(
                "linear_cross_entropy: a backward that adds to main_grad cannot be differentiated (create_graph=True); "
                "leave main_grad out where a second derivative is wanted"
            )


class DoubleBackwardFormula(Formula):
    """Derivatives by the first three arguments only.

    They are cotangents, in which it is linear: torch.autograd.functional.hvp differentiates by them.
    """

    arguments = DoubleBackward
    op = "linear_cross_entropy_double_backward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = DoubleBackward.of(inputs)
        ctx.tensors = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.set_materialize_grads(False)
        call.grad_grads = GradGrads(None, None, None)  # it is linear in them
        save(ctx, call.values())

    @staticmethod
    def backward(ctx, *direction):
        edges = zip(ctx.tensors, ctx.next_functions)
        others = any(runs_in_this_backward(node) for index, (node, _) in edges if index >= 3 and node is not None)
        if others or torch.is_grad_enabled():
            raise NotImplementedError(
                "linear_cross_entropy: third derivatives are not implemented; use F.cross_entropy(F.linear(...)) for "
                "them"
            )
        call, _ = saved(ctx, DoubleBackward)
        call.choice = choice_of(DoubleBackwardFormula.op, call)
        changes = backward_tangent(Direction(*direction), call)
        return DoubleBackward.gradients(**where_wanted(changes, ctx.needs_input_grad, GradGrads._fields))
