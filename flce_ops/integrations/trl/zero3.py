"""Parameters under DeepSpeed's ZeRO-3, whose values exist only inside the modules that own them.

    forward     with gathered(weight, bias):                  TRL's own context: the values exist
                    with gathered_in_backward(weight, bias):  autograd saves the parameter itself instead of its values
                        ...
    backward    an operator reads what was saved: gathers the values again, copies them, frees them

Without ZeRO-3 both contexts do nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


def gathered(*parameters: Any) -> contextlib.AbstractContextManager:
    from trl.trainer import utils

    return utils.maybe_gather_lm_head_ctx(*parameters)


@contextlib.contextmanager
def gathered_in_backward(*parameters: Tensor | None) -> Iterator[None]:
    if not is_deepspeed_zero3_enabled():
        yield
        return
    # casts and views of parameters keep their values
    taken = [parameter for parameter in parameters if isinstance(parameter, nn.Parameter)]

    def pack(tensor: Tensor) -> tuple[bool, Tensor]:
        for parameter in taken:
            if tensor.shape == parameter.shape and tensor.data_ptr() == parameter.data_ptr():
                return True, parameter
        return False, tensor

    def unpack(kept: tuple[bool, Tensor]) -> Tensor:
        taken_away, tensor = kept
        if not taken_away:
            return tensor
        with gathered(tensor):
            return cast(Tensor, tensor.detach().clone())

    with saved_tensors_hooks(pack, unpack):
        yield
