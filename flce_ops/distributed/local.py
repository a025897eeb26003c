"""Converts a DTensor to this rank's local tensor; in backward, the local gradient becomes a DTensor again."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate


def localize(
    mesh: DeviceMesh,
    tensor: Tensor | None,
    placements: tuple[Placement, ...],
    *,
    gradient: tuple[Placement, ...] | None = None,
    keep_partial: bool = False,
) -> Tensor | None:
    """This rank's part of `tensor` under `placements`. A plain tensor counts as replicated.

    The local gradients are parts of a gradient under `gradient` (default: `placements`). The gradient returns to the
    placements of `tensor`, summed if it is Partial. With `keep_partial` it stays Partial if `tensor` was not
    redistributed.
    """
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        keep_partial = keep_partial and tensor.placements == placements
    else:
        tensor = DTensor.from_local(tensor, mesh, (Replicate(),) * mesh.ndim, run_check=False)
        keep_partial = False
    return ToLocal.apply(tensor, placements, gradient or placements, keep_partial)


def globalize(mesh: DeviceMesh, local: Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A DTensor of shape `shape`, from this rank's part. Parts may have different sizes, so the shape must be given."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


class ToLocal(Function):
    """`tensor.redistribute(placements).to_local(grad_placements=gradient)`, correct in three more cases.

    First, the gradient has the shape and strides of `tensor`. to_local guesses them from the local gradient, wrongly
    for uneven shards. Then AccumulateGrad copies the gradient on some ranks only, which on torch 2.11 wait for the
    others forever. Second, a Partial gradient is summed even if `placements` are the tensor's own. Third, backward can
    be differentiated once more.
    """

    @staticmethod
    def forward(
        ctx, tensor: DTensor, placements: tuple[Placement, ...], gradient: tuple[Placement, ...], keep_partial: bool
    ) -> Tensor:
        ctx.mesh, ctx.shape, ctx.stride = tensor.device_mesh, tensor.shape, tensor.stride()
        ctx.gradient = gradient
        ctx.returns = gradient
        if not keep_partial:
            # the gradient of a Partial tensor is the same on every rank
            ctx.returns = tuple(Replicate() if placed.is_partial() else placed for placed in tensor.placements)
        ctx.set_materialize_grads(False)
        local = tensor.redistribute(tensor.device_mesh, placements).to_local()
        return local.view_as(local)  # a new tensor for autograd to mark

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
    """A local part whose dimensions have the order in memory that the whole's strides have. Also returns the whole's
    strides.

    If the strides leave gaps or overlap, both are contiguous, as AccumulateGrad does for plain leaves.
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


class SumOverRanks(Function):
    """Sums over ranks, Partial to Replicate. Backward can be differentiated, because each rank's use of the gradient is
    a part of a sum.

    The result is the sum of `total` over ranks (without it, of `local`), divided by `denominator` if given. The
    gradient is that of the sum of `local`. The quotient is taken of plain tensors, because torch 2.13 cannot compile a
    graph that divides DTensors here.
    """

    @staticmethod
    def forward(
        ctx,
        mesh: DeviceMesh,
        partial: tuple[Placement, ...],  # Partial on the mesh dimensions that are summed over
        local: Tensor | None,  # (), as are the next two
        total: Tensor | None = None,
        denominator: Tensor | None = None,
    ) -> DTensor:
        ctx.mesh, ctx.partial, replicated = mesh, partial, (Replicate(),) * mesh.ndim
        part = (local if total is None else total).detach()
        summed = DTensor.from_local(part, mesh, partial, run_check=False).redistribute(mesh, replicated)
        if denominator is None:
            return summed
        quotient = summed.to_local() / denominator.detach()
        return DTensor.from_local(quotient, mesh, replicated, run_check=False)

    @staticmethod
    def backward(ctx, grad: DTensor):
        local = localize(ctx.mesh, grad, (Replicate(),) * ctx.mesh.ndim, gradient=ctx.partial)
        return None, None, local, None, None
