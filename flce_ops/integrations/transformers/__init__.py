"""Hugging Face Transformers: a language model's loss without its logits.

    from . import patch

    model = patch(AutoModelForCausalLM.from_pretrained(...))

From then on `model(input_ids, labels=labels).loss` is the operator's; without labels the logits are as before.

    patching.py               puts the new forward in place and takes it away
    forward.py                runs the model's own forward with the logits left out
    read_head.py              reads from that forward's source what it does to the logits: logit_steps.py
    operand.py                the numbers and paths in it; definition.py: its tree
    cross_entropy_call.py     a forward that computes its cross-entropy by itself
    head.py                   the lm_head's forward that takes targets; refuses heads it would get wrong
    transform_head.py         a head that ends in a linear layer
    lora_head.py, dora.py     a head that PEFT has put adapters beside; what DoRA multiplies its logits with
    instance_forward.py       the forward of one module, replaced and put back
    output_hooks.py           finds hooks that need the logits which the head would make
    no_logits.py              what an output has in place of the logits
    output_metrics.py         by-products of the loss that it has as further fields
    trainer.py                tells a model when Trainer takes its logits, and what it would smooth
"""

from .patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]


def __dir__() -> list[str]:
    return __all__
