"""DTensors with sharded tokens: loss and gradients equal those of one process; also checks what ranks send."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from collectives import RecordCollectives
from in_worlds import in_worlds
from inputs import make_inputs
from process_pool import worlds
from reference_loss import error, plain_loss, run_reference
from sharded_inputs import (
    ANY,
    FLOAT,
    OPTIONS,
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
from test_zero_denominators import CASES as ZERO_DENOMINATORS
from test_zero_denominators import assert_same_kinds
from test_zero_denominators import make as make_case
from test_zero_denominators import run as run_case
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import flce_ops


@in_worlds(ANY)
@pytest.mark.parametrize("dim", [0, 1], ids=["data parallel", "sequence or context parallel"])
def test_sharded_tokens_give_the_loss_and_gradients_of_one_process(device, dim):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        for extra in ({}, {"bias": True, "weight": True, "token_weight": True}):
            inputs = batch(device, **extra)
            placed = place(inputs, mesh, [Shard(dim)], [R])
            check_same_as_one_process(placed, inputs, **options)
            assert placed.linear_weight.grad.placements == (Partial(),)
            assert placed.input.grad.placements == (Shard(dim),)
    inputs = batch(device, normalizer=True)
    check_same_as_one_process(place(inputs, mesh, [Shard(dim)], [R]), inputs)


@in_worlds(ANY)
def test_sharded_tokens_send_two_numbers_and_make_gradients_in_one_pass(device):
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [Shard(0)], [R])
    with RecordCollectives() as recorded:
        loss = flce_ops.linear_cross_entropy(*placed.args)
    # for the count of valid tokens and for the loss
    assert recorded.calls == [("all_reduce", FLOAT)] * 2, recorded.calls
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad" or 0 in placed.input.to_local().shape
    with RecordCollectives() as recorded:
        loss.backward()
    assert recorded.calls == [], recorded.calls  # d linear_weight stays Partial


@in_worlds(ANY)
def test_mean_is_over_valid_tokens_of_all_ranks_when_one_rank_has_none(device):
    size = dist.get_world_size()
    inputs = make_inputs((4 * size, D, V))
    inputs.target[:4] = -100
    inputs = to_device(inputs, device)
    check_same_as_one_process(place(inputs, mesh_of(device, size), [Shard(0)], [R]), inputs)


@in_worlds(ANY)
def test_all_tokens_ignored_gives_nan_mean_and_zero_gradients(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)])):
        inputs = batch(device, token_weight=True)
        inputs.target.fill_(-100)
        placed = place(inputs, mesh, tokens, rows)
        loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options)
        assert full(loss).isnan()
        loss.backward()
        for name, leaf in placed.leaves.items():
            assert not full(leaf.grad).any(), name


@in_worlds(worlds(2))
def test_the_mean_over_no_token_is_nan_as_in_torch(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in ((Shard(0), R), (R, Shard(0)), (R, R)):
        for needs in (False, True):
            placed = place(to_device(make_inputs((0, D, V), requires_grad=needs), device), mesh, [tokens], [rows])
            assert full(flce_ops.linear_cross_entropy(*placed.args)).isnan()
            assert full(flce_ops.linear_cross_entropy(*placed.args, reduction="sum")) == 0.0


@in_worlds(worlds(2))
def test_sums_over_zero_are_nan_infinite_and_zero_where_plain_torchs_are(device):
    mesh = mesh_of(device, dist.get_world_size())
    for made, options in ZERO_DENOMINATORS.values():
        # all tokens of the first rank are ignored
        inputs = to_device(make_case(**{"ignored": range(5), **made}), device)
        expected = run_case(plain_loss, inputs, **options)
        for tokens, rows in ((Shard(0), R), (R, Shard(0))):
            placed = place(inputs, mesh, [tokens], [rows])
            loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options, **options)
            loss.backward()
            found = {"loss": full(loss).detach(), **{name: full(leaf.grad) for name, leaf in placed.leaves.items()}}
            assert_same_kinds(found, expected)


@in_worlds(worlds(2))
def test_token_weights_at_ignored_tokens_may_be_anything(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in ((Shard(0), R), (R, Shard(0))):
        for reduction in ("none", "mean"):
            inputs = batch(device, token_weight=True)
            ignored = inputs.target == inputs.ignore_index
            placed = place(inputs, mesh, [tokens], [rows])
            with torch.no_grad():
                weights = torch.where(ignored, torch.nan, inputs.token_weight)
                placed.token_weight = distribute_tensor(weights, mesh, [tokens]).requires_grad_()
            check_same_as_one_process(placed, inputs, reduction=reduction)


@in_worlds(ANY)
def test_flattened_sequences_keep_their_tokens_apart(device):
    """(B, T, D) sharded along T is a strided shard of (B T, D)."""
    size = dist.get_world_size()
    mesh = mesh_of(device, size)
    for plain in ((), ("target",)):
        inputs = batch(device, tokens=16, token_weight=True)
        placed = place(inputs, mesh, [Shard(1)], [R], plain=plain)
        try:
            placed.input.detach().flatten(0, 1)
        except RuntimeError as refusal:
            assert torch.__version__ < "2.12" and "Attempted to flatten" in str(refusal)
            return
        with FlopCounterMode(display=False) as counter, RecordCollectives() as recorded:
            loss = flce_ops.linear_cross_entropy(
                placed.input.flatten(0, 1),
                placed.linear_weight,
                placed.target.flatten(),
                token_weight=placed.token_weight.flatten(),
            )
            loss.backward()
        assert recorded.calls == [("all_reduce", FLOAT)] * 2, recorded.calls
        assert counter.get_total_flops() == 3 * 2 * B * 16 * D * V // size
        exact = run_reference(inputs)
        assert error(full(loss), exact["loss"]) < TOLERANCE
        assert placed.linear_weight.grad.placements == (Partial(),)
        for name in ("input", "linear_weight", "token_weight"):
            assert error(full(getattr(placed, name).grad), exact[name]) < TOLERANCE, name
