"""cross_entropy of DTensors, with sharded tokens or classes, gives the results of one process."""

# B batch, T tokens of a sequence, V vocabulary

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from process_pool import run_in_world, worlds
from sharded_inputs import full, mesh_of
from test_cross_entropy import dense, make_logits, value_and_gradient
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops


@in_worlds(worlds(2))
def test_sharded_tokens_give_the_loss_and_gradient_of_one_process(device):
    mesh = mesh_of(device, dist.get_world_size())
    logits, target, options = make_logits((15, 31), device=device, dtype=torch.float64, options={"weight": True})
    # 3 sequences of 5 tokens: uneven shards in either dimension
    logits, target = logits.view(3, 5, 31), target.view(3, 5)
    for placement in (Shard(0), Shard(1), Replicate()):
        for reduction, made in (("mean", options), ("sum", {"label_smoothing": 0.1}), ("none", options)):
            cotangent = torch.linspace(-1, 1, 15, dtype=torch.float64, device=device).view(3, 5)
            arguments = {"reduction": reduction, **made}
            right = value_and_gradient(dense, logits, target, cotangent if reduction == "none" else None, **arguments)
            placed = distribute_tensor(logits, mesh, [placement]).requires_grad_()
            loss, metrics = flce_ops.cross_entropy(placed, target, return_metrics=True, **arguments)
            grad_output = distribute_tensor(cotangent, mesh, loss.placements) if reduction == "none" else None
            loss.backward(grad_output)
            assert loss.placements == ((placement,) if reduction == "none" else (Replicate(),))
            assert placed.grad.placements == (placement,)
            torch.testing.assert_close((full(loss), full(placed.grad)), right)
            argmax = torch.where(target >= 0, logits.argmax(-1), -1)
            assert torch.equal(full(metrics.argmax), argmax)
            valid = target >= 0
            torch.testing.assert_close(
                full(metrics.token_accuracy), (argmax == target)[valid].sum() / valid.sum(), check_dtype=False
            )
    with torch.inference_mode():
        loss = flce_ops.cross_entropy(distribute_tensor(logits, mesh, [Shard(0)]), target)
        torch.testing.assert_close(full(loss), dense(logits, target))
    with pytest.raises(ValueError, match="logits are a plain tensor"):
        flce_ops.cross_entropy(logits, distribute_tensor(target, mesh, [Shard(0)]))


@in_worlds(worlds(2))
def test_sharded_classes_give_the_loss_and_gradient_of_one_process(device):
    mesh = mesh_of(device, dist.get_world_size())
    for classes in (31, 2, 1):  # uneven; one class a rank; no class on the last rank
        for options in CLASSES_OPTIONS.values():
            logits, target, made = make_logits((15, classes), device=device, dtype=torch.float64, options=options)
            logits, target = logits.view(3, 5, classes), target.view(3, 5)
            if "token_weight" in made:
                made["token_weight"] = made["token_weight"].view(3, 5)
            for reduction in ("mean", "sum", "none"):
                check_sharded_classes(mesh, [Shard(2)], logits, target, reduction, made)
    loss = torch.compile(flce_ops.cross_entropy, fullgraph=True, backend="aot_eager")
    placed = distribute_tensor(logits, mesh, [Shard(-1)])
    torch.testing.assert_close(full(loss(placed, target)), flce_ops.cross_entropy(logits, target))


CLASSES_OPTIONS = {
    "plain": {},
    "everything": {
        **{"weight": True, "token_weight": True, "label_smoothing": 0.1, "z_loss": 0.01},
        **{"softcap": 3.0, "logit_scale": -0.7, "temperature": 1.3},
    },
}


def test_target_outside_the_classes_of_all_ranks_is_an_index_error():
    """On CUDA it is a device-side assert, which would end the processes."""
    run_in_world(("cpu", 2), target_out_of_range)


def target_out_of_range(device):
    logits, target, _ = make_logits((15, 31), device=device)
    placed = distribute_tensor(logits, mesh_of(device, dist.get_world_size()), [Shard(1)])
    for bad in (31, -1):
        target[3] = bad
        with pytest.raises(IndexError, match="expected target in .* at flat position 3"):
            flce_ops.cross_entropy(placed, target)


def check_sharded_classes(mesh, placements, logits, target, reduction, options):
    arguments = {"reduction": reduction, **options}
    cotangent = torch.linspace(-1, 1, 15, dtype=torch.float64, device=logits.device).view(3, 5)
    cotangent = cotangent if reduction == "none" else None
    right = value_and_gradient(dense, logits, target, cotangent, **arguments)
    placed = distribute_tensor(logits, mesh, placements).requires_grad_()
    loss, metrics = flce_ops.cross_entropy(placed, target, return_metrics=True, **arguments)
    loss.backward(None if cotangent is None else distribute_tensor(cotangent, mesh, loss.placements))
    assert placed.grad.placements == tuple(placements)
    torch.testing.assert_close((full(loss), full(placed.grad)), right)
    z = (logits * options.get("logit_scale", 1.0)).argmax(-1)
    assert torch.equal(full(metrics.argmax), torch.where(target >= 0, z, -1))


@in_worlds(worlds(4))
def test_tokens_and_classes_may_both_be_sharded(device):
    mesh = mesh_of(device, 2, dist.get_world_size() // 2)
    logits, target, options = make_logits((15, 31), device=device, dtype=torch.float64, options={"weight": True})
    for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(1)], [Shard(2), Shard(2)]):
        for reduction in ("mean", "none"):
            check_sharded_classes(mesh, placements, logits.view(3, 5, 31), target.view(3, 5), reduction, options)


def test_an_ignored_class_may_be_one_of_a_shard():
    """ignore_index counts in the whole vocabulary, while a shard's columns start at 0."""
    run_in_world(("cpu", 2), ignored_class)


def ignored_class(device):
    mesh = mesh_of(device, dist.get_world_size())
    logits, target, _ = make_logits((15, 6), device=device, dtype=torch.float64)
    target = target.clamp(min=0)
    for ignore_index in (1, 4):
        found = flce_ops.cross_entropy(
            distribute_tensor(logits, mesh, [Shard(1)]), target, ignore_index=ignore_index, reduction="none"
        )
        right = flce_ops.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
        torch.testing.assert_close(full(found), right)
