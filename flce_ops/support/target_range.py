"""A class index outside the vocabulary raises an error; it never gives a wrong number silently.

On CUDA the check is an assert on the device, without a host synchronisation. Elsewhere the host checks and raises
IndexError.
"""

from typing import Any

import torch
from torch import Tensor

from .torch_private import assert_on_device


def in_range(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:  # (N,) or (N, K), as the target
    return (target == ignore_index) | ((target >= 0) & (target < num_classes))


def assert_in_range(all_in_range: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> None:
    """`all_in_range` is () bool, on target's device."""
    if target.device.type in ("cuda", "meta"):
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
            f"got {int(target[position])} at flat position {position}; set targets that do not count to {ignore_index}"
        )


def check_target_range(call: Any) -> bool:
    """Checks the targets. Returns whether all tokens are known to be valid, which a CPU finds out in the same pass."""
    target, ignore_index, num_classes = call.operands.target, call.ignore_index, vars(call).get("vocab_size")
    if num_classes is None:
        num_classes = call.operands.num_classes
    if target.device.type == "cpu":
        if not target.numel():
            return False
        lowest, highest = map(int, target.aminmax())
        if 0 <= lowest and highest < num_classes:
            return not lowest <= ignore_index <= highest
    valid = in_range(target, num_classes, ignore_index).all()
    assert_in_range(valid, target, num_classes, ignore_index)
    return False
