"""The process group whose ranks share one card: its collectives, and a model trained over it, on the CPU."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from process_pool import STAGED, run_in_world
from sharded_inputs import mesh_of
from test_distributed_training import fsdp2
from test_distributed_vocabulary import sharded_vocabulary_traffic
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

WORLD = (STAGED, 2)


def test_collectives():
    run_in_world(WORLD, collectives)


def collectives(device):
    rank, group = dist.get_rank(), mesh_of(device, 2).get_group()
    own = torch.arange(4.0, device=device) + 10.0 * rank  # 0 1 2 3 | 10 11 12 13
    for op, expected in ((dist.ReduceOp.SUM, 10.0), (dist.ReduceOp.AVG, 5.0), (dist.ReduceOp.MAX, 10.0)):
        found = own.clone()
        dist.all_reduce(found, op)
        assert found[0] == expected, op
    found = own.clone()
    dist.broadcast(found, 1)
    assert found.tolist() == [10, 11, 12, 13]
    found = torch.empty(8, device=device)
    dist.all_gather_into_tensor(found, own)
    assert found.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    dist.reduce_scatter_tensor(found := torch.empty(2, device=device), own)
    assert found.tolist() == [10 + 4 * rank, 12 + 4 * rank]
    dist.all_to_all_single(found := torch.empty(4, device=device), own)
    assert found.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
    leaf = torch.empty(4, device=device, requires_grad=True)  # as of a pipeline's stage
    works = [dist.isend(own, 1 - rank), dist.irecv(leaf, 1 - rank)]
    for work in works:
        work.wait()
    assert leaf[0] == 10 * (1 - rank)
    every = [None, None]
    dist.all_gather_object(every, rank)
    assert every == [0, 1]
    dist.barrier()
    assert functional.all_reduce(own, "sum", group)[0] == 10.0
    whole = torch.arange(6.0, device=device).view(3, 2)
    assert torch.equal(distribute_tensor(whole, mesh_of(device, 2), [Shard(0)]).full_tensor(), whole)
    part = DTensor.from_local(own, mesh_of(device, 2), [Partial()]).redistribute(placements=[Shard(0)])
    assert part.to_local().tolist() == [10 + 4 * rank, 12 + 4 * rank]


def test_a_sharded_vocabulary():
    run_in_world(WORLD, sharded_vocabulary_traffic, {"label_smoothing": 0.1})


def test_fsdp2():
    run_in_world(WORLD, fsdp2, False)
