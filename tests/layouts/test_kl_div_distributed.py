"""linear_kl_div on DTensors, over gloo (CI) and NCCL (marker multigpu), against one float64 process.

Mesh dimensions are named after what they shard: "dp" tokens, "tp" the vocabulary.
"""

# B batch, T tokens of one sequence, N = B T, D and E hidden sizes, V vocabulary, R ranks

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from process_pool import worlds
from reference_divergence import KINDS, leaves, make_pair, run_reference
from reference_loss import error
from sharded_inputs import full, mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import flce_ops

B, T, D, E, V = 3, 14, 16, 10, 61  # V is prime, so its shards are uneven for every number of ranks
TOLERANCE = 2e-5  # float32 against float64
ROWS = ("input", "teacher_input", "target", "token_weight")
R = Replicate()
CPU_PAIR = worlds(2)
SQUARE = worlds(4, 8)

OPTIONS = [
    {},
    {"reduction": "sum", "kind": "reverse"},
    {"reduction": "none", "kind": "jsd", "beta": 0.2},
    {"kind": "jsd"},
    {"softcap": 5.0, "teacher_softcap": 4.0, "logit_scale": 0.7, "kind": "reverse"},
    {"reduction": "none"},
    {"reduction": "none", "kind": "reverse"},
]


def dtype_of(kind: str) -> torch.dtype:
    """In float32 an entry may cross the kink p = q."""
    return torch.float64 if kind in ("tv", "nla") else torch.float32


