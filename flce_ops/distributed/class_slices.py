"""Row numbers of a quantized head. One rank computes them for one slice of the vocabulary after another, as ranks do
for their shards.

    forward     for each slice of classes:  W_s dequantized,  lse_s, target_logit_s, ... of input @ W_s.T
                the numbers of all slices are combined like those of ranks (vocab_parallel.py)
    backward    for each slice:  W_s dequantized and its logits made again,  grad_input += G_s @ W_s, in float32

A step with gradients takes three GEMM passes. Neither the dequantized W nor a row of all logits is in memory at any
time, and W gets no gradient.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..math.options import Operands, TokenLosses
from ..math.precision import accumulation_dtype
from ..math.statistics import Rows, asked_of_rows
from ..support.holes import refuse_hole
from ..support.quantized import QuantizedHead
from .vocab_parallel import rows_of_shard, whole_rows

# N tokens, k numbers of a row, D hidden, V vocabulary, v classes of a slice, R slices


def rows_of_slices(problem: TokenLosses, head: QuantizedHead) -> Rows:
    asked = asked_of_rows(problem)
    names = [name for name, wanted in asked.items() if wanted] + ["max_logit"] * asked["argmax"]
    input, _, target, linear_bias, weight = problem.operands
    slices = head.slices(input.dtype)
    rest = replace(
        problem, operands=Operands(cast(Any, None), cast(Any, None), target, None, weight)
    )  # the graph of a compiled program keeps this
    numbers = NumbersOfSlices.apply(input, linear_bias, rest, head, slices)
    return whole_rows(problem, asked, names, numbers, slices)


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
