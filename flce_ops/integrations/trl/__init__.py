"""TRL: computes its trainers' fused head and divergence with this package's operators.

    from flce_ops.integrations.trl import patch

    patch()
    SFTTrainer(model, ...)      and DPO, KTO, GRPO, RLOO, DistillationTrainer; trainers that already exist, too

TRL's trainers never ask a model for its loss. They install their own head (`add_fused_lm_head`), which calls an
autograd Function with hidden states and the head's weight. DistillationTrainer calls a function. `patch` replaces these
two. What TRL does around them stays: shifting, leaving out ignored tokens, gathering a head that FSDP2 or ZeRO-3 has
sharded, and the losses themselves.

    patching.py      replaces the two private names, and restores them
    log_probs.py     stands in for TRL's ChunkedLogProbFunction
    divergence.py    stands in for TRL's _chunked_divergence_loss
    zero3.py         parameters that DeepSpeed frees between forward and backward
"""

from .patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]


def __dir__() -> list[str]:
    return __all__
