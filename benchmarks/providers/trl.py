"""TRL's log-probabilities: torch.mm computes logits of 4096 tokens by 32768 classes, Triton folds them. Backward
computes each tile again and adds the gradients in float32.

As in TRL's own head (add_fused_lm_head in trl/trainer/utils.py), the valid tokens are gathered first, for which the
host waits, and their losses are averaged.
"""

from __future__ import annotations

from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..modes import Mode, Step, step_of

VERSION_OF = "trl"


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    # Backward imports this module, which needs accelerate, datasets and pandas: if they are missing, the import fails
    # here with a reason.
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    outputs = ("entropy",) if mode.reduction == "log_probs" else ()

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor | tuple[Tensor, Tensor]:
        valid = target != IGNORE_INDEX
        # no bias, temperature 1, no softcap, logits without a scale
        log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
            input[valid], linear_weight, None, target[valid], 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        if reduction == "log_probs":
            return put_back(log_probs, valid), put_back(entropy, valid)
        if reduction == "none":
            return -put_back(log_probs, valid)
        return -log_probs.sum() / valid.sum()

    return step_of(loss, problem, mode)


def put_back(values: Tensor, valid: Tensor) -> Tensor:  # (n,), (N,) -> (N,)
    return values.new_zeros(valid.shape).masked_scatter(valid, values)
