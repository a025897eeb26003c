"""The argument `support`, the classes that each token was sampled from. It has two forms; the operators take the ids of
all tokens in one list.

    (..., K)              padded with -1                  [[7, 3, 9], [4, -1, -1], [-1, -1, -1]]
    (ids, offsets)        token i has ids[offsets_i : offsets_(i + 1)]       [7, 3, 9, 4], [0, 3, 4, 4]

The support of a token without ids is all classes. A class that is named twice counts once.
"""

from typing import Any

from torch import Tensor

from ..distributed.one_rank import OneRank
from ..math.support import PaddedIds, RaggedIds, TokenIds
from ..meta.checks import TARGET_DTYPES, check_dense, check_device
from ..support.dtensors import any_dtensor
from ..support.torch_private import check_value
from .schemas import LogProbs, RowLoss

MOST_IDS = 2**31 - 1  # the lists of gradients are counted in int32 (triton/sparse/class_order.py)

# N tokens, K ids of each, E ids of all


def parts_of_support(op: str, support: Any) -> tuple[Tensor | None, Tensor | None]:
    """The ids and the offsets of the argument, as the operators take them. Offsets are None for padded ids."""
    if support is None or isinstance(support, Tensor):
        return support, None
    if isinstance(support, tuple | list) and len(support) == 2 and all(isinstance(part, Tensor) for part in support):
        return support[0], support[1]
    got = type(support).__name__
    raise TypeError(f"{op}: expected support to be a tensor of ids (..., K) or a pair (ids, offsets), got {got}")


def support_of_call(op: str, layout: OneRank, call: LogProbs | RowLoss, target: Tensor) -> TokenIds | None:
    """The support of the flattened tokens. `target` is (N,), as layout.head returns it."""
    support, offsets = call.support, call.support_offsets
    if support is None:
        return None
    check_support(op, call)
    given: TokenIds
    if offsets is None:
        given = PaddedIds(layout.per_token(support))
    else:
        offsets = offsets.long()
        rises = (offsets.diff() >= 0).all() & (offsets[0] == 0) & (offsets[-1] <= support.shape[0])
        check_value(
            rises, f"{op}: expected offsets of support to rise from 0 to at most the number of ids, {support.shape[0]}"
        )
        begins, ends = (layout.per_token(of.reshape(layout.shape)) for of in (offsets[:-1], offsets[1:]))
        given = RaggedIds(support.long(), begins, ends)
    num_classes = layout.num_classes
    inside = (given.ids >= -1) & (given.ids < num_classes)
    check_value(
        (inside | ~given.read(target != call.ignore_index)).all(),
        f"{op}: expected support of class indices in [0, {num_classes}), or -1 for none, got another",
    )
    if target.device.type == "cpu":
        counts = (target != call.ignore_index) & (target >= 0) & (target < num_classes)
        check_value(
            given.hold(target, counts).all(),
            f"{op}: expected target to be among the ids of its token's support, got one outside; a token without ids "
            "has all classes",
        )
    return given


def check_support(op: str, call: LogProbs | RowLoss) -> None:
    support, offsets, tokens = call.support, call.support_offsets, tuple(call.input.shape[:-1])
    assert support is not None
    named: dict[str, Any] = {"support": support, "offsets of support": offsets}
    check_dense(op, **named)
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype not in TARGET_DTYPES:
            raise TypeError(f"{op}: expected {name} in int64 or int32, got {tensor.dtype}")
    check_device(op, call.input, **named)
    ids = support.numel()
    if isinstance(ids, int) and ids > MOST_IDS:  # in a trace it may not be known
        raise ValueError(f"{op}: expected support of at most {MOST_IDS} ids, got {ids}; pass fewer tokens at a time")
    if offsets is None:
        if support.dim() != len(tokens) + 1 or support.shape[:-1] != tokens:
            raise ValueError(
                f"{op}: expected support of shape {tokens} + (K,), ids per token of input "
                f"{tuple(call.input.shape)}, got {tuple(support.shape)}"
            )
        return
    count = call.input.shape[:-1].numel()
    if support.dim() != 1 or offsets.shape != (count + 1,):
        raise ValueError(
            f"{op}: expected support to be a pair of ids (E,) and offsets ({count + 1},), one more than tokens, got "
            f"{tuple(support.shape)} and {tuple(offsets.shape)}"
        )
    if any_dtensor(support, offsets):
        raise ValueError(
            f"{op}: expected ids and offsets of support, which are of all tokens, as plain tensors that are the same "
            "on every rank, got DTensors"
        )
