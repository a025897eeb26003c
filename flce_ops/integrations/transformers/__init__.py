"""Hugging Face Transformers: a language model's loss without its logits.

    from flce_ops.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(...))

After that, the operator computes `model(input_ids, labels=labels).loss`. Without labels the logits are as before.

    patching.py               puts the new forward in place, and takes it away
    forward.py                runs the model's own forward without the logits, and finishes its output
    logits.py                 the object that this forward has in place of logits; writes down what is done to them
    head.py                   the modules that make logits; stand-ins for models, whose head returns that object
    loss.py                   what a head computes: the steps that were written down, then the operator
    instance_forward.py       replaces and restores the forward of one module
    output_hooks.py           finds hooks that need the logits
    no_logits.py              the object that replaces the logits in an output
    output_metrics.py         metrics of the loss, as further fields of an output
    liger.py                  refuses a model whose loss is Liger-Kernel's
    trainer.py                tells a model when Trainer needs logits, and when Trainer smooths labels
"""

from .patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]


def __dir__() -> list[str]:
    return __all__
