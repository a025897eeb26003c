"""A sparse gradient on a mesh: which entries ranks keep that share the vocabulary, or the tokens."""

# B x T tokens, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from reference_loss import error
from sharded_inputs import batch, full, mesh_of, place
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import flce_ops
from flce_ops.distributed.layout import BETWEEN_RANKS

R = Replicate()


def sparse(mode="unbiased", of="both", seed=5, device="cpu"):
    return {
        "gradient_threshold": 2.0**-7,
        "gradient_mode": mode,
        "gradient_sparse": of,
        "gradient_seed": torch.tensor(seed, device=device),
    }


def gradients(inputs, function=flce_ops.linear_cross_entropy, **options):
    inputs = inputs if isinstance(inputs.input, torch.distributed.tensor.DTensor) else inputs.clone()
    loss = function(*inputs.args, **inputs.options, **options)
    return loss, torch.autograd.grad(loss, list(inputs.leaves.values()))


def same(found, expected):
    assert error(full(found[0]), expected[0]) < 1e-12
    for ours, exact in zip(found[1], expected[1], strict=True):
        assert error(full(ours), exact) < 1e-9


CASES = [
    ({}, {}),
    ({"mode": "drop"}, {"label_smoothing": 0.2}),
    ({"of": "input"}, {"softcap": 5.0, "logit_scale": -0.7, "z_loss": 1e-2}),
    ({"of": "linear_weight"}, {"label_smoothing": 0.1, "reduction": "sum"}),
]


@pytest.mark.parametrize("world", worlds(2, 4))
def test_a_sharded_vocabulary_keeps_the_entries_of_one_process(world):
    run_in_world(world, sharded_vocabulary)


def sharded_vocabulary(device):
    """Shards that end inside a tile of 2048 classes, several shards in one tile, and whole tiles."""
    mesh = mesh_of(device, dist.get_world_size())
    for vocab in (4507, 83, 2048 * dist.get_world_size()):
        for chosen, options in CASES if vocab == 4507 else CASES[:1]:
            inputs = batch(device, vocab=vocab, dtype=torch.float64, bias=True, weight=True, token_weight=True)
            placed = place(inputs, mesh, [R], [Shard(0)])
            found = gradients(placed, **sparse(**chosen, device=device), **options)
            path = flce_ops.last_path()
            assert path.op == "linear_cross_entropy_vocab_parallel_with_grad" and "a sparse gradient" in path.reason
            expected = gradients(inputs, **sparse(**chosen, device=device), **options)
            same(found, expected)
            exact = gradients(inputs, **options)
            assert max(error(ours, dense) for ours, dense in zip(expected[1], exact[1])) > 1e-2


@pytest.mark.parametrize("world", worlds(2))
def test_a_compiled_and_a_checkpointed_step_on_a_sharded_vocabulary_keep_them_too(world):
    run_in_world(world, compiled_and_checkpointed)


