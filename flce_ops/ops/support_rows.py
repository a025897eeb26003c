"""Calls the forward operator of a support, with the arguments and results of a head's forward operator."""

from typing import Any

from torch import Tensor

from ..math.options import TokenLosses
from ..math.support import TokenIds
from ..meta.arguments import RowOperands, SupportForward


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
