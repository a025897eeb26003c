"""DTensors on several mesh dimensions, the recipe without DTensor, and mistakes.

The cases run in several processes over gloo (CI) and NCCL (marker multigpu), and compare with one float64 process, as
in test_distributed_*.py.
"""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from inputs import make_inputs
from process_pool import worlds
from reference_loss import error, run_reference
from sharded_inputs import (
    ANY,
    OPTIONS,
    SQUARE,
    TOLERANCE,
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
from test_tensor_kinds import Quantized
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import flce_ops
from flce_ops.distributed.layout import check_plain_target

# ---------------------------------------------------------------- tokens and vocabulary sharded


class Rows(SimpleNamespace):
    """A DTensor's shape, of which this rank has the first two sequences."""

    shape, placements = torch.Size((4, 6, 8)), (Shard(0),)

    def dim(self):
        return 3

    def to_local(self):
        return torch.empty(2, 6, 8)


def test_a_plain_target_of_batches_holds_all_tokens():
    check_plain_target(torch.zeros(4, 6), Rows(), "op")
    check_plain_target(torch.zeros(4, 6, 5), Rows(), "op")  # five classes of each
    with pytest.raises(ValueError, match=r"all tokens of input, shape \(4, 6\), got \(2, 6\). It has the tokens of"):
        check_plain_target(torch.zeros(2, 6), Rows(), "op")
    with pytest.raises(ValueError, match=r"all tokens of input, shape \(4, 6\), got \(4, 5\)$"):
        check_plain_target(torch.zeros(4, 5), Rows(), "op")


@in_worlds(SQUARE)
def test_two_mesh_dimensions_give_the_loss_and_gradients_of_one_process(device):
    mesh = mesh_of(device, 2, dist.get_world_size() // 2)
    every = {"bias": True, "weight": True, "token_weight": True}
    for tokens in ([Shard(0), R], [Shard(0), Shard(1)], [Shard(1), R], [R, R], [R, Shard(0)]):
        inputs = batch(device, **every)
        placed = place(inputs, mesh, tokens, [R, Shard(0)])
        check_same_as_one_process(placed, inputs, label_smoothing=0.1, z_loss=1e-2)
        assert placed.linear_weight.grad.placements == (Partial() if tokens[0] != R else R, Shard(0))
    for options in OPTIONS:
        inputs = batch(device, **every, normalizer="reduction" not in options)
        check_same_as_one_process(place(inputs, mesh, [Shard(0), R], [R, Shard(0)]), inputs, **options)
    # no mesh dimension shards the vocabulary
    for tokens in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), R]):
        inputs = batch(device, **every)
        check_same_as_one_process(place(inputs, mesh, tokens, [R, R]), inputs, label_smoothing=0.1, z_loss=1e-2)
    inputs = batch(device, **every)  # both dimensions shard it
    check_same_as_one_process(place(inputs, mesh, [R, R], [Shard(0), Shard(0)]), inputs, label_smoothing=0.1)


@in_worlds(worlds(8, gloo=(8,)))
def test_three_mesh_dimensions_give_the_loss_and_gradients_of_one_process(device):
    mesh = mesh_of(device, 2, 2, 2)
    inputs = batch(device, weight=True, token_weight=True)
    placed = place(inputs, mesh, [Shard(0), Shard(1), R], [R, R, Shard(0)])
    check_same_as_one_process(placed, inputs, label_smoothing=0.1)


# ---------------------------------------------------------------- without DTensor


