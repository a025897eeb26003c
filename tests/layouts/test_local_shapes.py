"""DTensors whose placements do not describe what the ranks hold are refused by name, before anything is sent."""

# B x T tokens, D hidden, V vocabulary

import re
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from process_pool import worlds
from sharded_inputs import B, D, R, T, V, batch, mesh_of, place
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import flce_ops
from flce_ops.distributed import layout as layout_of_ranks
from flce_ops.distributed.layout import size_of_shard


def focal(log_prob, gamma):
    return -gamma * (1 - log_prob.exp()) ** 2 * log_prob


def from_local(local, like):
    """A DTensor with the placements, the shape and the strides of `like`, in which they need not be true."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def with_one_more(tensor, dim):
    local = tensor.detach().to_local()
    return from_local(torch.cat([local, torch.zeros_like(local.sum(dim, keepdim=True))], dim), tensor)


HEAD = ("input", "linear_weight", "target")
BIAS, OTHERS = ("linear_bias",), ("token_weight", "linear_bias")
POLICY = ("advantages", "old_log_probs", "ref_log_probs")
CALLS = {  # positional arguments by name, further tensors by name, options
    "linear_cross_entropy": (HEAD + BIAS, ("weight", "token_weight"), {}),
    "linear_log_probs": (HEAD + BIAS, (), {}),
    "linear_token_loss": (HEAD, OTHERS, {}),
    "linear_policy_loss": (HEAD + POLICY, OTHERS, {"beta": 0.1}),
    "linear_kl_div": (HEAD[:2] + ("teacher_input", "teacher_weight"), ("target", "teacher_bias", *OTHERS), {}),
    "cross_entropy": (("logits", "target"), ("weight", "token_weight"), {}),
}
LAYOUTS = {"tokens": (Shard(1), R), "sequences": (Shard(0), R), "vocabulary": (R, Shard(0)), "nothing": (R, R)}


@in_worlds(worlds(2, 4))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", CALLS)
def test_a_local_tensor_of_another_shape_than_its_placements_give_is_refused(device, function, layout):
    positional, named, options = CALLS[function]
    tokens, rows = LAYOUTS[layout]
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, weight=True, bias=True, token_weight=True)
    given = vars(place(inputs, mesh, [tokens], [rows]))
    logits = distribute_tensor(torch.randn(B, T, V, device=device), mesh, [Shard(2) if rows.is_shard() else tokens])
    given |= {"logits": logits, "teacher_input": given["input"].detach()}
    given |= {"teacher_weight": given["linear_weight"].detach(), "teacher_bias": given["linear_bias"].detach()}
    given |= dict.fromkeys(POLICY, given["token_weight"].detach())

    def call(**changed):
        arguments = given | changed
        args = [arguments[name] for name in positional]
        if function == "linear_token_loss":
            args += [focal, changed.get("tensors[0]", given["advantages"])]
        return getattr(flce_ops, function)(*args, **{name: arguments[name] for name in named}, **options)

    call()  # honest
    wrong = {name: given[name] for name in (*positional, *named)}
    if function == "linear_token_loss":
        wrong["tensors[0]"] = given["advantages"]
    for name, tensor in wrong.items():
        for dim in range(tensor.dim()):
            lie = with_one_more(tensor, dim)
            found, given_by_spec = (tuple(of.to_local().shape) for of in (lie, tensor))
            expected = re.escape(f"holds {given_by_spec}, but its local tensor has shape {found}")
            with pytest.raises(ValueError, match=f"^{function}: {re.escape(name)} is .*{expected}"):
                call(**{name: lie})


@in_worlds(worlds(2, 4))
@patch.object(layout_of_ranks, "_agreed", set())
def test_shards_cut_in_another_way_are_refused_on_every_rank(device):
    """In the first call with a number of classes, ranks tell each other."""
    layout_of_ranks._agreed.clear()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(device, ranks)
    placed = place(batch(device, weight=True), mesh, [R], [Shard(0)])
    weight = placed.linear_weight.detach()
    shorter_first = weight.full_tensor().tensor_split(ranks)[::-1][rank]
    lie = from_local(shorter_first, weight)
    fits = shorter_first.shape == weight.to_local().shape
    message = "rank at . of mesh dimension 0 refuses" if fits else "linear_weight is .*torch.chunk.*distribute_tensor"
    with pytest.raises(ValueError, match=message):
        flce_ops.linear_cross_entropy(placed.input, lie, placed.target)
    # without a shape, each rank takes V for a multiple of its own classes
    inferred = DTensor.from_local(shorter_first, mesh, [Shard(0)], run_check=False)
    logits = DTensor.from_local(torch.randn(B, T, len(shorter_first), device=device), mesh, [Shard(2)], run_check=False)
    head = placed.input, inferred
    for call in (
        lambda: flce_ops.linear_cross_entropy(*head, placed.target),
        lambda: flce_ops.linear_cross_entropy(*head, placed.target, reduction="none"),
        lambda: flce_ops.linear_log_probs(*head, placed.target),
        lambda: flce_ops.linear_kl_div(*head, *head),
        lambda: flce_ops.cross_entropy(logits, placed.target),
    ):
        with pytest.raises(ValueError, match="its ranks take the vocabulary for .* classes"):
            call()
    assert not layout_of_ranks._agreed
    flce_ops.linear_cross_entropy(placed.input, weight, placed.target)
    assert [classes for _, classes in layout_of_ranks._agreed] == [V]


@in_worlds(worlds(2, gloo=(2,)))
def test_shapes_that_no_placement_cuts_are_compared_too_also_in_compiled_code(device):
    mesh = mesh_of(device, dist.get_world_size())
    placed = place(batch(device), mesh, [Shard(1)], [R])
    local = placed.linear_weight.detach().to_local()[1:]
    partial = DTensor.from_local(local, mesh, [Partial()], shape=(V, D), stride=(D, 1))
    wrong = {"linear_weight": (placed.input, partial), "input": (with_one_more(placed.input, 1), placed.linear_weight)}
    compiled = torch.compile(flce_ops.linear_cross_entropy, backend="eager", dynamic=False)
    for function, (name, head) in product((flce_ops.linear_cross_entropy, compiled), wrong.items()):
        with pytest.raises(Exception, match=f"{name} is .*its local tensor has shape"):
            function(*head, placed.target)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("pieces", [None, 1, 2, 3, 7])
def test_sizes_of_shards_are_those_that_torch_cuts(pieces, ranks):
    placement = Shard(0) if pieces is None else _StridedShard(0, split_factor=pieces)
    for size in range(24):
        cut, _ = placement._split_tensor(torch.arange(size), ranks, with_padding=False, contiguous=False)
        assert [len(shard) for shard in cut] == [size_of_shard(size, placement, ranks, rank) for rank in range(ranks)]
