"""What the operators of a support save for backward, and what backward calls. Nothing here computes a logit.

forward            saves its arguments, lse and the products             <- backward
backward           saves nothing                                         <- refused by name
"""

from typing import Any

from torch import Tensor

from ..math.options import Cotangents, TokenLosses
from ..math.support import TokenIds
from ..meta.arguments import RowOperands, SupportBackward, SupportForward
from .autograd import finite_in_empty_rows
from .function import OPERANDS, OperatorFunction, WithoutDerivative, wanted, where_wanted


class ForwardFunction(OperatorFunction):
    function = "linear_log_probs"
    arguments = SupportForward
    with_derivative = ("target_logit", "lse", "expected_log_prob")

    @classmethod
    def for_backward(cls, ctx, call, results):
        _, lse, expected_log_prob, *_, lse_rest, products = results
        return lse, expected_log_prob, lse_rest, products

    @classmethod
    def gradients(cls, ctx, call, saved, grad_target_logit, grad_lse, grad_expected_log_prob, *_):
        lse, expected_log_prob, lse_rest, products = saved
        mask = wanted(ctx, SupportForward, *OPERANDS)
        expected_log_prob = None if grad_expected_log_prob is None else expected_log_prob
        if call.vocab_size is not None:  # a shard may have no class of a token's support
            if expected_log_prob is not None:
                expected_log_prob = finite_in_empty_rows(expected_log_prob, lse)
            lse = finite_in_empty_rows(lse, lse)
        gradients = SupportBackward.like(
            call,
            cotangents=Cotangents(grad_target_logit, grad_lse, None),
            products=products,
            lse=lse,
            output_mask=mask,
            grad_expected_log_prob=grad_expected_log_prob,
            expected_log_prob=expected_log_prob,
            lse_rest=lse_rest,
        ).dispatched()
        return where_wanted(gradients, mask)


class BackwardFunction(WithoutDerivative):
    function = "linear_log_probs"
    arguments = SupportBackward
    second_derivative = "second of a support"


def forward_of_support(problem: TokenLosses, ids: TokenIds, num_classes: int, **own: Any) -> tuple[Tensor, ...]:
    """Returns results in the order of linear_cross_entropy_forward. There is no logit sum, because no caller has label
    smoothing.

    `own` has the arguments that `problem` lacks. num_classes counts the classes of all shards.
    """
    operands, start = own.pop("operands", problem.operands), own.get("vocab_start", 0)
    assert operands.weight is None and not own["logit_sum"]
    shard = slice(start, start + operands.linear_weight.shape[0])
    support = ids.support(operands.target != problem.ignore_index, num_classes, shard)
    call = SupportForward.like(problem, operands=RowOperands(*operands[:4]), **own, support=support)
    target_logit, lse, *others = call.dispatched()
    return target_logit, lse, lse.new_empty(0), *others