@in_worlds(ANY)
def test_documented_losses_without_dtensor_are_those_of_one_process(device):
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text()
    (recipe,) = re.findall(r"```python\n(def vocab_parallel_losses.*?)```", page, re.DOTALL)
    namespace = {"torch": torch, "dist": dist}
    exec(recipe, namespace)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = -(-V // size)
    inputs = to_device(make_inputs((37, D, V)), device)
    cotangent = torch.linspace(0.5, 1.5, 37, device=device)
    exact = run_reference(inputs, cotangent, reduction="none")
    hidden = inputs.input.detach().requires_grad_()
    shard = inputs.linear_weight.detach()[rank * rows : rank * rows + rows].clone().requires_grad_()
    losses = namespace["vocab_parallel_losses"](hidden, shard, inputs.target, V)
    losses.backward(cotangent)
    dist.all_reduce(hidden.grad)
    assert error(losses, exact["loss"]) < TOLERANCE
    assert error(hidden.grad, exact["input"]) < TOLERANCE
    assert error(shard.grad, exact["linear_weight"][rank * rows : rank * rows + rows]) < TOLERANCE


# ---------------------------------------------------------------- mistakes


@in_worlds(worlds(2))
def test_mistakes_are_refused_with_what_to_do(device):
    learnt_scale_is_refused(device)
    mesh = mesh_of(device, dist.get_world_size())
    other = init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("one", "all"))
    inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer=True)
    whole = place(inputs, mesh, [R], [Shard(0)])
    loss = flce_ops.linear_cross_entropy

    with pytest.raises(ValueError, match="input is a plain tensor.*register_fsdp_forward_method.*VocabParallel"):
        loss(inputs.input, whole.linear_weight, inputs.target)
    with pytest.raises(ValueError, match="linear_weight is a plain tensor.*distribute_tensor"):
        loss(whole.input, inputs.linear_weight, inputs.target)
    with pytest.raises(ValueError, match="another argument is a DTensor.*to_local"):
        loss(inputs.input, inputs.linear_weight, whole.target)
    with pytest.raises(ValueError, match=r"sharded along its features \(D\).*VocabParallel"):
        loss(whole.input, distribute_tensor(inputs.linear_weight.detach(), mesh, [Shard(1)]), inputs.target)
    elsewhere = distribute_tensor(inputs.linear_weight.detach(), other, [R, Shard(0)])
    with pytest.raises(ValueError, match="both must be on one mesh"):
        loss(whole.input, elsewhere, inputs.target)
    for name in ("target", "linear_bias", "weight", "token_weight", "normalizer"):
        on_other_mesh = distribute_tensor(getattr(inputs, name).detach(), other, [R, R])
        arguments = {"target": inputs.target, name: on_other_mesh}
        with pytest.raises(ValueError, match=rf": {name} is .* but input is .*{name}\.full_tensor"):
            loss(whole.input, whole.linear_weight, **arguments)
    tokens = place(inputs, mesh, [Shard(1)], [R])
    with pytest.raises(ValueError, match="the tokens of this rank only.*from_local"):
        loss(tokens.input, tokens.linear_weight, tokens.target.to_local())
    for metrics in (False, True):
        short = distribute_tensor(inputs.target[:, 0].contiguous(), mesh, [R])
        with pytest.raises(ValueError, match="expected target of shape"):
            loss(tokens.input, tokens.linear_weight, short, return_metrics=metrics)
    for numbers in (V * D, 0):  # DeepSpeed ZeRO-3 leaves an empty weight
        with pytest.raises(ValueError, match="expected linear_weight of shape .*1-D weight is what FSDP1 leaves"):
            loss(inputs.input, inputs.linear_weight.detach().flatten()[:numbers], inputs.target)


def learnt_scale_is_refused(device):
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="gradient of a logit_scale.*DTensors.*detached"):
        flce_ops.linear_cross_entropy(*placed.args, logit_scale=scale)
    loss = flce_ops.linear_cross_entropy(*placed.args, logit_scale=scale.detach())
    assert error(loss, flce_ops.linear_cross_entropy(*inputs.args, logit_scale=2.0)) < TOLERANCE


@in_worlds(worlds(2))
def test_shards_that_are_quantized_are_refused_by_name(device):
    mesh = mesh_of(device, dist.get_world_size())
    for rows in (Shard(0), R):
        whole = place(batch(device), mesh, [R], [rows])
        weight = whole.linear_weight.detach()
        shard = Quantized(weight.to_local())
        shards = DTensor.from_local(shard, mesh, [rows], run_check=False, shape=weight.shape, stride=weight.stride())
        words = "linear_weight to be a dense tensor, got a quantized one"
        for function in (flce_ops.linear_cross_entropy, flce_ops.linear_log_probs):
            with pytest.raises(TypeError, match=f"{function.__name__}: expected {words}"):
                function(whole.input, shards, whole.target)
        with pytest.raises(TypeError, match=f"linear_kl_div: expected {words}"):
            flce_ops.linear_kl_div(whole.input, shards, whole.input.detach(), weight)
        with pytest.raises(TypeError, match="linear_kl_div: expected teacher_weight to be a dense tensor"):
            flce_ops.linear_kl_div(whole.input, weight, whole.input.detach(), shards)


@in_worlds(worlds(4))
def test_a_process_outside_the_mesh_is_told_so(device):
    pair = DeviceMesh(device.type, [0, 1], mesh_dim_names=("pair",))
    inputs = batch(device)
    for tokens, rows in ((Shard(0), R), (R, Shard(0))):
        operands = (distribute_tensor(inputs.input.detach(), pair, [tokens], src_data_rank=None),)
        operands += (distribute_tensor(inputs.linear_weight.detach(), pair, [rows], src_data_rank=None),)
        if dist.get_rank() < 2:
            loss = flce_ops.linear_cross_entropy(*operands, inputs.target)
            assert error(full(loss), run_reference(inputs)["loss"]) < TOLERANCE
            continue
        with pytest.raises(ValueError, match="not part of the mesh"):
            flce_ops.linear_cross_entropy(*operands, inputs.target)