def compiled_and_checkpointed(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, vocab=307, dtype=torch.float64)
    expected = gradients(inputs, **sparse(device=device))
    placed = place(inputs, mesh, [R], [Shard(0)])

    def checkpointed(*args, **options):
        return checkpoint(flce_ops.linear_cross_entropy, *args, use_reentrant=False, **options)

    compiled = torch.compile(flce_ops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for function in (checkpointed, compiled):
        same(gradients(placed, function, **sparse(device=device)), expected)
    with pytest.raises(NotImplementedError, match="second derivatives of a loss with gradient_threshold"):
        loss = flce_ops.linear_cross_entropy(*placed.args, **sparse(device=device))
        torch.autograd.grad(loss, placed.input, create_graph=True)


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_ranks_that_share_the_tokens_draw_for_themselves(world):
    run_in_world(world, sharded_tokens)


def sharded_tokens(device):
    mesh, rank = mesh_of(device, dist.get_world_size()), dist.get_rank()

    def losses(*args, **options):
        return flce_ops.linear_cross_entropy(*args, reduction="sum", **options)

    def losses_of_tokens(*args, **options):
        return flce_ops.linear_cross_entropy(*args, reduction="none", **options).sum()

    def log_probs(*args, **options):
        return flce_ops.linear_log_probs(*args, **options).log_probs.sum()

    for function in (losses, losses_of_tokens, log_probs):
        inputs = batch(device, vocab=307, dtype=torch.float64)
        placed = place(inputs, mesh, [Shard(1)], [R])
        _, (grad_input, grad_weight) = gradients(placed, function, **sparse(device=device))
        own = inputs.clone()
        for name in ("input", "target"):
            part = getattr(inputs, name).detach().chunk(2, 1)[rank].contiguous()
            setattr(own, name, part.requires_grad_(name == "input"))
        _, expected = gradients(own, function, **sparse(seed=5 + rank * BETWEEN_RANKS, device=device))
        assert error(grad_input.to_local(), expected[0]) < 1e-12
        assert error(grad_weight.to_local(), expected[1]) < 1e-12


@pytest.mark.parametrize("world", worlds(2, gloo=(2,)))
def test_what_a_sharded_vocabulary_has_no_sparse_gradient_of_is_refused_by_name(world):
    run_in_world(world, refused)


def refused(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, vocab=37)
    placed = place(inputs, mesh, [R], [Shard(0)])
    several = distribute_tensor(inputs.target.unsqueeze(-1).expand(-1, -1, 2).contiguous(), mesh, [R])
    ones = distribute_tensor(torch.ones(several.shape, device=device), mesh, [R])
    over_shards = "linear_cross_entropy: the sparse gradient over a sharded vocabulary, but for a scalar loss"
    with pytest.raises(NotImplementedError, match=over_shards):
        flce_ops.linear_cross_entropy(*placed.args, reduction="none", **sparse(device=device))
    with pytest.raises(NotImplementedError, match=over_shards):
        flce_ops.linear_cross_entropy(*placed.args[:2], several, target_weight=ones, **sparse(device=device))
    with pytest.raises(NotImplementedError, match="linear_log_probs: the sparse gradient over a sharded vocabulary"):
        flce_ops.linear_log_probs(*placed.args, **sparse(device=device))
    with pytest.raises(NotImplementedError, match="linear_policy_loss: the sparse gradient over a sharded vocabulary"):
        flce_ops.linear_policy_loss(
            *placed.args[:3], torch.ones_like(inputs.target, dtype=torch.float32), **sparse(device=device)
        )
    with pytest.raises(NotImplementedError, match="of DTensors with gradient_class_order"):
        flce_ops.linear_cross_entropy(
            *placed.args, gradient_class_order=torch.arange(37, device=device), **sparse(device=device)
        )
    if torch.device(device).type == "cpu":  # on CUDA it is a device-side assert
        zeros = torch.zeros(37, dtype=torch.int64)
        for order in (zeros, distribute_tensor(zeros, mesh, [Shard(0)])):
            with pytest.raises(ValueError, match="expected gradient_class_order to be a permutation"):
                flce_ops.linear_cross_entropy(*placed.args, gradient_class_order=order)
    with pytest.raises(ValueError, match="expects gradient_seed"):
        flce_ops.linear_cross_entropy(*placed.args, gradient_threshold=0.1)


@pytest.mark.parametrize("world", worlds(2, gloo=()))
def test_bfloat16_shards_take_the_kernels_and_are_unbiased(world):
    run_in_world(world, bfloat16_shards)


def bfloat16_shards(device):
    """D is large enough that lists pay. V / 2 is a multiple of neither 2048 nor 16."""
    mesh = mesh_of(device, dist.get_world_size())
    for vocab in (8192, 9013):
        torch.manual_seed(3)
        hidden, weight = torch.randn(300, 1024, device=device), torch.randn(vocab, 1024, device=device) / 5
        target = torch.randint(0, vocab, (300,), device=device)
        dist.broadcast(target, 0)
        operands = [hidden.bfloat16(), weight.bfloat16()]
        exact = [operand.double().requires_grad_() for operand in operands]
        truth = torch.autograd.grad(torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target), exact)
        placed = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(operands, (R, Shard(0)))]
        sums = [torch.zeros_like(gradient) for gradient in truth]
        for seed in range(16):
            loss = flce_ops.linear_cross_entropy(*placed, target, **sparse(seed=seed, device=device))
            path = flce_ops.last_path()
            assert path.implementation == "triton" and "a sparse gradient" in path.reason, path
            for total, gradient in zip(sums, torch.autograd.grad(loss, placed)):
                total += full(gradient).double()
            if seed == 0:
                once = [error(total, gradient) for total, gradient in zip(sums, truth)]
        for total, gradient, of_one in zip(sums, truth, once):
            assert of_one > 1e-2 and error(total / 16, gradient) < 0.5 * of_one + 5e-3
