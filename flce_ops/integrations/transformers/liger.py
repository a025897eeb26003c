"""Liger-Kernel replaces kernels of a model (RMSNorm, rotary positions, SwiGLU), which works beside `patch`, and its
loss, which does not: one of the two losses would be out of action.
"""

import inspect
from typing import Any

from .instance_forward import unbound


def inside_peft(model: Any) -> Any:
    """The model that PEFT has wrapped, or `model`."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def check_loss_is_not_ligers(model_or_class: Any) -> None:
    """Raises NotImplementedError if the forward of a model, of PEFT's base model, or of a class is Liger's."""
    model_or_class = inside_peft(model_or_class)
    forward = getattr(model_or_class, "forward", None)
    if forward is not None:
        forward = inspect.unwrap(unbound(forward))
    if getattr(forward, "__module__", "").startswith("liger_kernel."):
        cls = model_or_class if isinstance(model_or_class, type) else type(model_or_class)
        raise NotImplementedError(
            f"{cls.__name__}: Liger-Kernel has replaced its loss ({forward.__module__}.{forward.__qualname__}), and "
            "patch replaces it, too. Expected Liger's kernels without its loss: call apply_liger_kernel_to_... with "
            "fused_linear_cross_entropy=False, or give TrainingArguments liger_kernel_config="
            '{"fused_linear_cross_entropy": False}; then patch'
        )
