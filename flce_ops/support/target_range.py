"""A class index outside the vocabulary is an error, never a silent number.

On CUDA, and in an exported program, the check is an assert on the device, without a host sync; elsewhere the host looks
and raises IndexError.
"""

import torch
from torch import Tensor

from flce_ops.support.torch_private import assert_on_device


def check_target_range(target: Tensor, num_classes: int, ignore_index: int, *, on_device: bool = False) -> None:
    if not on_device and target.device.type == "cpu" and all_are_classes(target, num_classes):
        return
    valid = in_range(target, num_classes, ignore_index).all()
    assert_in_range(valid, target, num_classes, ignore_index, on_device=on_device)


def all_are_classes(target: Tensor, num_classes: int) -> bool:
    """The usual case, in one pass."""
    if not target.numel():
        return True
    lowest, highest = target.aminmax()
    return 0 <= int(lowest) and int(highest) < num_classes


def in_range(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:  # (N,) or (N, K), as the result
    return (target == ignore_index) | ((target >= 0) & (target < num_classes))


def assert_in_range(
    all_in_range: Tensor, target: Tensor, num_classes: int, ignore_index: int, *, on_device: bool = False
) -> None:
    """`all_in_range` is () bool, on target's device."""
    if on_device or target.device.type in ("cuda", "meta"):
        assert_on_device(
            all_in_range,
            f"flce_ops: expected target in [0, {num_classes}) or ignore_index {ignore_index}, "
            "got a class index outside",
        )
    elif not bool(all_in_range):
        target = target.flatten()
        position = int(torch.nonzero(~in_range(target, num_classes, ignore_index))[0, 0])
        raise IndexError(
            f"flce_ops: expected target in [0, {num_classes}) or ignore_index {ignore_index}, "
            f"got {int(target[position])} at flat position {position}"
        )
