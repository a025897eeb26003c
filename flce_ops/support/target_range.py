"""A class index outside the vocabulary is an error, never a silent number.

On CUDA the check is a device-side assert, without a host sync; elsewhere the host looks and raises IndexError.
"""

import torch
from torch import Tensor

from flce_ops.support.torch_private import assert_on_device


def check_target_range(target: Tensor, num_classes: int, ignore_index: int) -> None:
    assert_in_range(in_range(target, num_classes, ignore_index).all(), target, num_classes, ignore_index)


def in_range(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:  # (N,) -> (N,)
    return (target == ignore_index) | ((target >= 0) & (target < num_classes))


def assert_in_range(all_in_range: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> None:
    """`all_in_range` is () bool, on target's device."""
    if target.device.type == "cuda":
        assert_on_device(
            all_in_range,
            f"flce_ops: expected target in [0, {num_classes}) or ignore_index {ignore_index}, "
            "got a class index outside",
        )
    elif not bool(all_in_range):
        position = int(torch.nonzero(~in_range(target, num_classes, ignore_index))[0, 0])
        raise IndexError(
            f"flce_ops: expected target in [0, {num_classes}) or ignore_index {ignore_index}, "
            f"got {int(target[position])} at flat position {position}"
        )
