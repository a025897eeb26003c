"""Counts the language models of the installed Transformers whose loss `patch` computes.

Run: python -m release.count_transformers

Each class is made from its default configuration, with two layers, on the meta device, and gets text and labels. A
class that cannot run so unpatched (it wants images, say) is not counted.
"""

import collections
import importlib
import inspect
import logging
import pkgutil
import signal
import sys

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from flce_ops.integrations.transformers import patch

ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM")
LAYERS = "num_hidden_layers encoder_layers decoder_layers num_layers n_layer n_layers num_decoder_layers depth".split()
TOKENS = torch.ones(2, 8, dtype=torch.long, device="meta")
EXTRA = [{}, {"use_cache": False}, {"decoder_input_ids": TOKENS}, {"attention_mask": TOKENS}]


class Items(TorchDispatchMode):
    """Answers 1 or True where a model asks for a number of a meta tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or 1
        return func(*args, **(kwargs or {}))


def classes():
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{folder.name}"
        package = importlib.import_module(name)
        for file in pkgutil.iter_modules(getattr(package, "__path__", [])):
            if file.name.startswith("modeling_") and folder.name != "auto":
                try:
                    module = importlib.import_module(f"{name}.{file.name}")
                except ImportError:  # of torchaudio, say
                    continue
                for found in vars(module).values():
                    if inspect.isclass(found) and found.__module__ == module.__name__:
                        if found.__name__.endswith(ENDINGS):
                            yield found


def shorten(config):
    for name in LAYERS:
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > 2:
            setattr(config, name, 2)
    for part in list(vars(config).values()):
        if isinstance(part, transformers.PreTrainedConfig):
            shorten(part)


def loss_of(model):
    for extra in EXTRA:
        try:
            return model(input_ids=TOKENS, labels=TOKENS, **extra).loss
        except Exception as error:
            last = error
            if "unpatched" in str(error):
                break
    raise last


def outcome(model_class) -> tuple[str, str]:
    if "labels" not in inspect.signature(model_class.forward).parameters:
        return "no labels", ""
    try:
        config = model_class.config_class()
        shorten(config)
        with torch.device("meta"):
            model = model_class(config).train()
        try:
            loss_of(model)
        except Exception:
            loss_of(model.bfloat16())
    except Exception as error:
        return "does not run so", repr(error)
    try:
        loss_of(patch(model))
    except Exception as error:
        return "refused", str(error)
    return "accepted", ""


def main():
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("a model took more than two minutes"))
    found = collections.defaultdict(list)
    for model_class in classes():
        signal.alarm(120)
        with Items():
            how, why = outcome(model_class)
        found[how].append(model_class.__name__)
        if how == "refused":
            print(f"{model_class.__name__}: {why}")
    signal.alarm(0)
    counts = ", ".join(f"{len(names)} {how}" for how, names in sorted(found.items()))
    print(f"Transformers {transformers.__version__}: {counts}")


if __name__ == "__main__":
    main()
