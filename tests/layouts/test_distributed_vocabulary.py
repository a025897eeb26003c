"""DTensors with a sharded vocabulary: the loss, first and second derivatives, and what ranks send."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from collectives import RecordCollectives
from in_worlds import in_worlds
from inputs import Inputs, make_inputs
from process_pool import run_in_world, worlds
from reference_loss import error, plain_loss, run_reference
from sharded_inputs import (
    ANY,
    EVERY_SPLIT,
    FLOAT,
    OPTIONS,
    SQUARE,
    TOLERANCE,
    B,
    D,
    R,
    V,
    batch,
    check_same_as_one_process,
    full,
    mesh_of,
    place,
    to_device,
)
from torch.distributed.tensor import Shard, distribute_tensor

import flce_ops


@in_worlds(ANY)
@EVERY_SPLIT
def test_sharded_vocabulary_gives_the_loss_and_gradients_of_one_process(device, vocab):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        for extra in ({}, {"bias": True, "weight": True, "token_weight": True}):
            inputs = batch(device, vocab=vocab, **extra)
            placed = place(inputs, mesh, [R], [Shard(0)])
            check_same_as_one_process(placed, inputs, **options)
            assert placed.linear_weight.grad.placements == (Shard(0),)
            assert placed.input.grad.placements == (R,)
    inputs = batch(device, vocab=vocab, normalizer=True, token_weight=True)
    check_same_as_one_process(place(inputs, mesh, [R], [Shard(0)]), inputs)


@in_worlds(ANY)
def test_sharded_vocabulary_takes_tokens_in_any_layout(device):
    mesh = mesh_of(device, dist.get_world_size())
    for placement in (Shard(0), Shard(1)):
        inputs = batch(device, token_weight=True, weight=True)
        placed = place(inputs, mesh, [placement], [Shard(0)])
        check_same_as_one_process(placed, inputs, label_smoothing=0.1)
        assert placed.input.grad.placements == (placement,)
    inputs = batch(device)
    placed = place(inputs, mesh, [R], [Shard(0)])
    # shards the hidden features
    placed.input = distribute_tensor(inputs.input.detach(), mesh, [Shard(2)]).requires_grad_()
    check_same_as_one_process(placed, inputs)


@in_worlds(worlds(2, 4))
def test_every_argument_may_be_placed_by_itself(device):
    mesh = mesh_of(device, dist.get_world_size())
    for rows in (R, Shard(0)):
        for tokens, targets, factors in (
            (Shard(0), Shard(1), R),
            (Shard(1), Shard(0), Shard(0)),
            (R, Shard(0), Shard(1)),
            (Shard(1), R, Shard(0)),
        ):
            inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer=True)
            placed = place(inputs, mesh, [tokens], [rows])
            others = {
                "target": targets,
                "token_weight": factors,
                "weight": Shard(0),
                "linear_bias": Shard(0) if rows == R else R,
            }
            for name, placement in others.items():
                whole = getattr(inputs, name)
                moved = distribute_tensor(whole.detach(), mesh, [placement]).requires_grad_(whole.requires_grad)
                setattr(placed, name, moved)
            check_same_as_one_process(placed, inputs, label_smoothing=0.1, z_loss=1e-2)


@in_worlds(ANY)
def test_plain_targets_and_other_plain_arguments_count_as_replicated(device):
    mesh = mesh_of(device, dist.get_world_size())
    plain = ("target", "weight", "token_weight", "normalizer", "linear_bias")
    for tokens, rows in (([R], [Shard(0)]), ([Shard(1)], [Shard(0)]), ([Shard(0)], [R]), ([Shard(1)], [R])):
        inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer=True)
        placed = place(inputs, mesh, tokens, rows, plain=plain)
        check_same_as_one_process(placed, inputs, label_smoothing=0.1)


@in_worlds(ANY)
@pytest.mark.parametrize("low", [-1e30, -torch.inf])
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2, "logit_scale": 0.7}, {"reduction": "none"}], ids=str)
def test_padded_classes_behind_a_low_bias_do_not_change_the_loss(device, options, low):
    size = dist.get_world_size()
    mesh = mesh_of(device, size)
    inputs = batch(device, vocab=V, bias=True)
    exact = run_reference(inputs, **options)
    placed = place(with_padding(inputs, size, low), mesh, [R], [Shard(0)])
    loss = flce_ops.linear_cross_entropy(*placed.args, **options)
    loss.sum().backward()
    assert error(full(loss), exact["loss"]) < TOLERANCE
    assert error(full(placed.input.grad), exact["input"]) < TOLERANCE
    for name in ("linear_weight", "linear_bias"):
        found = full(placed.leaves[name].grad)
        assert error(found[:V], exact[name]) < TOLERANCE and not found[V:].any(), name


def with_padding(inputs: Inputs, ranks: int, low: float) -> Inputs:
    """Pads V to a multiple of the number of ranks, as usual; here by so much that the last rank has only padding."""
    rows = -(-V // (ranks - 1)) * ranks if ranks > 2 else 2 * V
    device = inputs.linear_weight.device
    weight = torch.cat([inputs.linear_weight.detach(), torch.ones(rows - V, D, device=device)])
    bias = torch.cat([inputs.linear_bias.detach(), torch.full((rows - V,), low, device=device)])
    return Inputs(inputs.input, weight.requires_grad_(), inputs.target, bias.requires_grad_())


@in_worlds(worlds(2))
def test_rows_that_are_switched_off_on_every_rank_are_nan_as_in_torch(device):
    inputs = batch(device, vocab=64, bias=True)
    inputs.linear_bias.data.fill_(-torch.inf)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    for reduction in ("none", "mean"):
        loss = flce_ops.linear_cross_entropy(*placed.args, reduction=reduction)
        loss.sum().backward()
        found, expected = full(loss), plain_loss(*inputs.args, reduction=reduction)
        assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
        assert full(placed.input.grad).isnan().any()


@in_worlds(ANY)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_sharded_vocabulary_sends_numbers_per_token_and_one_input_gradient(device, options):
    size = dist.get_world_size()
    mesh = mesh_of(device, size)
    tokens = 2 * 8  # even, so that DTensor adds no padding
    N = B * tokens
    for dtype in (torch.float32, torch.bfloat16):
        nbytes = N * D * dtype.itemsize
        for placement, gather, reduction in (
            (R, [], ("all_reduce", nbytes)),
            (Shard(1), [("all_gather", nbytes // size)], ("reduce_scatter", nbytes)),
        ):
            inputs = batch(device, tokens=tokens, dtype=dtype)
            placed = place(inputs, mesh, [placement], [Shard(0)], plain=("target",))
            with RecordCollectives() as recorded:
                loss = flce_ops.linear_cross_entropy(*placed.args, **options)
            # a CPU leaves out ignored tokens
            valid = N if device.type == "cuda" else int((inputs.target != -100).sum())
            # lse, target_logit and logit_sum of one rank; in ATen what the rounding of lse took from it
            aten = device.type == "cpu" or dtype == torch.float32
            numbers = 2 + aten + len(options)
            assert recorded.calls == [*gather, ("all_gather", FLOAT * numbers * valid)], recorded.calls
            with RecordCollectives() as recorded:
                loss.backward()
            assert recorded.calls == [reduction], recorded.calls


@in_worlds(worlds(2, 4))
def test_chunks_exchange_their_own_tokens_and_leave_one_input_gradient(device):
    mesh = mesh_of(device, dist.get_world_size())
    for dtype in (torch.float32, torch.bfloat16):
        tokens = 1200 if device.type == "cuda" else 300  # Triton holds 512 rows at least
        inputs = to_device(make_inputs((tokens, D, 509), dtype=dtype, ignored=0.0), device)
        placed = place(inputs, mesh, [R], [Shard(0)])
        with flce_ops.workspace(1):
            with RecordCollectives() as recorded:
                loss = flce_ops.linear_cross_entropy(*placed.args)
            chunks = flce_ops.last_path().chunks
        aten = device.type == "cpu" or dtype == torch.float32
        assert chunks > 1 and [name for name, _ in recorded.calls] == ["all_gather"] * chunks, recorded.calls
        assert sum(nbytes for _, nbytes in recorded.calls) == FLOAT * (2 + aten) * tokens, recorded.calls
        with RecordCollectives() as recorded:
            loss.backward()
        assert recorded.calls == [("all_reduce", tokens * D * dtype.itemsize)], recorded.calls


@in_worlds(SQUARE)
def test_two_mesh_dimensions_send_numbers_per_token_and_one_input_gradient(device):
    mesh = mesh_of(device, 2, dist.get_world_size() // 2)
    inputs = make_inputs((32, D, V), ignored=0.0)
    placed = place(to_device(inputs, device), mesh, [Shard(0), R], [R, Shard(0)])
    with RecordCollectives() as recorded:
        loss = flce_ops.linear_cross_entropy(*placed.args, softcap=5.0, z_loss=1e-2)
    number = ("all_reduce", FLOAT)  # over dp: for the count of valid tokens, and for the loss
    assert recorded.calls == [number, ("all_gather", FLOAT * 3 * 16), number], recorded.calls
    with RecordCollectives() as recorded:
        loss.backward()
    assert recorded.calls == [("all_reduce", FLOAT * 16 * D)], recorded.calls  # over tp; d linear_weight stays Partial


@pytest.mark.parametrize("world", ANY)
def test_target_outside_the_whole_vocabulary_is_an_index_error_on_every_rank(world):
    if world[0] == "cuda":
        pytest.skip("a device-side assert would end the processes")
    run_in_world(world, target_out_of_range)


def target_out_of_range(device):
    for vocab in (V, 1):  # with V = 1 all ranks but one have no classes
        inputs = batch(device, vocab=vocab)
        inputs.target[0, 0] = vocab
        placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
        for function in (flce_ops.linear_cross_entropy, flce_ops.linear_log_probs):
            with pytest.raises(IndexError, match=f"flce_ops: expected target in \\[0, {vocab}\\)"):
                function(*placed.args)
