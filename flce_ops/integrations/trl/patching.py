"""Puts the operators in TRL's two places, for the whole process, and takes them away."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flce_ops.integrations.trl.divergence import chunked_divergence_loss
from flce_ops.integrations.trl.log_probs import ChunkedLogProbs
from flce_ops.integrations.trl.places import DIVERGENCE, LOG_PROBS, Place

STAND_INS: dict[Place, Any] = {LOG_PROBS: ChunkedLogProbs, DIVERGENCE: chunked_divergence_loss}
originals: dict[Place, Any] = {}  # of places that are patched


def patch() -> None:
    """Make TRL's SFT, DPO, KTO, GRPO, RLOO and Distillation trainers compute by this package's operators.

    For the whole process: trainers made before and after. A second call does nothing.

    Raises:
        NotImplementedError: TRL does not have, or does not use, one of the two places as this package knows them. TRL
            is then as it was.
        ImportError: TRL is not installed.
    """
    if originals:
        return
    for place in STAND_INS:
        place.check()
    for place, stand_in in STAND_INS.items():
        module = place.load()
        originals[place] = getattr(module, place.name)
        setattr(module, place.name, stand_in)


def unpatch() -> None:
    """Undo `patch`. ValueError if TRL is not patched."""
    if not originals:
        raise ValueError("TRL is not patched")
    for place, original in originals.items():
        setattr(place.load(), place.name, original)
    originals.clear()


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """`patch` for the duration of a with block."""
    patch()
    try:
        yield
    finally:
        unpatch()
