"""A rank that dies in a step: the others are told so by the collective that they wait in, and can go on alone."""

import json

import pytest
from fresh_process import run_fresh

SCRIPT = """
import json, multiprocessing, os, sys, tempfile
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import flce_ops

dies_in, weight_placement = sys.argv[1:]

def plain():
    torch.manual_seed(0)
    x, w = torch.randn(12, 6, requires_grad=True), torch.randn(32, 6, requires_grad=True)
    return x, w, torch.arange(12)

def rank_of_two(rank, folder, results, ready):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/r", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    mesh = init_device_mesh("cpu", (2,))
    x, w, target = plain()
    expected = [part.tolist() for part in torch.autograd.grad(flce_ops.linear_cross_entropy(x, w, target), (x, w))]
    of_weight, of_tokens = (Shard(0), Replicate()) if weight_placement == "classes" else (Replicate(), Shard(0))
    x, target = (distribute_tensor(t.detach(), mesh, [of_tokens]) for t in (x, target))
    w = distribute_tensor(w.detach(), mesh, [of_weight])
    x.requires_grad_(), w.requires_grad_()
    before = flce_ops.get_workspace()

    def step():
        loss = flce_ops.linear_cross_entropy(x, w, target, reduction="none").full_tensor().sum()
        if rank == 1 and dies_in == "backward":
            os._exit(1)
        return [g.full_tensor().tolist() for g in torch.autograd.grad(loss, (x, w))]

    if rank == 1 and dies_in == "forward":
        ready.wait()
        os._exit(1)
    ready.set()
    try:
        step()
        said = ""
    except RuntimeError as error:
        said = str(error)
    x, w, target = plain()
    found = [part.tolist() for part in torch.autograd.grad(flce_ops.linear_cross_entropy(x, w, target), (x, w))]
    results.put((said, found == expected, flce_ops.get_workspace() == before))
    os._exit(0)

context = multiprocessing.get_context("fork")
results, folder = context.SimpleQueue(), tempfile.mkdtemp()
ready = context.Event()  # rank 0 may still be sending what rank 1 needs no more
processes = [context.Process(target=rank_of_two, args=(rank, folder, results, ready)) for rank in range(2)]
for process in processes:
    process.start()
print(json.dumps(results.get()))
"""


@pytest.mark.parametrize(
    "dies_in, sharded",
    [
        ("forward", "classes"),
        pytest.param("forward", "tokens", marks=pytest.mark.exhaustive),
        pytest.param("backward", "classes", marks=pytest.mark.exhaustive),
        ("backward", "tokens"),
    ],
)
def test_the_others_are_told_and_go_on(dies_in, sharded):
    said, right, as_before = json.loads(run_fresh(SCRIPT, dies_in, sharded))
    assert "gloo" in said.lower() or "connection" in said.lower(), said
    assert right and as_before
