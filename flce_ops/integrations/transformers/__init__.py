"""Hugging Face Transformers: a causal language model's loss without its logits.

    from flce_ops.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(...))

From then on `model(input_ids, labels=labels).loss` is the operator's; without labels the logits are as before.

    patching.py       puts the new forward in place and takes it away
    forward.py        runs the model's own forward with the logits left out
    read_head.py      reads from that forward's source what it does to the logits
    head.py           the lm_head's forward that takes targets; refuses heads it would get wrong
    output_hooks.py   finds hooks on the lm_head that need its logits
    no_logits.py      what an output has in place of the logits
    trainer.py        tells a model when Trainer takes its logits
"""

from flce_ops.integrations.transformers.patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]
