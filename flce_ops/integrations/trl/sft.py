"""SFTTrainer's nll by one pass over the logits, whose gradients forward makes: of TRL's head it takes sums alone.

    SFTTrainer.compute_loss    -log_probs.sum() / count,   entropy.sum(),   is_top1.sum()

While that method runs, each token's log-probability is the mean over the tokens. The sum over tokens and the gradient
of that sum are then those of the tokens' own log-probabilities. A gradient that differs from token to token is another
loss than SFT's nll, and is refused.
"""

from typing import Any

import torch
from torch import Tensor

from ...functional import linear_cross_entropy
from ...support.torch_private import assert_on_device
from .log_probs import NO_CLASS, ChunkedLogProbs

# N tokens, D hidden, V vocabulary


class SummedLogProbs(ChunkedLogProbs):
    @staticmethod
    def outputs_of(
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        metrics: list[str],
        options: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, found = linear_cross_entropy(
            *(hidden, weight, targets, bias), ignore_index=NO_CLASS, return_metrics=metrics, **options
        )
        return MeanOfTokens.apply(-loss, len(targets)), found


class MeanOfTokens(torch.autograd.Function):
    """For each token the mean over the tokens. Its gradient is that of the sum over tokens, and refuses any other."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, count: int) -> Tensor:
        ctx.count = count
        return mean.repeat(count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        differs = grad != grad[:1]
        assert_on_device(
            ~(differs & ~grad.isnan()).any(),
            "expected SFTTrainer's nll to take the sum of its head's log_probs, got a gradient that differs from token "
            "to token; train without flce_ops.integrations.trl.patch()",
        )
        return grad[:1].sum() * ctx.count, None  # exact where the loss is the mean of this batch: 1, mostly


def valid_tokens_alone(device: torch.device) -> bool:
    """TRL leaves out ignored tokens before its head on GPUs, and else computes what it does not read."""
    return True
