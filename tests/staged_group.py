"""A process group whose ranks share one card: collectives of CUDA tensors through the host's memory and gloo.

NCCL refuses two ranks on one card. This group copies a tensor to the host, lets gloo send it, and copies the result
back, so FSDP, DTensor and plans run on the kernels of a card wherever there is one. The CPU's memory takes the same
path, which is how the group is tested without a card.

    dist.init_process_group(staged_group.NAME, ...)
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

NAME = "staged"


def staged(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def put(tensor: Tensor, message: Tensor) -> None:
    """Pipelines receive into leaves that require a gradient."""
    tensor.detach().copy_(message)


def done(results: list[Tensor]) -> dist.Work:
    """Work that is finished: the copies back are in the current stream."""
    devices = [results[0].device] if results and results[0].is_cuda else []
    future: Future = Future(devices=devices)
    future.set_result(results)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Received(dist.Work):
    """A message that is copied to its tensor when it is waited for."""

    def __init__(self, work: dist.Work, message: Tensor, tensor: Tensor) -> None:
        super().__init__()
        self.work, self.message, self.tensor = work, message, tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        put(self.tensor, self.message)
        return True


class StagedGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def reduced(self, tensor: Tensor, op: dist.ReduceOp) -> Tensor:  # on the host
        message, options = staged(tensor), dist.AllreduceOptions()
        mean = op == dist.ReduceOp.AVG  # gloo has none
        options.reduceOp = dist.ReduceOp.SUM if mean else op
        self.gloo.allreduce([message], options).wait()
        return message.div_(self.size()) if mean else message

    def gathered(self, tensor: Tensor) -> list[Tensor]:  # on the host
        message = staged(tensor)
        parts = [torch.empty_like(message) for _ in range(self.size())]
        self.gloo.allgather([parts], [message]).wait()
        return parts

    def allreduce(self, tensors, opts=None):
        for tensor in tensors:
            put(tensor, self.reduced(tensor, dist.ReduceOp.SUM if opts is None else opts.reduceOp))
        return done(tensors)

    def broadcast(self, tensors, opts):
        message = staged(tensors[0])
        self.gloo.broadcast([message], opts).wait()
        put(tensors[0], message)
        return done(tensors)

    def scatter(self, outputs, inputs, opts):
        message = torch.empty(outputs[0].shape, dtype=outputs[0].dtype)
        self.gloo.scatter([message], [[staged(part) for part in parts] for parts in inputs], opts).wait()
        put(outputs[0], message)
        return done(outputs)

    def allgather(self, outputs, inputs, opts=None):
        for parts, tensor in zip(outputs, inputs, strict=True):
            for out, part in zip(parts, self.gathered(tensor), strict=True):
                put(out, part)
        return done([part for parts in outputs for part in parts])

    def all_gather_single(self, output, input, opts=None):
        put(output, torch.cat([part.view(-1) for part in self.gathered(input)]).view(output.shape))
        return done([output])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return done(outputs)

    def reduce_scatter(self, outputs, inputs, opts):
        for output, parts in zip(outputs, inputs, strict=True):
            put(output, [self.reduced(part, opts.reduceOp) for part in parts][self.rank()])
        return done(outputs)

    def reduce_scatter_single(self, output, input, opts):
        put(output, self.reduced(input, opts.reduceOp).view(self.size(), *output.shape)[self.rank()])
        return done([output])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return done(outputs)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):
        received = torch.empty(output.shape, dtype=output.dtype)
        self.gloo.alltoall_base(received, staged(input), output_sizes, input_sizes, dist.AllToAllOptions()).wait()
        put(output, received)
        return done([output])

    def send(self, tensors, rank, tag):
        return self.gloo.send([staged(tensors[0])], rank, tag)

    def recv(self, tensors, rank, tag):
        message = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
        return Received(self.gloo.recv([message], rank, tag), message, tensors[0])

    def barrier(self, opts=None):
        self.gloo.barrier().wait()
        return done([])

    # torch 2.11's names
    allreduce_coalesced = allreduce
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
