"""Megatron's gradient_accumulation_fusion: adds the head's gradient to `weight.main_grad`, inside the GEMM.

    from flce_ops.integrations.megatron import linear_cross_entropy

    loss = linear_cross_entropy(hidden, output_layer.weight, labels, reduction="sum")

Megatron's DDP gives each parameter a buffer `main_grad`, usually float32, and a flag `grad_added_to_main_grad`. Its
hook adds `.grad` to the buffer unless the flag is set. If the reduction overlaps with backward, the hook expects some
`.grad` to be there. A layer that adds its gradient itself sets the flag and returns a gradient that nobody reads. That
gradient is zeros if the parameter has `zero_out_wgrad` (an embedding shares it), because the hook then adds it.
"""

from typing import Any

import torch
from torch import Tensor

from .. import functional

# D hidden, V vocabulary


class AddedToMainGrad(torch.autograd.Function):
    """Returns linear_weight. The loss adds the gradient to main_grad, so none arrives in backward, which only sets the
    flag that Megatron's hook reads.
    """

    @staticmethod
    def forward(ctx, linear_weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.linear_weight = linear_weight
        return linear_weight.view_as(linear_weight)

    @staticmethod
    def backward(ctx, _: None) -> Tensor | None:
        linear_weight = ctx.linear_weight
        if not hasattr(linear_weight, "grad_added_to_main_grad"):
            return None
        linear_weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(linear_weight, "zero_out_wgrad", False) else torch.empty_like
        return make(linear_weight, requires_grad=False)


def linear_cross_entropy(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    **options: Any,
) -> Any:
    """Same as flce_ops.linear_cross_entropy, but adds the gradient of linear_weight to linear_weight.main_grad.

    Args:
        linear_weight: a parameter that has `main_grad`, with all classes of the vocabulary.
        options: the options of flce_ops.linear_cross_entropy, except main_grad.

    Raises:
        AttributeError: linear_weight has no `main_grad`: Megatron's DDP does not wrap the model, or its FSDP does.
        NotImplementedError: tensor parallelism shards the vocabulary: targets are not rows of linear_weight.
    """
    refuse_shard(linear_weight)
    parameter: Any = linear_weight
    if torch.is_grad_enabled() and linear_weight.requires_grad:
        options["main_grad"] = getattr(parameter, "main_grad", None)
        if options["main_grad"] is None:
            raise AttributeError(
                "expected linear_weight.main_grad, which Megatron's DistributedDataParallel gives to parameters, got "
                "none; elsewhere call flce_ops.linear_cross_entropy"
            )
        linear_weight = AddedToMainGrad.apply(linear_weight)
    return functional.linear_cross_entropy(input, linear_weight, target, linear_bias, **options)


def refuse_shard(linear_weight: Tensor) -> None:
    # Megatron sets the flag even if the group has one rank
    if not getattr(linear_weight, "tensor_model_parallel", False):
        return
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is not None and group.size() > 1:
        raise NotImplementedError(
            f"expected all classes of linear_weight on this rank, got one of {group.size()} shards of tensor "
            "parallelism; docs/distributed.md, Without DTensor, has a loss of shards, whose gradient Megatron's hook "
            "adds to main_grad"
        )
