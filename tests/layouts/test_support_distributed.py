"""The support that was sampled from on DTensors, over gloo (CI) and NCCL (marker multigpu), against dense logits."""

# B batch, T tokens of one sequence, K ids of each, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from reference_loss import error
from reference_support import as_csr, dense_rows, draw
from sharded_inputs import full, mesh_of
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flce_ops

B, T, D, K = 3, 14, 16, 6
R = Replicate()
LAYOUTS = [([Shard(1)], [R]), ([Shard(0)], [R]), ([R], [Shard(0)])]  # of the tokens, of the classes
OPTIONS = {"softcap": 5.0, "logit_scale": 0.7}


def sequences(device, classes):
    inputs, ids = draw((B * T, D, classes), K, dtype=torch.float64, bias=True)
    shaped = inputs.input.detach().view(B, T, D), inputs.linear_weight.detach(), inputs.target.view(B, T)
    call = [t.to(device) for t in (*shaped, inputs.linear_bias.detach())]
    return call, ids.view(B, T, -1).to(device)


@pytest.mark.parametrize("world", worlds(2, 4, gloo=(2, 4)))
@pytest.mark.parametrize("classes", [61, 5])  # uneven over the ranks; the last of four has none
def test_layouts_give_the_rows_and_gradients_of_one_process(world, classes):
    run_in_world(world, layouts, classes)


def layouts(device, classes):
    mesh = mesh_of(device, dist.get_world_size())
    call, ids = sequences(device, classes)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in call]
    input, linear_weight, target, linear_bias = leaves
    log_probs, entropy = dense_rows(*leaves, ids=ids, **OPTIONS)
    (log_probs.sum() - 0.3 * entropy.square().sum()).backward()
    for tokens, of_classes in LAYOUTS:
        for form in ("plain", "sharded", "ids and offsets"):
            support = as_csr(ids) if form == "ids and offsets" else ids
            if form == "sharded":
                support = distribute_tensor(ids, mesh, tokens)
            placements = (tokens, of_classes, tokens, of_classes)
            placed = [distribute_tensor(t, mesh, p) for t, p in zip(call, placements)]
            for leaf in (placed[0], placed[1], placed[3]):
                leaf.requires_grad_()
            found = flce_ops.linear_log_probs(*placed, support=support, entropy=True, argmax=True, **OPTIONS)
            assert isinstance(found.log_probs, DTensor)
            (full(found.log_probs).sum() - 0.3 * full(found.entropy).square().sum()).backward()
            assert error(full(found.log_probs), log_probs) < 1e-13
            assert error(full(found.entropy), entropy) < 1e-12
            for leaf, exact in zip(placed, leaves):
                if exact.grad is not None:
                    assert error(full(leaf.grad), exact.grad) < 1e-12, (form, tokens, of_classes)


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_a_policy_loss_over_a_sharded_vocabulary(world):
    run_in_world(world, policy)


def policy(device):
    mesh = mesh_of(device, dist.get_world_size())
    call, ids = sequences(device, 61)
    advantages = torch.linspace(-0.5, 2.0, B * T, device=device, dtype=torch.float64).view(B, T)
    for tokens, of_classes in LAYOUTS:
        results = []
        for sharded in (False, True):
            placements = (tokens, of_classes, tokens, of_classes)
            leaves = [distribute_tensor(t, mesh, p) if sharded else t.clone() for t, p in zip(call, placements)]
            for leaf in (leaves[0], leaves[1], leaves[3]):
                leaf.requires_grad_()
            input, linear_weight, target, linear_bias = leaves
            given = {"linear_bias": linear_bias, "support": ids, "clip_high": 0.28}
            found = flce_ops.linear_policy_loss(input, linear_weight, target, advantages, **given)
            full(found.loss).backward()
            results.append([full(found.loss), *(full(leaf.grad) for leaf in leaves if leaf.requires_grad)])
        for one, other in zip(*results):
            assert error(other, one) < 1e-12


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_ranks_exchange_numbers_of_tokens_alone(world):
    run_in_world(world, exchanged)


def exchanged(device):
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device, dist.get_world_size())
    call, ids = sequences(device, 61)
    placements = ([R], [Shard(0)], [R], [Shard(0)])
    placed = [distribute_tensor(t, mesh, p) for t, p in zip(call, placements)]
    with CommDebugMode() as comm:
        flce_ops.linear_log_probs(*placed, support=ids)
    assert comm.get_total_counts() == 1  # one all_gather


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_ids_of_all_tokens_are_plain(world):
    run_in_world(world, refused)


def refused(device):
    mesh = mesh_of(device, dist.get_world_size())
    call, ids = sequences(device, 61)
    placed = [distribute_tensor(t, mesh, p) for t, p in zip(call, ([Shard(0)], [R], [Shard(0)], [R]))]
    support = [distribute_tensor(part, mesh, [R]) for part in as_csr(ids)]
    with pytest.raises(
        ValueError, match="linear_log_probs: expected ids and offsets of support, which are of all tokens"
    ):
        flce_ops.linear_log_probs(*placed, support=support)
