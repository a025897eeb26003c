"""Calls the forward operator of a support, with the arguments and results of a head's forward operator."""

from typing import Any

from torch import Tensor

from .._ops import ops
from ..math.options import Operands
from ..math.support import SortedIds, TokenIds


def forward_of_support(
    operands: Operands,  # without class weights
    ids: TokenIds,
    num_classes: int,  # of all shards
    *,
    ignore_index: int,
    vocab_start: int = 0,
    logit_sum: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Returns results in the order of linear_cross_entropy_forward. There is no logit sum, because no caller has label
    smoothing.
    """
    assert operands.weight is None and not logit_sum
    shard = slice(vocab_start, vocab_start + operands.linear_weight.shape[0])
    support = SortedIds(ids, operands.target != ignore_index, num_classes).support(shard)
    target_logit, lse, *others = ops.linear_support_forward(
        *operands[:4], *support, ignore_index=ignore_index, vocab_start=vocab_start, **options
    )
    return target_logit, lse, lse.new_empty(0), *others
