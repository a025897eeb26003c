"""Shared by the two derivatives of the backward operator: the logits along a direction, and the products at the end.

Primes mark a direction in input, linear_weight and linear_bias. G is the logit gradient and G' its change, which a
double backward calls dL/du:

    u' = input' @ linear_weight.T + input @ linear_weight'.T + bias'
    out_input = G' @ linear_weight + G @ linear_weight'       out_linear_weight = G'.T @ input + G.T @ input'
    out_linear_bias = G'.T @ 1
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.options import LogitOptions
from ..math.topk import tokens_that_count
from ..meta.arguments import DoubleBackward
from .chunks import chunk_product, row_chunks, rows_per_chunk
from .logits import chunk_logits_with_slope, probabilities

# N tokens, n rows of a chunk, D hidden, V vocabulary


class SecondOrder:
    """Loops over chunks of rows. Two of the results are summed over chunks, in the accumulation dtype."""

    def __init__(
        self,
        call: DoubleBackward,
        direction: tuple[Tensor | None, Tensor | None, Tensor | None],  # (N, D), (V, D), (V,)
        out: Sequence[Tensor],  # three, in the order of meta.outputs.Gradients
    ) -> None:
        self.call, self.out = call, out
        self.input, self.linear_weight, _, self.linear_bias, _ = call.operands
        valid = tokens_that_count(call.operands.target, call.ignore_index)
        self.lse = torch.where(valid, call.lse, torch.inf)  # so p is 0 for ignored tokens
        self.along_input, self.along_weight, self.along_bias = direction
        self.weight_sum = torch.zeros_like(self.linear_weight, dtype=call.lse.dtype)
        self.bias_sum = torch.zeros_like(out[2], dtype=call.lse.dtype)

    def chunks(self) -> list[slice]:
        # u', p and four temporaries of G'; with a softcap also the slope and one more
        matrices = 6 if self.call.logits.softcap is None else 8
        rows = rows_per_chunk(self.input, self.linear_weight.shape[0], matrices=matrices)
        return row_chunks(self.call, self.input, rows)

    def change_of_logits(self, rows: slice) -> Tensor:  # u', (n, V)
        x = self.input[rows]
        change = torch.zeros(x.shape[0], self.linear_weight.shape[0], dtype=self.call.lse.dtype, device=x.device)
        if self.along_input is not None:
            change += chunk_product(self.along_input[rows], self.linear_weight)
        if self.along_weight is not None:
            change += chunk_product(x, self.along_weight)
        if self.along_bias is not None:
            change += self.along_bias.to(change.dtype)
        return change

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns z, dz/du and p of a chunk. p is normalised, so that it adds up to 1 within rounding.

        Without this, the terms of z'_iy - sum_j p_ij z'_ij would not cancel if token i gives class y nearly all of the
        probability. The reason is that lse may come from another GEMM, and then differs by 2e-4 at logits of 2000. (If
        a bias of -inf switches off all classes of a shard, p is 0 there.)
        """
        call = self.call
        z, slope = chunk_logits_with_slope(self.input[rows], self.linear_weight, self.linear_bias, call.logits.of(rows))
        p = probabilities(z, self.lse[rows], None if call.lse_rest is None else call.lse_rest[rows])
        return z, slope, p.div_(p.sum(1, keepdim=True).clamp_min_(0.5))

    def add(self, rows: slice, change: Tensor, gradient: Tensor) -> None:
        """Adds the G' and G of a chunk, (n, V) each."""
        out_input, x = self.out[0], self.input[rows]
        if self.linear_bias is not None:
            self.bias_sum += change.sum(0)
        change, gradient = change.to(x.dtype), gradient.to(x.dtype)
        out_input[rows] = change @ self.linear_weight
        self.weight_sum += change.T @ x
        if self.along_weight is not None:
            out_input[rows] += gradient @ self.along_weight
        if self.along_input is not None:
            self.weight_sum += gradient.T @ self.along_input[rows]

    def finish(self) -> None:
        self.out[1].copy_(self.weight_sum)
        self.out[2].copy_(self.bias_sum)


def slope_derivative(z: Tensor, slope: Tensor, options: LogitOptions) -> Tensor:  # (n, V)
    """f'', the second derivative of the logits z by u under a softcap."""
    derivative = z * slope * (-2.0 / options.softcap**2)
    return derivative if options.logit_scale is None else derivative * options.logit_scale
