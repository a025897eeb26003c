"""The lm_head: an nn.Linear whose forward, given targets, returns the loss instead of the logits, or a head that ends
in one (transform_head.py).

The loss runs inside the forward of the module that owns the weight, so that whoever gathers parameters around a
module's forward (FSDP, ZeRO-3, accelerate) does so for the loss too.
"""

import sys
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from flce_ops.functional import linear_cross_entropy
from flce_ops.integrations.transformers.definition import NotUnderstood
from flce_ops.integrations.transformers.instance_forward import is_replaced, replace_forward, restore_forward
from flce_ops.integrations.transformers.transform_head import inner_of, transform_then_loss

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
    logits_bias: Tensor | None = None,  # V entries, beside the layer's own
) -> Tensor:  # logits (B, T, V), or the loss ()
    if target is None:
        return nn.Linear.forward(self, input)
    if vocab_size is not None and self.weight.shape[0] != vocab_size:
        raise ValueError(
            f"expected the head to have the {vocab_size} classes of the model's vocab_size, got a weight of shape "
            f"{tuple(self.weight.shape)}; resize with model.resize_token_embeddings"
        )
    bias = self.bias
    if logits_bias is not None:
        logits_bias = logits_bias.flatten().to(input.dtype)
        bias = logits_bias if bias is None else bias + logits_bias
    return linear_cross_entropy(
        input,
        self.weight,
        target,
        bias,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        normalizer=normalizer,
    )


linear_or_loss.flce_original = nn.Linear.forward


def prepare_head(head: nn.Module, model_name: str) -> None:
    """Make `head(hidden, target, ...)` return the loss, or refuse.

    It runs before every loss: the head of a patched model may be replaced (resize_token_embeddings) or wrapped (PEFT).
    """
    for module, forward in list(forwards_of(head, model_name)):
        if not is_replaced(module):
            replace_forward(module, forward)


def restore_head(head: nn.Module) -> None:
    for module in head.modules():
        restore_forward(module)


def forwards_of(head: nn.Module, model_name: str) -> Iterator[tuple[nn.Module, Callable]]:
    """What is to be replaced, from the outside in."""
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        yield head, linear_or_loss
        return
    peft = sys.modules.get("peft.utils.other")
    if peft is not None and isinstance(head, peft.ModulesToSaveWrapper):
        for copy in (head.original_module, *head.modules_to_save.values()):
            yield from forwards_of(copy, model_name)
        return
    why = ""
    if isinstance(head, nn.Module):
        try:
            inner = getattr(head, inner_of(head).name)
        except NotUnderstood as error:
            why = f" ({error})"
        else:
            yield head, transform_then_loss
            yield from forwards_of(inner, model_name)
            return
    advice = "leave the model unpatched"
    if hasattr(head, "base_layer"):
        why = ""
        advice = "leave the head out of the adapter's target_modules, or train it whole through modules_to_save"
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    raise NotImplementedError(
        f"{model_name}: expected its output embedding to be a plain nn.Linear, got {kind}, whose result is not "
        f"input @ weight.T + bias{why}; {advice}"
    )
