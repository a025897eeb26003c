"""SFTTrainer's nll in one pass over the logits, in which forward makes the gradients. That is possible because
compute_loss uses only these sums over tokens of the results of TRL's head:

    SFTTrainer.compute_loss    -log_probs.sum() / count,   entropy.sum(),   is_top1.sum()

While that method runs, the head returns the mean over the tokens as each token's log-probability. The sum over tokens
and its gradient are the same as with the tokens' own log-probabilities. If the gradients of two tokens differ, the loss
is not SFT's nll, and an error says so. Without gradients (evaluation) nothing could notice another use, so the head
returns the tokens' own log-probabilities there.
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
        return grad[:1].sum() * ctx.count, None  # usually 1, and so exact, if the loss is the mean of this batch


def valid_tokens_alone(device: torch.device) -> bool:
    """Replaces TRL's _use_triton. TRL leaves out ignored tokens on GPUs only; now it does so on every device."""
    return True
