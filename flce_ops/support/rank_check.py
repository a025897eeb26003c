"""Whether DTensors are among the arguments. FLCE_CHECK_RANKS=1: a call on DTensors first compares its arguments between
the ranks of their mesh.

If a reduction or softcap differed between ranks, they would combine numbers of different losses without an error. If
requires_grad or the workspace differed, ranks would send different things and wait for each other for ever. The check
is one gather of short texts for each mesh dimension, and waits for the device. The variable is read once, at import.
Without it nothing is sent.
"""

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .workspace import get_retained, get_workspace

ENABLED = os.environ.get("FLCE_CHECK_RANKS", "0") not in ("", "0")
COMPARED_BYTES = 16 << 20  # values of a tensor that every rank holds are compared up to this size


def any_dtensor(*tensors: Tensor | None) -> bool:
    """Does not import torch.distributed.tensor for users without DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for tensor in tensors:
            if isinstance(tensor, module.DTensor):
                return True
    return False


def check_ranks(op: str, arguments: dict[str, Any]) -> None:
    """Raises ValueError on every rank, with the names of arguments that differ."""
    if not any_dtensor(*arguments.values()):
        return
    import torch.distributed as dist

    meshes: Iterator[Any] = (value.device_mesh for value in arguments.values() if any_dtensor(value))
    mesh = next((mesh for mesh in meshes if mesh.get_coordinate() is not None), None)
    if mesh is None:
        return  # refused later, by name
    modes: dict[str, Any] = {
        "the function": op,
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(mesh.device_type) and torch.get_autocast_dtype(mesh.device_type),
        "set_workspace": (get_workspace(), get_retained()),
    }
    everyone: list[Any] = [(dist.get_rank(), {name: described(value) for name, value in (modes | arguments).items()})]
    for dim in range(mesh.ndim):
        gathered: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(gathered, everyone, group=mesh.get_group(dim))
        everyone = sum(gathered, [])
    different = []
    for name in dict.fromkeys(name for _, found in everyone for name in found):
        ranks_of: dict[str, list[int]] = {}
        for rank, found in sorted(everyone):
            ranks_of.setdefault(found.get(name, "absent"), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in ranks_of.items())
            different.append(f"{name} is {' but '.join(values)}")
    if different:
        raise ValueError(
            f"{op}: expected the same arguments on every rank of the mesh, got {'; '.join(different)}; pass the same "
            "everywhere (compared as FLCE_CHECK_RANKS is set)"
        )


def described(value: Any) -> str:
    """A text of what must be the same on every rank. If a rank holds only a part of a tensor, the text does not contain
    its values.
    """
    if not isinstance(value, Tensor):
        return repr(value)
    local: Any = value.detach()
    text = f"{value.dtype} of shape {tuple(value.shape)}" + value.requires_grad * " with requires_grad"
    if any_dtensor(value):
        text = f"a DTensor, {text}, {local.placements} on mesh {tuple(local.device_mesh.shape)}"
        if not all(placement.is_replicate() for placement in local.placements):
            return text
        local = local.to_local()
    if type(local) is not Tensor or local.layout != torch.strided or local.is_meta:
        return text
    if local.numel() == 1:
        return f"{text}, {local.item()}"
    return f"{text}, values {digest(local)}" if 0 < local.nbytes <= COMPARED_BYTES else text


def digest(tensor: Tensor) -> str:
    here = tensor.resolve_neg().cpu().contiguous()
    return hashlib.blake2b(ctypes.string_at(here.data_ptr(), here.nbytes), digest_size=4).hexdigest()
