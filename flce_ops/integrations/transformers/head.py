"""The lm_head, whose forward returns the loss when it gets targets: an nn.Linear, or a module that ends in an nn.Linear
(transform_head.py).

The loss runs inside the forward of the module that owns the weight. So libraries that gather parameters around a
module's forward (FSDP, ZeRO-3, accelerate) gather them for the loss, too.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from ...functional import linear_cross_entropy
from ..sparse_options import sparse_options
from .definition import NotUnderstood
from .instance_forward import (
    BoundForward,
    is_replaced,
    replace_forward,
    restore_forward,
)
from .lora_head import (
    AdapterPair,
    is_lora,
    lora_or_loss,
    loss_of_pair,
    why_not_a_pair,
)
from .output_metrics import Metrics
from .transform_head import inner_of, transform_then_loss

# B batch, T tokens, D hidden, V vocabulary


def linear_or_loss(
    self: nn.Linear,
    input: Tensor,  # (B, T, D)
    target: Tensor | None = None,  # (B, T)
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    normalizer: Tensor | int | None = None,
    logits_bias: Tensor | None = None,  # V entries, added to the layer's own bias
    metrics: Metrics | None = None,  # written
    gradient_threshold: float = 0.0,
    pair: AdapterPair | None = None,  # of an adapter
) -> Tensor:  # logits (B, T, V), or the loss ()
    if target is None:
        return nn.Linear.forward(self, input)
    if vocab_size is not None and self.weight.shape[0] != vocab_size:
        raise ValueError(
            f"expected the head to have the {vocab_size} classes of the model's vocab_size, got a weight of shape "
            f"{tuple(self.weight.shape)}; resize with model.resize_token_embeddings"
        )
    bias: Tensor | None = self.bias
    if logits_bias is not None:
        logits_bias = logits_bias.flatten().to(input.dtype)
        bias = logits_bias if bias is None else bias + logits_bias
    for name, given in (("metrics", metrics is not None), ("gradient_threshold", gradient_threshold != 0.0)):
        if pair is not None and given:
            raise NotImplementedError(
                f"{name} of patch: not implemented for a head with a LoRA adapter; merge the adapter, or patch without"
            )
    of_head: Callable[..., Any] = linear_cross_entropy if pair is None else functools.partial(loss_of_pair, pair)
    result = of_head(
        input,
        self.weight,
        target,
        bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        normalizer=normalizer,
        **sparse_options(gradient_threshold, input.device),
        **({} if metrics is None else {"return_metrics": metrics.names}),
    )
    if metrics is None:
        return cast(Tensor, result)
    loss, found = cast(tuple[Tensor, dict[str, Tensor]], result)
    metrics.put(found)
    return loss


linear_or_loss.flce_original = nn.Linear.forward  # type: ignore[attr-defined]


def forward_of_head(module: nn.Module) -> BoundForward:
    """The new forward of a head. It may be called while pickle is still loading the head, when `module` has no
    attributes yet.
    """
    if is_linear(module):
        return BoundForward(linear_or_loss, module, forward_of_head)
    if is_lora(module):
        return BoundForward(lora_or_loss, module, forward_of_head)
    inner_of(module)  # reads the forward's source now, because torch.compile cannot trace that
    return BoundForward(transform_then_loss, module, forward_of_head)


def prepare_head(head: nn.Module, model_name: str) -> None:
    """Makes `head(hidden, target, ...)` return the loss, or refuses the head.

    Runs before every loss, because the head of a patched model may be replaced (resize_token_embeddings) or wrapped
    (PEFT).
    """
    for module in list(makers_of_logits(head, model_name)):
        if not is_wrapper_of_peft(module) and not is_replaced(module):
            replace_forward(module, forward_of_head(module))


def restore_head(head: nn.Module) -> None:
    for module in head.modules():
        restore_forward(module)


def makers_of_logits(head: nn.Module, model_name: str) -> Iterator[nn.Module]:
    """`head` and the modules in it that may compute its output, from the outside in."""
    if is_linear(head):
        yield head
        return
    if is_wrapper_of_peft(head):
        inner = [cast(nn.Module, head.original_module), *cast(nn.ModuleDict, head.modules_to_save).values()]
    elif is_lora(head) and why_not_a_pair(head) is None:
        inner = [cast(nn.Module, head.base_layer), *cast(nn.ModuleDict, head.lora_B).values()]
    else:
        inner = [inner_linear_of(head, model_name)]
    yield head
    for module in inner:
        yield from makers_of_logits(module, model_name)


def is_linear(head: nn.Module) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def is_wrapper_of_peft(head: nn.Module) -> bool:
    """Whether this is PEFT's wrapper of a head that is trained whole, which holds copies of the head."""
    peft = sys.modules.get("peft.utils.other")
    return peft is not None and isinstance(head, peft.ModulesToSaveWrapper)


def inner_linear_of(head: nn.Module, model_name: str) -> nn.Module:
    """The linear layer at the end of `head`, which PEFT may have wrapped."""
    why = ""
    if isinstance(head, nn.Module):
        try:
            return getattr(head, inner_of(head).name)
        except NotUnderstood as error:
            why = f" ({error})"
    advice = "leave the model unpatched"
    if hasattr(head, "base_layer"):
        why = f" ({why_not_a_pair(head)})" if is_lora(head) else ""
        advice = "merge the adapter, leave the head out of its target_modules or train it in modules_to_save"
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    raise NotImplementedError(
        f"{model_name}: expected its output embedding to be a plain nn.Linear, got {kind}, whose result is not "
        f"input @ weight.T + bias{why}; {advice}"
    )
