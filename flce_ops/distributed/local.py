"""From a DTensor to this rank's tensor, and the gradient's way back."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flce_ops.distributed.layout import Layout


def localize(
    layout: Layout,
    tensor: Tensor | None,
    placements: tuple[Placement, ...],
    *,
    gradient: tuple[Placement, ...] | None = None,
    keep_partial: bool = False,
) -> Tensor | None:
    """This rank's part of `tensor` under `placements`; a plain tensor counts as replicated.

    The local gradients are parts of a gradient under `gradient` (default: `placements`). It returns to the placements
    that `tensor` has, summed where it is Partial; with `keep_partial` it stays Partial if `tensor` did not move.
    """
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        keep_partial = keep_partial and tensor.placements == placements
    else:
        tensor = DTensor.from_local(tensor, layout.mesh, layout.replicated, run_check=False)
        keep_partial = False
    return ToLocal.apply(tensor, placements, gradient or placements, keep_partial)


def localize_head(
    layout: Layout, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None
) -> tuple[torch.Size, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The shape of this rank's tokens, and its (N, D) input, (v, D) weight, (N,) or (N, K) target and (v,) bias."""
    local_input = localize(layout, input, layout.tokens, gradient=layout.input_gradient)
    tokens_shape = local_input.shape[:-1]
    return tokens_shape, (
        local_input.reshape(tokens_shape.numel(), local_input.shape[-1]),
        localize_per_class(layout, linear_weight),
        localize_per_slot(layout, target, tokens_shape),
        localize_per_class(layout, linear_bias),
    )


def localize_per_slot(layout: Layout, tensor: Tensor, tokens_shape: torch.Size) -> Tensor:
    """(...) or (..., K) -> (N,) or (N, K) of this rank's tokens."""
    return localize(layout, tensor, layout.tokens).reshape(tokens_shape.numel(), *tensor.shape[len(tokens_shape) :])


def localize_per_class(layout: Layout, tensor: Tensor | None) -> Tensor | None:
    """Rows of this rank's classes; the gradient is a part of the sum over the ranks that share the tokens."""
    classes = layout.placements(vocabulary=Shard(0))
    gradient = layout.placements(tokens=Partial(), vocabulary=Shard(0))
    return localize(layout, tensor, classes, gradient=gradient, keep_partial=True)


class ToLocal(Function):
    """`tensor.redistribute(placements).to_local(grad_placements=gradient)`, right in three cases more.

    The DTensor gradient gets tensor's own shape and strides. to_local guesses them from the local gradient, wrongly for
    uneven shards; AccumulateGrad then copies it on some ranks only, which on torch 2.11 waits for the others forever.
    A Partial gradient is summed also where `placements` are tensor's own, and backward can be differentiated once more.
    """

    @staticmethod
    def forward(
        ctx,
        tensor: DTensor,
        placements: tuple[Placement, ...],
        gradient: tuple[Placement, ...],
        keep_partial: bool,
    ) -> Tensor:
        ctx.mesh, ctx.shape, ctx.stride = tensor.device_mesh, tensor.shape, tensor.stride()
        ctx.gradient = gradient
        ctx.returns = gradient
        if not keep_partial:
            # a Partial tensor's gradient is the same on every rank
            ctx.returns = tuple(Replicate() if placed.is_partial() else placed for placed in tensor.placements)
        ctx.set_materialize_grads(False)
        local = tensor.redistribute(tensor.device_mesh, placements).to_local()
        return local.view_as(local)  # a fresh tensor for autograd to mark

    @staticmethod
    def backward(ctx, grad: Tensor | None):
        if grad is None:
            return None, None, None, None
        grad, stride = laid_out_as(grad, ctx.shape, ctx.stride)
        whole = DTensor.from_local(grad, ctx.mesh, ctx.gradient, run_check=False, shape=ctx.shape, stride=stride)
        if ctx.returns != ctx.gradient:
            whole = whole.redistribute(ctx.mesh, ctx.returns)
        return whole, None, None, None


def laid_out_as(local: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """A local part with its dimensions in memory in the order of the whole's strides, which it returns.

    Where those leave gaps or overlap, the part and the whole are contiguous: AccumulateGrad's rule for plain leaves.
    """
    contiguous = torch.empty(shape, device="meta").stride()
    if stride == contiguous:
        return local.contiguous(), contiguous
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    dense = torch.empty([shape[dim] for dim in order], device="meta").stride()
    if dense != tuple(stride[dim] for dim in order):
        return local.contiguous(), contiguous
    back = [order.index(dim) for dim in range(len(shape))]
    return local.permute(order).contiguous().permute(back), stride
