"""Tokens without a support among those that have one: they have all classes, by the operators of a head.

    sizes     3  1  0  2  0           target    7  4  5  2  -100
    of a head, with the target        -  -  5  -  -                 the others as ignored tokens

Where no token is left, a CPU sees that and calls nothing. On CUDA only the device knows: the kernels are launched, and
those of a chunk without tokens leave at once. They get little of the workspace, as mostly nothing needs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.options import Operands
from ..support.workspace import get_workspace, reserved
from .arguments import Backward, Forward, SupportBackward, SupportForward
from .outputs import Gradients, outputs

WORKSPACES_OF_OTHERS = 8  # of the workspace one part is theirs


def tokens_of_all_classes(call: SupportForward | SupportBackward) -> Tensor | None:  # (N,) bool, None for none
    found = (call.support.sizes == 0) & (call.operands.target != call.ignore_index)
    return None if found.device.type == "cpu" and not bool(found.any()) else found


def of_head(call: SupportForward | SupportBackward, tokens: Tensor) -> Operands:
    target = torch.where(tokens, call.operands.target, call.ignore_index)
    return Operands(*call.operands)._replace(target=target)


def with_all_classes(call: SupportForward, results: Sequence[Tensor]) -> None:
    """Fills in what `results` are at the tokens without a support."""
    tokens = tokens_of_all_classes(call)
    if tokens is None:
        return
    *found, _ = Forward.like(call, operands=of_head(call, tokens)).dispatched()
    del found[2]  # logit_sum
    for result, dense in zip(results, found):
        if result.numel():
            result.copy_(torch.where(tokens, dense, result))


def gradients_of_all_classes(call: SupportBackward) -> tuple[Gradients, bool]:
    """The results, and whether the gradients of the tokens without a support are in them; else they hold nothing."""
    tokens = tokens_of_all_classes(call)
    if tokens is None:
        return outputs(call), False
    with reserved(get_workspace() - get_workspace() // WORKSPACES_OF_OTHERS):
        return Backward.like(call, operands=of_head(call, tokens)).dispatched(), True
