"""A head with PEFT's LoRA adapters:

    logits = base_layer(x) + sum over active adapters of scaling (B A dropout(x) + bias of B)

The loss takes the adapters as they are, with B (V, r) beside the head's weight (flce_ops/entry/low_rank.py). B A, which
has the weight's size, is not made. PEFT's other adapters, DoRA among them, change the weight itself or read the logits.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...functional import linear_cross_entropy
from ...support.dtensors import any_dtensor

# B batch, T tokens, D hidden, V vocabulary, r rank of the adapters


class AdapterPair(NamedTuple):
    input: Tensor  # (B, T, r)
    weight: Tensor  # (V, r)


def is_lora(head: nn.Module) -> bool:
    """Whether this is PEFT's own layer around a linear one, and not a subclass."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    return lora is not None and type(head) is lora.Linear and type(head).forward is lora.Linear.forward


def why_not_a_pair(head: Any) -> str | None:
    """Why an active adapter of the head cannot be used as a low-rank pair; None if all can."""
    for adapter in active_adapters(head):
        if adapter in head.lora_variant:
            return f"a {type(head.lora_variant[adapter]).__name__.removesuffix('LinearVariant')} adapter"
    return None


def active_adapters(head: Any) -> list[str]:
    """The active adapters; none if they are disabled, or merged into the weight."""
    if head.disable_adapters or head.merged:
        return []
    return [adapter for adapter in head.active_adapters if adapter in head.lora_A]


def lora_or_loss(self: Any, input: Tensor, *args: Any, target: Tensor | None = None, **options: Any) -> Tensor:
    """The logits (B, T, V), or with targets (B, T) the loss ()."""
    if target is None:
        return type(self).forward(self, input, *args, **options)
    if self.disable_adapters and self.merged:
        self.unmerge()
    adapters, base = active_adapters(self), self.base_layer
    if not adapters:
        return base(input, target=target, **options)
    parts, weights, biases = [], [], []
    for adapter in adapters:
        down = self.lora_A[adapter]
        x = self.lora_dropout[adapter](self._cast_input_dtype(input, down.weight.dtype))
        parts.append((down(x) * self.scaling[adapter]).to(input.dtype))
        up = self.lora_B[adapter]
        weights.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            biases.append(up.bias * self.scaling[adapter])
    several = len(adapters) > 1  # a single weight is not concatenated, so that a sharded one is refused by its shape
    pair = AdapterPair(torch.cat(parts, -1), torch.cat(weights, 1)) if several else AdapterPair(parts[0], weights[0])
    if biases:
        given = options.get("logits_bias")
        options["logits_bias"] = sum(biases if given is None else [given.flatten(), *biases])
    return base(input, target=target, pair=pair, **options)


lora_or_loss.flce_original = nn.Module.forward  # type: ignore[attr-defined]


def loss_of_pair(
    pair: AdapterPair,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    *,
    normalizer: Tensor | int | None,
    **options: Any,
) -> Tensor:  # ()
    """Same as linear_cross_entropy, with the pair as features of input and of a copy of linear_weight."""
    if any_dtensor(input, linear_weight, *pair):
        raise NotImplementedError("linear_cross_entropy: a LoRA adapter on a sharded head is not implemented")
    input, linear_weight = torch.cat([input, pair.input], -1), torch.cat([linear_weight, pair.weight], 1)
    return linear_cross_entropy(input, linear_weight, target, linear_bias, normalizer=normalizer, **options)
