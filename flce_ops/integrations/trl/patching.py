"""The names in TRL that this package replaces, and who uses them:

trl.trainer.utils._ChunkedLogProbFunction                       called by the forward that add_fused_lm_head sets
trl.trainer.utils._use_triton                                   that forward asks it whether to leave out ignored tokens
trl.trainer.sft_trainer.SFTTrainer.compute_loss                 calls that forward; for "nll" it uses only sums
trl.trainer.distillation_trainer._chunked_divergence_loss       called by DistillationTrainer
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from ...functional.public import typed
from ..full_logits import SERVED_OF_TRL, is_of_trl, watch_trainers, watching
from ..places import Place, Replacements
from ..sparse_options import check_threshold
from .divergence import chunked_divergence_loss
from .log_probs import STEP, ChunkedLogProbs, with_threshold
from .sft import SummedLogProbs, valid_tokens_alone

LOG_PROBS = Place(
    "trl.trainer.utils",
    "_ChunkedLogProbFunction",
    (
        *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
        *("final_logit_softcapping", "logit_scale", "outputs"),
    ),
    caller="add_fused_lm_head",
)
LEAVES_OUT = Place("trl.trainer.utils", "_use_triton", ("device",), caller="add_fused_lm_head")
SFT_LOSS = Place(
    "trl.trainer.sft_trainer",
    "SFTTrainer.compute_loss",
    ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
)
DIVERGENCE = Place(
    "trl.trainer.distillation_trainer",
    "_chunked_divergence_loss",
    (
        *("student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight"),
        *("completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias"),
        *("student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping"),
        *("teacher_final_logit_softcapping", "temperature"),
    ),
    caller="DistillationTrainer._compute_loss",
)


def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    """SFTTrainer's own method. While it runs for "nll", which uses only sums over tokens, the head computes these sums
    in one pass (sft.py), in this thread alone. A subclass may have kept this function beyond unpatch.
    """
    kept, STEP.head = getattr(STEP, "head", None), SummedLogProbs if self.args.loss_type == "nll" else None
    try:
        return REPLACEMENTS.originals[SFT_LOSS](self, *args, **kwargs)
    finally:
        STEP.head = kept


REPLACEMENTS = Replacements(
    "trl",
    "1.16",
    {
        LOG_PROBS: ChunkedLogProbs,
        LEAVES_OUT: valid_tokens_alone,
        SFT_LOSS: compute_loss,
        DIVERGENCE: chunked_divergence_loss,
    },
)


@typed
def patch(*, gradient_threshold: float = 0.0) -> None:
    """Make TRL's SFT, DPO, KTO, GRPO, RLOO and Distillation trainers compute with this package's operators.

    The patch holds for the whole process, for trainers made before and after. A second call changes the option.

    Args:
        gradient_threshold: as in `linear_log_probs`, such as 2**-10: unbiased sparse gradients of the head, except in
            DistillationTrainer. Each call draws its seed from torch's default generator. An entropy that is trained is
            refused then.

    Raises:
        ValueError: a gradient_threshold outside [0, 1).
        NotImplementedError: TRL does not have, or does not use, one of the names as this package knows them. TRL
            stays as it was.
        ImportError: TRL is not installed.
    """
    check_threshold("patch", gradient_threshold)
    REPLACEMENTS.check()
    watch_trainers(advice_for, train=watching)
    REPLACEMENTS.put()
    LOG_PROBS.set(with_threshold(gradient_threshold))


def advice_for(trainer: Any) -> str | None:
    return SERVED_OF_TRL if REPLACEMENTS.in_place and is_of_trl(trainer) else None


def unpatch() -> None:
    """Undo `patch`. ValueError if TRL is not patched."""
    REPLACEMENTS.take_away()


@contextlib.contextmanager
@typed
def patched(*, gradient_threshold: float = 0.0) -> Iterator[None]:
    """`patch` during a with block. If TRL was patched before, it stays patched, with the option it had."""
    before = LOG_PROBS.get() if REPLACEMENTS.in_place else None
    patch(gradient_threshold=gradient_threshold)
    try:
        yield
    finally:
        if before is None:
            unpatch()
        elif REPLACEMENTS.in_place:  # a block that began earlier may have ended earlier
            LOG_PROBS.set(before)
