"""The numbers of rows: of all classes of a head, or of those that a support names."""

from typing import Any

from torch import Tensor

from ..math.options import TokenLosses
from ..math.support import SortedIds
from ..meta.arguments import Forward, RowOperands, SupportForward


def numbers_of_rows(problem: TokenLosses, num_classes: int, **own: Any) -> tuple[Tensor, ...]:
    """The results of linear_cross_entropy_forward. `own` are its arguments that `problem` does not have; num_classes is
    of all shards. With a support there is no logit_sum, as there are no class weights and no label smoothing.
    """
    if problem.support is None:
        return Forward.like(problem, **own).dispatched()
    operands, start = own.pop("operands", problem.operands), own.get("vocab_start", 0)
    assert operands.weight is None and not own["logit_sum"]
    shard = slice(start, start + operands.linear_weight.shape[0])
    support = SortedIds(problem.support, operands.target != problem.ignore_index, num_classes).support(shard)
    call = SupportForward.like(problem, operands=RowOperands(*operands[:4]), **own, support=support)
    target_logit, lse, *others = call.dispatched()
    return target_logit, lse, lse.new_empty(0), *others
