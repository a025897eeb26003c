"""linear_policy_loss on DTensors, over gloo (CI) and NCCL (marker multigpu), against the plain formula."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from reference_loss import error
from reference_policy import cancellation, make_policy, plain_policy_loss, run_policy
from sharded_inputs import full, mesh_of
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import flce_ops

B, T, D, V = 3, 14, 16, 61  # uneven shards
R = Replicate()
OPTIONS = {"clip_high": 0.28, "dual_clip": 3.0, "beta": 0.1}
CLASSES = ("linear_weight", "linear_bias")
LAYOUTS = {  # layouts of the tokens and of the classes; whether one pass makes the gradients
    "tokens": ([Shard(1)], [R], True),
    "vocabulary": ([R], [Shard(0)], False),
}


def sequences(device):
    call = make_policy((B * T, D, V), dtype=torch.float64, bias=True, token_weight=True)
    call["target"][: T // 2] = -100  # the ranks have different numbers of valid tokens
    shaped = {n: t if n in CLASSES else t.view(B, T, *t.shape[1:]) for n, t in call.items()}
    return {name: tensor.to(device) for name, tensor in shaped.items()}


@pytest.mark.parametrize("world", worlds(2, 4, gloo=(2,)))
def test_layouts_give_the_loss_and_gradients_of_one_process(world):
    run_in_world(world, layouts)


def layouts(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, classes, one_pass in LAYOUTS.values():
        for options in ({}, {"reduction": "none"}, {"normalizer": 37.5}, {"token_weight": None}):
            call = {**sequences(device), **{n: v for n, v in options.items() if n == "token_weight"}}
            options = OPTIONS | {n: v for n, v in options.items() if n != "token_weight"}
            expected = run_policy(plain_policy_loss, call, **options)
            leaves = {}
            for name, tensor in call.items():
                if tensor is not None:
                    placed = distribute_tensor(tensor, mesh, classes if name in CLASSES else tokens)
                    leaves[name] = placed.requires_grad_(name in expected)
            found = flce_ops.linear_policy_loss(**leaves, **options)
            if one_pass and options.get("reduction") != "none":
                assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
            full(found.loss).sum().backward()
            assert not found.log_probs.requires_grad and found.log_probs.shape == (B, T)
            assert error(full(found.loss), expected["loss"]) < 1e-13 * cancellation(call, **options)
            assert error(full(found.log_probs), expected["log_probs"]) < 1e-13
            for name in ("input", *CLASSES):
                assert error(full(leaves[name].grad), expected[name]) < 1e-12, name
            if one_pass:
                assert leaves["linear_weight"].grad.placements == (Partial(),)


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_gemm_passes_of_each_layout(world):
    run_in_world(world, passes)


def passes(device):
    mesh = mesh_of(device, dist.get_world_size())
    call = sequences(device)
    for tokens, classes, one_pass in LAYOUTS.values():
        leaves = {
            n: distribute_tensor(t, mesh, classes if n in CLASSES else tokens).requires_grad_(n in ("input", *CLASSES))
            for n, t in call.items()
        }
        with flce_ops.workspace(retained=0), FlopCounterMode(display=False) as flops:
            full(flce_ops.linear_policy_loss(**leaves).loss).backward()
        local, shard = leaves["input"].to_local(), leaves["linear_weight"].to_local()
        assert flops.get_total_flops() == (3 if one_pass else 4) * 2 * local.numel() * shard.shape[0]
    plain = call | {"input": leaves["input"], "linear_weight": leaves["linear_weight"], "linear_bias": None}
    found = flce_ops.linear_policy_loss(**plain)  # the other arguments are the same on every rank
    assert error(full(found.loss), plain_policy_loss(**call | {"linear_bias": None})[0]) < 1e-13 * cancellation(
        call | {"linear_bias": None}
    )
    with pytest.raises(ValueError, match="linear_policy_loss: linear_weight is a DTensor"):
        flce_ops.linear_policy_loss(**call | {"linear_weight": leaves["linear_weight"]})
