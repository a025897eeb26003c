"""cross_entropy of DTensors: tokens sharded, against one process; classes sharded, refused by name."""

# B batch, T tokens of a sequence, V vocabulary

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from test_cross_entropy import dense, make_logits, value_and_gradient
from test_distributed import full, mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops


@pytest.mark.parametrize("world", worlds(2))
def test_sharded_tokens_give_the_loss_and_gradient_of_one_process(world):
    run_in_world(world, sharded_tokens)


def sharded_tokens(device):
    mesh = mesh_of(device, dist.get_world_size())
    logits, target, options = make_logits((15, 31), device=device, dtype=torch.float64, options={"weight": True})
    logits, target = logits.view(3, 5, 31), target.view(3, 5)  # 3 sequences, 5 tokens: uneven shards either way
    for placement in (Shard(0), Shard(1), Replicate()):
        for reduction, made in (("mean", options), ("sum", {"label_smoothing": 0.1}), ("none", options)):
            cotangent = torch.linspace(-1, 1, 15, dtype=torch.float64, device=device).view(3, 5)
            arguments = {"reduction": reduction, **made}
            right = value_and_gradient(dense, logits, target, cotangent if reduction == "none" else None, **arguments)
            placed = distribute_tensor(logits, mesh, [placement]).requires_grad_()
            loss, metrics = flce_ops.cross_entropy(placed, target, return_metrics=True, **arguments)
            upstream = distribute_tensor(cotangent, mesh, loss.placements) if reduction == "none" else None
            loss.backward(upstream)
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
    with pytest.raises(NotImplementedError, match="logits are sharded along their classes"):
        flce_ops.cross_entropy(distribute_tensor(logits, mesh, [Shard(2)]), target)
    with pytest.raises(ValueError, match="logits are a plain tensor"):
        flce_ops.cross_entropy(logits, distribute_tensor(target, mesh, [Shard(0)]))
