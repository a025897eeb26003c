"""The tensors and numbers that every operator of this package takes, by name."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# N tokens, D and E hidden sizes of student and teacher, V vocabulary (this rank's part of it where it is sharded)


class Operands(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    linear_bias: Tensor | None = None  # (V,)
    teacher_input: Tensor | None = None  # (N, E)
    teacher_weight: Tensor | None = None  # (V, E)
    teacher_bias: Tensor | None = None  # (V,)
    teacher_probs: Tensor | None = None  # (N, V), instead of the three before
    valid: Tensor | None = None  # (N,) bool; rows where it is False are not read


TEACHER = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_probs")


@dataclass(frozen=True)
class Options:
    kind: str = "forward"
    beta: Tensor | None = None  # (), of "jsd"
    logit_scale: Tensor | None = None  # (), like the next three
    softcap: Tensor | None = None
    teacher_logit_scale: Tensor | None = None
    teacher_softcap: Tensor | None = None
    # where ranks share the vocabulary: their process group, how many they are, and V over all of them
    group: str | None = None
    ranks: int = 1
    vocab_size: int | None = None
