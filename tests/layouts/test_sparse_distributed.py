"""A sparse gradient beside DTensors: ranks that share the tokens draw for themselves."""

# B x T tokens, D hidden, V vocabulary

import torch
import torch.distributed as dist
from in_worlds import in_worlds
from process_pool import worlds
from reference_loss import error
from sharded_inputs import R, batch, mesh_of, place
from torch.distributed.tensor import Shard

import flce_ops
from flce_ops.distributed.layout import BETWEEN_RANKS


def losses(*args, **options):
    return flce_ops.linear_cross_entropy(*args, reduction="sum", **options)


def losses_of_tokens(*args, **options):
    return flce_ops.linear_cross_entropy(*args, reduction="none", **options).sum()


def log_probs(*args, **options):
    return flce_ops.linear_log_probs(*args, **options).log_probs.sum()


@in_worlds(worlds(2, gloo=(2,)))
def test_ranks_that_share_the_tokens_draw_for_themselves(device):
    mesh, rank = mesh_of(device, dist.get_world_size()), dist.get_rank()
    sparse = {"gradient_threshold": 2.0**-7, "gradient_mode": "unbiased"}

    def gradients(function, inputs, seed):
        seed = torch.tensor(seed, device=device)
        loss = function(*inputs.args, **sparse, gradient_seed=seed)
        return torch.autograd.grad(loss, (inputs.input, inputs.linear_weight))

    for function in (losses, losses_of_tokens, log_probs):
        inputs = batch(device, vocab=307, dtype=torch.float64)
        found = gradients(function, place(inputs, mesh, [Shard(1)], [R]), 5)
        own = inputs.clone()
        for name in ("input", "target"):
            part = getattr(inputs, name).detach().chunk(2, 1)[rank].contiguous()
            setattr(own, name, part.requires_grad_(name == "input"))
        expected = gradients(function, own, 5 + rank * BETWEEN_RANKS)
        assert all(error(ours.to_local(), exact) < 1e-12 for ours, exact in zip(found, expected, strict=True))
