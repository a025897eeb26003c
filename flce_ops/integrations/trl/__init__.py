"""TRL: computes its trainers' fused head and divergence with this package's operators.

    from flce_ops.integrations.trl import patch

    patch()
    SFTTrainer(model, ...)      and DPO, KTO, GRPO, RLOO, DistillationTrainer; trainers that already exist, too

TRL's trainers never ask a model for its loss. They install a head of their own (`add_fused_lm_head`), which calls one
autograd Function with hidden states and the head's weight, and DistillationTrainer calls one function. `patch` puts
this package in those places; what TRL does around them stays: shifting, leaving out ignored tokens, gathering a
head that FSDP2 or ZeRO-3 has sharded, the losses themselves.

    patching.py      the places; puts the stand-ins there and takes them away
    log_probs.py     stands in for TRL's ChunkedLogProbFunction
    sft.py           the same for SFTTrainer's nll, in one pass
    divergence.py    stands in for TRL's _chunked_divergence_loss
    zero3.py         parameters that DeepSpeed frees between forward and backward
"""

from .patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]


def __dir__() -> list[str]:
    return __all__
