"""What a linear cross-entropy is of, and the numbers that change its logits and its loss: one argument each."""

from typing import NamedTuple

from torch import Tensor

# N tokens, D hidden, V vocabulary


class Operands(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (N,)
    linear_bias: Tensor | None = None  # (V,)
    weight: Tensor | None = None  # (V,) class weights


class LossOptions(NamedTuple):
    label_smoothing: float = 0.0
    z_loss: Tensor | None = None  # ()


class LogitOptions(NamedTuple):
    softcap: Tensor | None = None  # ()
    logit_scale: Tensor | None = None  # ()
