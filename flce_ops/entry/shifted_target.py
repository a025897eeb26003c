"""Unshifted labels of a causal language model: position t is scored against the label of position t + 1.

    labels    a b c d        target    b c d ignored        for each sequence, the last dimension of labels

Only one small tensor is made, the shifted labels. Hidden states, logits and results keep their length. The last
position is an ignored token like any other.
"""

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from ..distributed.one_rank import any_dtensor
from ..meta.checks import check_dense
from ..support.holes import refuse_hole
from .arguments import resolve_ignore_index

# T tokens of a sequence, D hidden, V vocabulary


def shifted_target(
    op: str,
    labels: Tensor | None,  # (..., T)
    rows: Tensor,  # (..., T, D) hidden states, or (..., T, V) logits
    ignore_index: int | None,
) -> Tensor:  # (..., T)
    if labels is None:
        raise ValueError(f"{op}: shift=True expects the labels that are shifted, got target=None; pass target")
    check_dense(op, target=labels)
    if labels.is_floating_point() or labels.dim() == 0 or labels.dim() != rows.dim() - 1:
        raise ValueError(
            f"{op}: shift=True expects target to be class indices of shape (..., T), one per token of "
            f"{tuple(rows.shape)}, got {labels.dtype} of shape {tuple(labels.shape)}; shift other targets yourself"
        )
    ignore_index = resolve_ignore_index(op, ignore_index, labels)
    return shifted_shards(op, labels, ignore_index) if any_dtensor(labels) else next_labels(labels, ignore_index)


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:  # (..., T) -> (..., T)
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # pad before slicing: this order works for T = 0


def shifted_shards(op: str, labels: Tensor, ignore_index: int) -> Tensor:
    """Shifts a DTensor whose ranks hold whole sequences. The layout of input does not matter."""
    from torch.distributed.tensor import DTensor, Shard  # imported here, for users of DTensors only

    from ..distributed.layout import describe, globalize, splits

    assert isinstance(labels, DTensor)
    for ranks, placement in zip(labels.device_mesh.shape, labels.placements):
        if ranks > 1 and splits(placement) and cast(Shard, placement).dim % labels.dim() == labels.dim() - 1:
            refuse_hole(op, "shift over ranks", layout=describe(labels))
    local = next_labels(labels.to_local(), ignore_index)
    return globalize(labels.device_mesh, local.contiguous(), labels.placements, labels.shape)
