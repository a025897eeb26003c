"""linear_token_loss on DTensors, over gloo (CI) and NCCL (marker multigpu), against dense float64."""

# B batch, T tokens of one sequence, K classes of a token, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from reference_loss import error
from reference_token_loss import dense_token_loss, make_call, run
from sharded_inputs import full, mesh_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops

B, T, D, V = 3, 14, 16, 61  # uneven shards
R = Replicate()
LAYOUTS = {"tokens": ([Shard(1)], [R], True), "vocabulary": ([R], [Shard(0)], False)}


def of_vectors(log_prob, v, gamma, *, lse):
    return -v.softmax(0)[0] * (1 - log_prob.exp()) ** gamma * log_prob + 1e-2 * lse**2


def of_entropy(log_prob, v, gamma, *, entropy):
    return -gamma * v[0] * log_prob - 0.1 * entropy


def of_classes(log_prob, q, gamma):
    return -gamma * (q * log_prob).sum()


FUNCTIONS = [(of_vectors, ("lse",), 0), (of_entropy, ("entropy",), 0), (of_classes, (), 4)]


def made(topk, device):
    call = make_call((B * T, D, V), topk=topk, token_weight=True, device=device)
    call["target"][: T // 2] = -100  # the ranks have different numbers of valid tokens
    return call, torch.rand(B * T, 4, device=device).double()


@pytest.mark.parametrize("world", worlds(2, 4, gloo=(2,)))
def test_layouts_give_the_loss_and_gradients_of_one_process(world):
    run_in_world(world, layouts)


def layouts(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, classes, one_pass in LAYOUTS.values():
        for function, reads, topk in FUNCTIONS:
            call, v = made(topk, device)
            for options in ({}, {"normalizer": 37.5}):
                expected = run(dense_token_loss, call, function, v, 1.5, reads=reads, **options)
                leaves = {}
                for name in ("input", "linear_weight", "target", "token_weight"):
                    whole = name == "linear_weight"
                    shaped = call[name] if whole else call[name].view(B, T, *call[name].shape[1:])
                    placed = distribute_tensor(shaped, mesh, classes if whole else tokens)
                    leaves[name] = placed.requires_grad_(name in expected)
                tensor = distribute_tensor(v.view(B, T, 4), mesh, tokens)
                head = [leaves.pop(name) for name in ("input", "linear_weight", "target")]
                found = flce_ops.linear_token_loss(*head, function, tensor, 1.5, **leaves, **options)
                if one_pass and "entropy" not in reads:
                    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
                full(found.loss).backward()
                leaves |= {"input": head[0], "linear_weight": head[1]}
                assert error(full(found.loss), expected["loss"]) < 1e-12
                assert error(full(found.log_probs).reshape(expected["log_probs"].shape), expected["log_probs"]) < 1e-12
                for name in ("input", "linear_weight", "token_weight"):
                    assert error(full(leaves[name].grad).reshape(expected[name].shape), expected[name]) < 1e-12, name


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_a_head_that_fsdp_shards(world):
    run_in_world(world, sharded_head)


class Head(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x, target, v):
        return flce_ops.linear_token_loss(x, self.weight, target, of_vectors, v, 1.5, reduction="sum")[0]


def sharded_head(device):
    call, v = made(0, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    head = fully_shard(Head(call["linear_weight"]), mesh=mesh_of(device, ranks))
    own = slice(rank * B * T // ranks, (rank + 1) * B * T // ranks)
    head(call["input"][own], call["target"][own], v[own]).backward()
    operands = {name: call[name] for name in ("input", "linear_weight", "target")}
    expected = run(dense_token_loss, operands, of_vectors, v, 1.5, reads=("lse",), reduction="sum")
    assert error(full(head.weight.grad) * ranks, expected["linear_weight"]) < 1e-12  # FSDP averages over the ranks
