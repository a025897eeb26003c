"""Tokens whose support is empty, in a call with a support. They have all classes, so the ordinary operators of a head
compute them.

    sizes     3  1  0  2  0           target    7  4  5  2  -100
    of a head, with the target        -  -  5  -  -                 the others as ignored tokens

If there are no such tokens, a CPU does not call these operators. On CUDA only the device knows, so the kernels are
launched and return immediately if their chunk has no token. In backward these operators get a small part of the
workspace, because usually there are no such tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.options import Operands
from ..support.workspace import get_workspace, reserved
from .arguments import Backward, Forward, SupportBackward, SupportForward
from .outputs import Gradients, outputs

NOTE = "the classes of a support are gathered"  # for last_path(), of both implementations
SHARE = 8  # in backward these operators get 1 / 8 of the workspace


def tokens_of_all_classes(call: SupportForward | SupportBackward) -> Tensor | None:  # (N,) bool, None for none
    found = (call.support.sizes == 0) & (call.operands.target != call.ignore_index)
    return None if found.device.type == "cpu" and not bool(found.any()) else found


def of_head(call: SupportForward | SupportBackward, tokens: Tensor) -> Operands:
    target = torch.where(tokens, call.operands.target, call.ignore_index)
    return Operands(*call.operands)._replace(target=target)


def with_all_classes(call: SupportForward, results: Sequence[Tensor]) -> None:
    """Writes the results of the tokens without a support into `results`."""
    tokens = tokens_of_all_classes(call)
    if tokens is None:
        return
    *found, _ = Forward.like(call, operands=of_head(call, tokens)).dispatched()
    del found[2]  # logit_sum
    for result, dense in zip(results, found):
        if result.numel():
            result.copy_(torch.where(tokens, dense, result))


def gradients_of_all_classes(call: SupportBackward) -> tuple[Gradients, bool]:
    """Returns the gradients, and whether they hold the part of the tokens without a support. If not, they are
    uninitialised.
    """
    tokens = tokens_of_all_classes(call)
    if tokens is None:
        return outputs(call), False
    workspace = get_workspace()
    with reserved(workspace - workspace // SHARE):
        return Backward.like(call, operands=of_head(call, tokens)).dispatched(), True
