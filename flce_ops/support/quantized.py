"""Weights of frozen heads that are kept quantized: slices of their classes, dequantized into the workspace.

weight[classes].dequantize()        torchao's tensors, torch's own quantized ones, and subclasses like them
some of the 4-bit blocks      bitsandbytes' Params4bit, whose own shape is that of the packed bytes
"""

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .workspace import get_workspace

# D hidden, V vocabulary, v classes of a slice

SHARE = 4  # a slice takes at most 1 / 4 of the workspace
CLASSES_AT_LEAST = 128  # in a slice, also in a small workspace: formats pack rows in groups


class QuantizedHead:
    def __init__(self, weight: Any) -> None:
        self.weight, self.state = weight, packed_state(weight)
        self.shape: Sequence[int] = weight.shape if self.state is None else self.state.shape  # (V, D)

    def like(self, dtype: torch.dtype) -> Tensor:  # (V, D)
        """A tensor with the dense weight's shape, dtype and device that takes the memory of one number."""
        return torch.empty(1, 1, dtype=dtype, device=self.weight.device).expand(*self.shape)

    def slices(self, dtype: torch.dtype) -> list[slice]:
        num_classes, features = self.shape
        step = get_workspace() // SHARE // max(features * dtype.itemsize, 1)
        step = max(step - step % CLASSES_AT_LEAST, CLASSES_AT_LEAST)
        if self.state is not None:  # whole blocks
            step = math.lcm(step, self.state.blocksize // math.gcd(features, self.state.blocksize))
        return [slice(start, min(start + step, num_classes)) for start in range(0, num_classes, step)]

    def dense(self, classes: slice, dtype: torch.dtype) -> Tensor:  # (v, D)
        if self.state is None:
            return self.weight[classes].dequantize().to(dtype)
        return dequantized_blocks(self.weight, self.state, classes).to(dtype)


def packed_state(weight: Any) -> Any:
    """bitsandbytes' QuantState, or None."""
    state = getattr(weight, "quant_state", None)
    return state if state is not None and hasattr(state, "blocksize") else None


def dequantized_blocks(weight: Tensor, state: Any, classes: slice) -> Tensor:  # (v, D)
    """Blocks are runs of `blocksize` numbers of the flat weight, two numbers a byte, with a float32 scale each."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes.functional")
    count, features = classes.stop - classes.start, state.shape[1]
    first, numbers = classes.start * features, count * features
    blocks = slice(first // state.blocksize, -(-(first + numbers) // state.blocksize))
    scales = state.absmax
    if state.nested:  # V D / blocksize scales, which are small compared with a slice
        scales = bitsandbytes.dequantize_blockwise(scales, state.state2).add_(state.offset)
    of_slice = bitsandbytes.QuantState(
        absmax=scales.float()[blocks],
        shape=torch.Size((count, features)),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    packed = weight.data.reshape(-1)[first // 2 : (first + numbers + 1) // 2]
    return bitsandbytes.dequantize_4bit(packed.reshape(-1, 1), of_slice)