def batch(device, *, vocab=V, tokens=T, **made):
    """make_pair with tokens (B, T), the same in every process. Most ignored tokens are in the first sequence."""
    pair = make_pair((B * tokens, D, E, vocab), **made)
    pair["target"][: tokens // 2] = -100
    shaped = {}
    for name, tensor in pair.items():
        value = tensor.detach().view(B, tokens, *tensor.shape[1:]) if name in ROWS else tensor.detach()
        shaped[name] = value.to(device).requires_grad_(tensor.requires_grad)
    return shaped


def place(pair, mesh, tokens, rows, plain=()):
    placed = {}
    for name, tensor in pair.items():
        if name in plain:
            placed[name] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            continue
        placements = tokens if name in ROWS else rows
        placed[name] = distribute_tensor(tensor.detach(), mesh, placements).requires_grad_(tensor.requires_grad)
    return placed


def check_same_as_one_process(placed, pair, **options):
    shape = pair["target"].shape if options.get("reduction") == "none" else ()
    cotangent = torch.linspace(0.5, 1.5, max(1, shape.numel() if shape else 1), device=pair["target"].device).view(
        shape
    )
    expected = run_reference(pair, cotangent, **options)
    loss = flce_ops.linear_kl_div(**placed, **options)
    assert isinstance(loss, DTensor)
    assert loss.shape == expected["loss"].shape
    loss.backward(distribute_tensor(cotangent.to(loss.dtype), loss.device_mesh, loss.placements))
    assert error(full(loss), expected.pop("loss")) < TOLERANCE
    for name, exact in expected.items():
        assert error(full(placed[name].grad), exact) < TOLERANCE, name


@in_worlds(CPU_PAIR)
@pytest.mark.parametrize("vocab", [V, 3, 1], ids=["prime", "last rank short", "a rank without classes"])
def test_sharded_vocabulary_gives_the_divergence_and_gradients_of_one_process(device, vocab):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        for made in ({}, {"bias": True, "token_weight": True}):
            pair = batch(device, vocab=vocab, **made)
            placed = place(pair, mesh, [R], [Shard(0)])
            check_same_as_one_process(placed, pair, **options)
            assert placed["linear_weight"].grad.placements == (Shard(0),)
            assert placed["input"].grad.placements == (R,)
    pair = batch(device, vocab=vocab)
    check_same_as_one_process(place(pair, mesh, [R], [Shard(0)]), pair, normalizer=17.5)


@in_worlds(CPU_PAIR)
def test_sharded_tokens_with_a_global_mean(device):
    mesh = mesh_of(device, dist.get_world_size())
    for dim in (0, 1):
        for options in OPTIONS:
            pair = batch(device, bias=True, token_weight=True)
            placed = place(pair, mesh, [Shard(dim)], [R])
            check_same_as_one_process(placed, pair, **options)
            assert placed["linear_weight"].grad.placements == (Partial(),)
            assert placed["input"].grad.placements == (Shard(dim),)
    pair = batch(device, target=True)
    del pair["target"]
    expected = run_reference(pair)
    loss = flce_ops.linear_kl_div(**place(pair, mesh, [Shard(0)], [R]))
    assert error(full(loss), expected["loss"]) < TOLERANCE


@in_worlds(CPU_PAIR)
def test_tokens_in_any_layout_beside_a_sharded_vocabulary_and_plain_rows(device):
    mesh = mesh_of(device, dist.get_world_size())
    for kind, placement in (("forward", Shard(0)), ("jsd", Shard(1))):
        pair = batch(device, token_weight=True)
        placed = place(pair, mesh, [placement], [Shard(0)], plain=("target", "token_weight"))
        check_same_as_one_process(placed, pair, kind=kind)
        assert placed["input"].grad.placements == (placement,)


@in_worlds(SQUARE)
def test_tokens_and_vocabulary_sharded_over_two_mesh_dimensions(device):
    mesh = mesh_of(device, 2, dist.get_world_size() // 2)
    for options in OPTIONS:
        pair = batch(device, bias=True, token_weight=True)
        placed = place(pair, mesh, [Shard(0), R], [R, Shard(0)])
        check_same_as_one_process(placed, pair, **options)
        assert placed["linear_weight"].grad.placements == (Partial(), Shard(0))


@in_worlds(CPU_PAIR)
def test_several_chunks_extremes_and_ignored_rows(device):
    mesh = mesh_of(device, dist.get_world_size())
    for kind in KINDS:
        for reduction in ("none", "mean"):
            pair = batch(device, tokens=150, bias=True, dtype=dtype_of(kind))
            with flce_ops.workspace(1):
                check_same_as_one_process(place(pair, mesh, [R], [Shard(0)]), pair, kind=kind, reduction=reduction)
                assert flce_ops.last_path().chunks > 2
        poisoned = batch(device, dtype=dtype_of(kind))
        with torch.no_grad():
            for name in ("input", "teacher_input"):
                # a shard's share of a softmax should underflow; jsd has a smaller factor, because its gradient would
                # vanish and leave only rounding
                poisoned[name] *= 2 if kind == "jsd" else 10
                poisoned[name][poisoned["target"] == -100] = torch.nan
        placed = place(poisoned, mesh, [R], [Shard(0)])
        flce_ops.linear_kl_div(**placed, kind=kind).backward()
        with torch.no_grad():
            for name in ("input", "teacher_input"):
                poisoned[name].nan_to_num_(0.0)
        expected = run_reference(poisoned, kind=kind)
        for name in leaves(poisoned):
            assert error(full(placed[name].grad), expected[name]) < TOLERANCE, name


@in_worlds(CPU_PAIR)
def test_the_mean_over_no_token_of_any_rank_is_0(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, vocabulary in (([R], [Shard(0)]), ([Shard(0)], [R])):
        pair = batch(device)
        pair["target"].fill_(-100)
        placed = place(pair, mesh, tokens, vocabulary)
        loss = flce_ops.linear_kl_div(**placed)
        loss.backward()
        assert full(loss.detach()).item() == 0.0
        for name in leaves(pair):
            assert not full(placed[name].grad).any(), name


@in_worlds(CPU_PAIR)
def test_padded_classes_behind_an_infinite_bias(device):
    """There are so many padded classes that the last rank has no others: its maximum is -inf."""
    mesh = mesh_of(device, dist.get_world_size())
    for kind in KINDS:
        pair = batch(device, bias=True, dtype=dtype_of(kind))
        expected = run_reference(pair, kind=kind)
        padded = dict(pair)
        for name in ("linear_weight", "teacher_weight", "linear_bias", "teacher_bias"):
            filling = torch.full_like(pair[name], -torch.inf if name.endswith("bias") else 1.0)
            padded[name] = torch.cat([pair[name], filling]).detach().requires_grad_(pair[name].requires_grad)
        placed = place(padded, mesh, [R], [Shard(0)])
        loss = flce_ops.linear_kl_div(**placed, kind=kind)
        loss.backward()
        assert error(full(loss), expected["loss"]) < TOLERANCE
        assert error(full(placed["input"].grad), expected["input"]) < TOLERANCE
        found = full(placed["linear_weight"].grad)
        assert error(found[:V], expected["linear_weight"]) < TOLERANCE and not found[V:].any()


@in_worlds(CPU_PAIR)
def test_half_dtypes_on_a_sharded_vocabulary(device):
    mesh = mesh_of(device, dist.get_world_size())
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for reduction in ("none", "mean"):
            pair = batch(device, dtype=dtype, bias=True)
            expected = run_reference(pair, reduction=reduction)
            placed = place(pair, mesh, [R], [Shard(0)])
            loss = flce_ops.linear_kl_div(**placed, reduction=reduction)
            loss.sum().backward()
            if reduction == "none":
                expected |= {k: v for k, v in run_reference(pair, reduction="sum").items() if k != "loss"}
            assert error(full(loss), expected["loss"]) < tolerance
            for name in leaves(pair):
                assert error(full(placed[name].grad), expected[name]) < tolerance, name
