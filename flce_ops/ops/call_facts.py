"""The facts of a call that the tables of paths.py read. None of them is data on a device.

facts_of          -> an inner operator's call
loss_facts        -> a scalar loss, before its operator is known; given_logits_facts: of given logits
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.options import KlDivOperands, KlDivOptions
from ..math.shards import shard_rows
from ..support import torch_private
from ..support.workspace import gradients_are_left_to_backward


class CallFacts(NamedTuple):
    """What a choice of path may depend on: the operator's arguments, and the surrounding gradients, transforms and
    ranks.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    empty: bool = False  # no tokens, or no features
    one_class: bool = False
    label_smoothing: bool = False
    softcap: bool = False
    wants_gradient: bool = False  # some gradient of input, linear_weight or linear_bias is wanted
    main_grad: bool = False  # there is a buffer to which the gradient of linear_weight is added
    left_to_backward: bool = False  # gradients_in_backward()
    functorch: bool = False
    saved_tensor_hooks: bool = False
    checkpoint: bool = False  # AOTAutograd traces a checkpointed region, which backward runs again
    handed_over: bool = False  # the caller allows the operator to overwrite the logits
    leaf: bool = False  # the logits are a leaf of autograd, or retain_grad() was called on them
    part: bool = False  # the logits share memory with a larger tensor
    vocabulary_dimensions: int = 0  # mesh dimensions that shard the vocabulary
    rank_without_classes: bool = False
    topk: bool = False  # several classes per token
    teacher: torch.dtype | None = None  # dtype of a teacher's hidden states
    sparse: bool = False  # a sparse gradient is asked for
    entropy: bool = False  # a token function reads the entropy


def facts_of(call: Any) -> CallFacts:
    """The facts of an inner operator's call, whose Arguments have operands and perhaps options of the loss and the
    logits.
    """
    operands, groups = call.operands, vars(call)
    if isinstance(operands, KlDivOperands):
        return kl_div_facts(operands, call.options)
    first, sparse, softcap = operands[0], groups.get("sparse"), call.logits.softcap is not None
    one_class = operands.num_classes == 1 and groups.get("group") is None  # all ranks must choose the same path
    known: dict[str, Any] = {"softcap": softcap, "topk": operands.target.dim() == 2}
    if "loss" in groups:
        known["label_smoothing"] = call.loss.label_smoothing != 0.0
    elif "cotangents" in groups:
        known["label_smoothing"] = call.cotangents.grad_logit_sum is not None
    if "output_mask" in groups and sparse is not None and sparse.gradient_threshold:
        known["sparse"] = any(sparse.products(call.output_mask))
    return CallFacts(first.device.type, first.dtype, first.numel() == 0, one_class, **known)


def kl_div_facts(operands: KlDivOperands, options: KlDivOptions) -> CallFacts:
    input, teacher, num_classes = operands.input, operands.teacher_input, options.vocab_size
    sharding: dict[str, Any] = {} if num_classes is None else sharding_of([True], [options.ranks], num_classes)
    return CallFacts(
        input.device.type,
        input.dtype,
        input.numel() == 0 or (teacher is not None and teacher.numel() == 0),
        (operands.linear_weight.shape[0] if num_classes is None else num_classes) == 1,
        teacher=None if teacher is None else teacher.dtype,
        **sharding,
    )


def loss_facts(input: Tensor, *leaves: Tensor | None, **known) -> CallFacts:
    """The facts of a scalar loss, before its operator is known: the surroundings, and how gradients of `input` and
    `leaves`, if wanted, will be requested. `known` holds further facts.
    """
    wanted = input.requires_grad
    for leaf in leaves:
        wanted |= leaf is not None and leaf.requires_grad
    return CallFacts(
        input.device.type,
        input.dtype,
        wants_gradient=wanted and torch.is_grad_enabled(),
        left_to_backward=gradients_are_left_to_backward(),
        functorch=torch_private.functorch_is_active(),
        saved_tensor_hooks=torch_private.saved_tensor_hooks_are_active(),
        checkpoint=torch_private.tracing_a_checkpointed_region(),
        **known,
    )


def given_logits_facts(logits: Tensor, handed_over: bool) -> CallFacts:
    """The facts of a scalar loss of these logits. `logits` may be a view that covers another tensor completely."""
    root = torch_private.root_of(logits)
    whole = logits.is_contiguous() and root.is_contiguous() and root.numel() == logits.numel()
    as_stored = root.dtype == logits.dtype and root.is_neg() == logits.is_neg()
    # if the gradient is retained, it would be retained on the tensor that overwrites the logits
    leaf = root.is_leaf or root.retains_grad or torch_private.comes_from_outside_a_traced_graph(root)
    return loss_facts(logits, handed_over=handed_over, leaf=leaf, part=not (whole and as_stored))


def sharding_of(vocabulary: Sequence[bool], ranks: Sequence[int], num_classes: int) -> dict[str, Any]:
    """The facts of a mesh. `vocabulary` says for each mesh dimension whether it shards the vocabulary, `ranks` is its
    size. All ranks must get the same answer.
    """
    sizes = [size for size, shards_it in zip(ranks, vocabulary) if shards_it]
    without = len(sizes) == 1 and shard_rows(num_classes, sizes[0]) * (sizes[0] - 1) >= num_classes
    return {"vocabulary_dimensions": len(sizes), "rank_without_classes": without}


def gradients_wanted(operands: Any) -> list[bool]:
    """Which gradients are wanted, as an output_mask: of input, linear_weight, linear_bias."""
    enabled, bias = torch.is_grad_enabled(), operands.linear_bias
    of_bias = bias is not None and bias.requires_grad
    return [
        enabled and operands.input.requires_grad,
        enabled and operands.linear_weight.requires_grad,
        enabled and of_bias,
    ]


def needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
