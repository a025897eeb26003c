"""Floating-point operations of each inner operator for torch.utils.flop_counter: GEMM passes of 2 N D V.

Elementwise work over the logits is left out, as the counter does for ATen's softmax. All N tokens are counted: how many
of them are ignored, and cost nothing where kernels leave them out, is data, of which a formula sees shapes only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flce_ops.ops import registration as registration  # registers them

# N tokens, D hidden, V vocabulary; shapes arrive in place of tensors


def logits(input, linear_weight, *args, out_shape=None, **options) -> int:
    tokens, hidden = input
    return 2 * tokens * hidden * linear_weight[0]


def both_logits(input, linear_weight, linear_bias, teacher_input, teacher_weight, *args, **options) -> int:
    """The student's and, unless probabilities are given, the teacher's."""
    teacher = 0 if teacher_input is None else logits(teacher_input, teacher_weight)
    return logits(input, linear_weight) + teacher


def with_gradients(of_logits: Callable[..., int], first: int = 0) -> Callable[..., int]:
    """One more pass for each matrix gradient; `first` is where the operands begin. Retained logits cost none."""

    def flops(*shapes, output_mask, out_shape=None, retained=None, **options) -> int:
        (tokens, hidden), *classes = operands = shapes[first:]
        if retained is not None:
            tokens -= retained[0]
        return of_logits((tokens, hidden), *classes) + logits(*operands) * (output_mask[0] + output_mask[1])

    return flops


def double_backward(grad_grad_input, grad_grad_linear_weight, *shapes, **options) -> int:
    """Logits, S @ W and S.T @ X; H and two more products for each of the first two cotangents present."""
    cotangents = (grad_grad_input is not None) + (grad_grad_linear_weight is not None)
    return logits(*shapes[4:]) * (3 + 2 * cotangents)


def low_rank(input, linear_weight, pair_input, pair_weight, *args, output_mask, out_shape=None, **options) -> int:
    """The head is frozen."""
    want_input, *of_pair, _, _ = output_mask
    return logits(input, linear_weight) * (1 + want_input) + logits(pair_input, pair_weight) * (1 + sum(of_pair))


FORMULAS: dict[str, Any] = {
    "linear_cross_entropy_forward": logits,
    "linear_cross_entropy_backward": with_gradients(logits, first=3),
    "linear_cross_entropy_backward_": with_gradients(logits, first=3),
    "linear_cross_entropy_with_grad": with_gradients(logits),
    "linear_cross_entropy_vocab_parallel_with_grad": with_gradients(logits),
    "linear_cross_entropy_low_rank_with_grad": low_rank,
    "linear_cross_entropy_double_backward": double_backward,
    "linear_kl_div_forward": both_logits,
    "linear_kl_div_backward": with_gradients(both_logits, first=1),
    "linear_kl_div_with_grad": with_gradients(both_logits),
    "linear_policy_loss_with_grad": with_gradients(logits),
}
for _name, _formula in FORMULAS.items():
    register_flop_formula(getattr(torch.ops.flce, _name))(_formula)
