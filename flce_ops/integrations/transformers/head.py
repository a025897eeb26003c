"""The lm_head: an nn.Linear whose forward, given targets, returns the loss instead of the logits.

The loss runs inside the forward of the module that owns the weight, so that whoever gathers parameters around a
module's forward (FSDP, ZeRO-3, accelerate) does so for the loss too.
"""

import sys

from torch import Tensor, nn

from flce_ops.functional import linear_cross_entropy
from flce_ops.integrations.transformers.instance_forward import (
    BoundForward,
    is_replaced,
    replace_forward,
    restore_forward,
)

# B batch, T tokens, D hidden, V vocabulary


def linear_or_loss(
    self: nn.Linear,
    input: Tensor,  # (B, T, D)
    target: Tensor | None = None,  # (B, T)
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    normalizer: Tensor | int | None = None,
) -> Tensor:  # logits (B, T, V), or the loss ()
    if target is None:
        return nn.Linear.forward(self, input)
    if self.weight.shape[0] != vocab_size:
        raise ValueError(
            f"expected the head to have the {vocab_size} classes of the model's vocab_size, got a weight of shape "
            f"{tuple(self.weight.shape)}; resize with model.resize_token_embeddings"
        )
    return linear_cross_entropy(
        input,
        self.weight,
        target,
        self.bias,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        normalizer=normalizer,
    )


linear_or_loss.flce_original = nn.Linear.forward


def forward_of_head(linear: nn.Linear) -> BoundForward:
    return BoundForward(linear_or_loss, linear, forward_of_head)


def prepare_head(head: nn.Module, model_name: str) -> None:
    """Make `head(hidden, target, ...)` return the loss, or refuse.

    It runs before every loss: the head of a patched model may be replaced (resize_token_embeddings) or wrapped (PEFT).
    """
    for linear in linears_of(head, model_name):
        if not is_replaced(linear):
            replace_forward(linear, forward_of_head(linear))


def restore_head(head: nn.Module) -> None:
    for module in head.modules():
        restore_forward(module)


def linears_of(head: nn.Module, model_name: str) -> list[nn.Linear]:
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return [head]
    peft = sys.modules.get("peft.utils.other")
    if peft is not None and isinstance(head, peft.ModulesToSaveWrapper):
        copies = [head.original_module, *head.modules_to_save.values()]
        return [linear for copy in copies for linear in linears_of(copy, model_name)]
    advice = "leave the model unpatched"
    if hasattr(head, "base_layer"):
        advice = "leave the head out of the adapter's target_modules, or train it whole through modules_to_save"
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    raise NotImplementedError(
        f"{model_name}: expected its output embedding to be a plain nn.Linear, got {kind}, whose result is not "
        f"input @ weight.T + bias; {advice}"
    )
