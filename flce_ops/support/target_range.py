"""A class index outside the vocabulary is an error, never a silent number.

On CUDA, and in an exported program, the check is an assert on the device, without a host sync; elsewhere the host looks
and raises IndexError.
"""

import torch
from torch import Tensor

from flce_ops.support.torch_private import assert_on_device


def check_target_range(target: Tensor, num_classes: int, ignore_index: int, *, on_device: bool = False) -> None:
    valid = (target == ignore_index) | ((target >= 0) & (target < num_classes))
    if on_device or target.device.type == "cuda":
        assert_on_device(
            valid.all(),
            f"flce_ops: expected target in [0, {num_classes}) or ignore_index {ignore_index}, "
            "got a class index outside",
        )
    elif not bool(valid.all()):
        position = int(torch.nonzero(~valid)[0, 0])
        raise IndexError(
            f"flce_ops: expected target in [0, {num_classes}) or ignore_index {ignore_index}, "
            f"got {int(target[position])} at flat position {position}"
        )
