"""Row numbers of a quantized head. One rank computes them for one slice of the vocabulary after another, as ranks do
for their shards.

    forward     for each slice of classes:  W_s dequantized,  lse_s, target_logit_s, ... of input @ W_s.T
                the numbers of all slices are combined like those of ranks (vocab_parallel.py)
    backward    for each slice:  W_s dequantized and its logits made again,  grad_input += G_s @ W_s, in float32

A step with gradients takes three GEMM passes. Neither the dequantized W nor a row of all logits is in memory at any
time, and W gets no gradient.

    weight[classes].dequantize()        torchao's tensors, torch's own quantized ones, and subclasses like them
    some of the 4-bit blocks            bitsandbytes' Params4bit, whose own shape is that of the packed bytes
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..math.options import Operands, TokenLosses, accumulation_dtype
from ..math.statistics import Rows, asked_of_rows
from ..meta.checks import is_quantized
from ..support.holes import refuse_hole
from ..support.integers import cdiv
from ..support.workspace import get_workspace
from .vocab_parallel import rows_of_shard, whole_rows

# N tokens, k numbers of a row, D hidden, V vocabulary, v classes of a slice, R slices


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
    blocks = slice(first // state.blocksize, cdiv(first + numbers, state.blocksize))
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


def has_slices(weight: Tensor) -> bool:
    """Whether slices of the weight can be dequantized. Other quantized weights are refused later, by the check for
    dense tensors.
    """
    state = packed_state(weight)
    if state is not None:
        return len(state.shape) == 2
    if not is_quantized(weight) or weight.dim() != 2 or hasattr(weight, "get_original_weight"):
        return False
    if weight.is_quantized:  # torch's own: slices of those with a scale for each class are wrong or fail
        return weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    try:
        weight[:1].dequantize()
    except Exception:  # a subclass may raise any error for a slice
        return False
    return True


def rows_of_slices(problem: TokenLosses, head: QuantizedHead) -> Rows:
    asked = asked_of_rows(problem)
    names = [name for name, wanted in asked.items() if wanted] + ["max_logit"] * asked["argmax"]
    input, _, target, linear_bias, weight = problem.operands
    slices = head.slices(input.dtype)
    rest = replace(
        problem, operands=Operands(cast(Any, None), cast(Any, None), target, None, weight)
    )  # the graph of a compiled program keeps this
    numbers = NumbersOfSlices.apply(input, linear_bias, rest, head, slices)
    return whole_rows(problem, problem.valid, names, numbers, slices)


class NumbersOfSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # (N, D)
        linear_bias: Tensor | None,  # (V,)
        problem: TokenLosses,
        head: QuantizedHead,
        slices: list[slice],
    ) -> Tensor:  # (R, k, N)
        ctx.save_for_backward(input, linear_bias)
        ctx.problem, ctx.head, ctx.slices = problem, head, slices
        numbers = []
        for classes in slices:
            bias = None if linear_bias is None else linear_bias[classes]
            numbers.append(numbers_of_slice(problem, head, classes, input, bias))
        return torch.stack(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = ctx.needs_input_grad[:2]
        gradients = GradientsOfSlices.apply(grad, *ctx.saved_tensors, ctx.problem, ctx.head, ctx.slices, wanted)
        return *gradients, None, None, None


class GradientsOfSlices(torch.autograd.Function):
    """The gradients of the slices. They have no derivative. The sums are not written in place, because a cotangent may
    have a batch (is_grads_batched=True).
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,  # (R, k, N)
        input: Tensor,  # (N, D)
        linear_bias: Tensor | None,  # (V,)
        problem: TokenLosses,
        head: QuantizedHead,
        slices: list[slice],
        wanted: tuple[bool, bool],  # grad_input, grad_linear_bias
    ) -> tuple[Tensor | None, Tensor | None]:
        want_input, want_bias = wanted
        grad_input, grad_bias = torch.zeros_like(input, dtype=accumulation_dtype(input.dtype)), []
        for classes, of_slice in zip(slices, grad):
            hidden = input.detach().requires_grad_(want_input)
            bias = None if linear_bias is None else linear_bias[classes].detach().requires_grad_(want_bias)
            with torch.enable_grad():
                numbers = numbers_of_slice(problem, head, classes, hidden, bias)
            found = list(torch.autograd.grad(numbers, [hidden] * want_input + [bias] * want_bias, of_slice))
            if want_bias:
                grad_bias.append(found.pop())
            if want_input:
                grad_input = grad_input + found.pop()
        return grad_input.to(input.dtype) if want_input else None, torch.cat(grad_bias) if want_bias else None

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_hole("linear_cross_entropy", "second of a quantized head")


def numbers_of_slice(
    problem: TokenLosses, head: QuantizedHead, classes: slice, input: Tensor, linear_bias: Tensor | None
) -> Tensor:  # (k, N)
    linear_weight = head.dense(classes, input.dtype)
    operands = problem.operands._replace(input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    shard = replace(problem, operands=operands)
    return rows_of_shard(shard, classes, head.shape[0], asked_of_rows(problem)).stacked()
