"""The tensors and numbers that every operator of linear_kl_div takes, by name."""

from typing import Annotated, NamedTuple

from torch import Tensor

from .options import LogitOptions

# N tokens, D and E hidden sizes of student and teacher, V vocabulary (if it is sharded, this rank's part)


class KlDivOperands(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    linear_bias: Tensor | None  # (V,)
    teacher_input: Tensor | None  # (N, E)
    teacher_weight: Tensor | None  # (V, E)
    teacher_bias: Tensor | None  # (V,)
    teacher_probs: Tensor | None  # (N, V), instead of the three tensors above
    valid: Tensor | None  # (N,) bool; rows where it is False are not read


TEACHER = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_probs")


class KlDivOptions(NamedTuple):
    kind: str = "forward"  # one of KINDS; or "cross_entropy", with teacher_probs
    beta: Tensor | None = None  # (), for "jsd"
    logit_scale: Tensor | None = None  # (), as are the next three
    softcap: Tensor | None = None
    teacher_logit_scale: Tensor | None = None
    teacher_softcap: Tensor | None = None
    # if ranks share the vocabulary: their process group, their number, and V over all of them
    group: str | None = None
    ranks: int = 1
    vocab_size: Annotated[int | None, "SymInt?"] = None
    batch_invariant: bool = False  # the bits of a row of grad_input must not depend on other tokens

    @property
    def student(self) -> LogitOptions:
        return LogitOptions(self.softcap, self.logit_scale)

    @property
    def teacher(self) -> LogitOptions:
        return LogitOptions(self.teacher_softcap, self.teacher_logit_scale)

    @property
    def of_student(self) -> bool:
        """Whether the gradient needs K, a sum over the student's distribution (objectives/divergence.py)."""
        return self.kind not in ("forward", "cross_entropy")
