"""Records every collective and the bytes that a rank passes to it."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flce_ops.meta.arguments import WithGrad
from flce_ops.ops import kernel

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")

LOCAL = ("wait_tensor", "_wrap_tensor_autograd")  # these send nothing


ONE_PASS = WithGrad.op
KERNELS = {ONE_PASS: kernel(WithGrad)}


class RecordCollectives(TorchDispatchMode):
    """with RecordCollectives() as recorded: ...; recorded.calls == [("all_reduce", bytes of the local tensor), ...]"""

    def __init__(self, kernels: dict[str, Callable] = KERNELS) -> None:
        super().__init__()
        self.kernels = kernels
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first; its local operators come back to this mode
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES and name not in LOCAL:
            name = name.replace("_into_tensor", "").replace("_tensor", "").rstrip("_")
            sent = next(leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "numel"))
            once = name == "all_gather" and sent.numel() == 1 and sent.dtype == torch.int64  # check_ranks_agree
            # triton/first_call.py runs the kernel on meta tensors, and sends nothing
            if sent.device.type != "meta" and not once:
                self.calls.append((name, sent.numel() * sent.element_size()))
        if name in self.kernels and (kwargs or {}).get("group") is not None:
            # a mode does not see what a kernel calls, so run the kernel here
            with self:
                return self.kernels[name](*args, **kwargs)
        return func(*args, **(kwargs or {}))
