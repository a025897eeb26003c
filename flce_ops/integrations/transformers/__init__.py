"""Hugging Face Transformers: a language model's loss without its logits.

    from flce_ops.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(...))

After that, the operator computes `model(input_ids, labels=labels).loss`. Without labels the logits are as before.

    patching.py               puts the new forward in place, and takes it away
    forward.py                runs the model's own forward without the logits
    read_head.py              reads from that forward's source what it does to the logits: logit_steps.py
    operand.py                numbers and paths in the source; definition.py: its syntax tree
    cross_entropy_call.py     for a forward that calls a cross-entropy itself
    head.py                   an lm_head whose forward takes targets; refuses heads that it would get wrong
    transform_head.py         a head that ends in a linear layer
    lora_head.py              a head with PEFT's adapters
    instance_forward.py       replaces and restores the forward of one module
    output_hooks.py           finds hooks that need the logits
    no_logits.py              the object that replaces the logits in an output
    output_metrics.py         metrics of the loss, as further fields of an output
    trainer.py                tells a model when Trainer needs logits, and when Trainer smooths labels
"""

from .patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]


def __dir__() -> list[str]:
    return __all__
