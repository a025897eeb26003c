"""DTensors under torch.compile, autocast, no_grad and inference mode, and in half precision."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import math

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from inputs import make_inputs
from process_pool import run_in_world, worlds
from reference_loss import error, plain_loss, run, run_reference
from sharded_inputs import (
    OPTIONS,
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flce_ops


@pytest.mark.parametrize("world", worlds(2, 8))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_one_graph_gives_the_eager_result(world, backend):
    run_in_world(world, compiled, backend)


def compiled(device, backend):
    mesh = mesh_of(device, dist.get_world_size())
    cases = [([Shard(0)], [R]), ([R], [Shard(0)]), ([Shard(1)], [Shard(0)])]
    for tokens, rows in cases if backend == "aot_eager" else cases[1:2]:
        torch._dynamo.reset()
        loss_function = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend=backend)
        inputs = batch(device, weight=True, token_weight=True)
        placed = place(inputs, mesh, tokens, rows, plain=("weight",))
        check_same_as_one_process(placed, inputs, loss_function, label_smoothing=0.1)


@in_worlds(worlds(2))
def test_every_option_compiles_as_one_graph(device):
    mesh = mesh_of(device, dist.get_world_size())
    # with a sharded vocabulary every option alone; with other layouts losses of tokens, and all options at
    # once
    several = [{"reduction": "none"}, OPTIONS[-1]]
    for tokens, rows in ((Shard(0), R), (R, Shard(0)), (Shard(1), Shard(0))):
        for options in OPTIONS if (tokens, rows) == (R, Shard(0)) else several:
            torch._dynamo.reset()
            loss_function = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend="aot_eager")
            inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer="reduction" not in options)
            check_same_as_one_process(place(inputs, mesh, [tokens], [rows]), inputs, loss_function, **options)
    torch._dynamo.reset()
    inputs = batch(device, vocab=1)  # one rank has no classes
    check_same_as_one_process(place(inputs, mesh, [R], [Shard(0)]), inputs, loss_function)


@in_worlds(worlds(4))
def test_two_mesh_dimensions_compile_as_one_graph(device):
    mesh = mesh_of(device, 2, 2)
    loss_function = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    options = {"softcap": 4.0, "z_loss": 1e-2, "logit_scale": 1.3}
    inputs = batch(device, bias=True, weight=True, token_weight=True)
    placed = place(inputs, mesh, [Shard(0), Shard(1)], [R, Shard(0)])
    check_same_as_one_process(placed, inputs, loss_function, **options)


@in_worlds(worlds(2))
def test_inference_mode_gives_the_loss_with_plain_arguments_too(device):
    mesh = mesh_of(device, dist.get_world_size())
    try:
        leaf = place(batch(device), mesh, [R], [R]).input
        with torch.inference_mode():
            leaf.redistribute(mesh, [R])
    except NotImplementedError:
        assert torch.__version__ < "2.12"  # DTensor itself does not work in inference mode
        return
    for tokens, rows in ((Shard(0), R), (R, Shard(0))):
        inputs = batch(device, bias=True, weight=True, token_weight=True)
        exact = run_reference(inputs)["loss"]
        plain = ("target", "weight", "linear_bias", "token_weight")
        for placed in (place(inputs, mesh, [tokens], [rows]), place(inputs, mesh, [tokens], [rows], plain=plain)):
            head = (placed.input, placed.linear_weight)
            with torch.inference_mode():
                loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options)
                same, metrics = flce_ops.linear_cross_entropy(*placed.args, **placed.options, return_metrics=True)
                probs = flce_ops.linear_log_probs(*head, placed.target, placed.linear_bias)
                divergence = flce_ops.linear_kl_div(*head, *head, target=placed.target)
            assert error(full(loss), exact) < TOLERANCE and torch.equal(full(loss), full(same))
            with torch.no_grad():
                expected = flce_ops.linear_log_probs(*head, placed.target, placed.linear_bias)
            assert torch.equal(full(probs.log_probs), full(expected.log_probs))
            assert full(metrics.argmax).shape == inputs.target.shape and full(divergence).abs() < TOLERANCE


@in_worlds(worlds(2))
@pytest.mark.parametrize("rows", [R, Shard(0)], ids=["replicated", "sharded"])
def test_gradients_are_laid_out_as_their_leaves(device, rows):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, vocab=64)
    exact = run_reference(inputs)
    placed = place(inputs, mesh, [R], [rows])
    transposed = placed.linear_weight.to_local().detach().t().contiguous().t()
    layout = {"run_check": False, "shape": (64, D), "stride": (1, 64)}
    weight = DTensor.from_local(transposed, mesh, [rows], **layout).detach().requires_grad_()
    flce_ops.linear_cross_entropy(placed.input, weight, placed.target).backward()
    for leaf in (placed.input, weight):
        assert leaf.grad.stride() == leaf.stride()
        assert leaf.grad.to_local().stride() == leaf.to_local().stride()
    assert error(full(weight.grad), exact["linear_weight"]) < TOLERANCE


@in_worlds(worlds(2))
def test_frozen_head_or_frozen_trunk_get_only_the_gradient_asked_for(device):
    mesh = mesh_of(device, dist.get_world_size())
    for name in ("input", "linear_weight"):
        for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)])):
            inputs = batch(device)
            getattr(inputs, name).requires_grad_(False)
            check_same_as_one_process(place(inputs, mesh, tokens, rows), inputs)


@pytest.mark.parametrize("world", worlds(2, 4, 8))
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_bfloat16_shards_are_as_accurate_as_one_process(world, autocast):
    run_in_world(world, bfloat16, autocast, False)


@pytest.mark.parametrize("world", worlds(2, 4, 8, gloo=(2,)))  # the compiled graph is the same for any number of ranks
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_compiled_bfloat16_shards_are_as_accurate_as_one_process(world, autocast):
    run_in_world(world, bfloat16, autocast, True)


def bfloat16(device, autocast, compiled):
    """On GPUs this takes the Triton path."""
    loss_function = flce_ops.linear_cross_entropy
    if compiled:
        loss_function = torch.compile(loss_function, fullgraph=True, backend="aot_eager")
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)]), ([Shard(1)], [Shard(0)])):
        inputs = batch(device, vocab=509, dtype=torch.float32 if autocast else torch.bfloat16)
        exact = run_reference(inputs)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            alone = inputs.clone()
            flce_ops.linear_cross_entropy(*alone.args).backward()
            placed = place(inputs, mesh, tokens, rows)
            loss = loss_function(*placed.args)
        loss.backward()
        assert loss.dtype == torch.float32
        assert error(full(loss), exact["loss"]) < 5e-3
        for name, leaf in placed.leaves.items():
            of_one = error(getattr(alone, name).grad, exact[name])
            # the sum over ranks of gradients that were rounded to bfloat16: half a unit in the last place for each
            # level of the sum
            assert error(full(leaf.grad), exact[name]) <= 2 * of_one + 2e-3 * math.log2(2 * mesh.size()), name


@in_worlds(worlds(2, 4, 8))
def test_bfloat16_vocabulary_shards_in_several_chunks_are_as_accurate_as_one_process(device):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        inputs = make_inputs((300, D, 509), dtype=torch.bfloat16, bias=True, weight=True, token_weight=True)
        inputs = to_device(inputs, device)
        cotangent = torch.ones((300,) if options.get("reduction") == "none" else (), device=device)
        exact = run_reference(inputs, cotangent, **options)
        alone, placed = inputs.clone(), place(inputs, mesh, [R], [Shard(0)])
        with flce_ops.workspace(1):
            flce_ops.linear_cross_entropy(*alone.args, **alone.options, **options).backward(cotangent)
            loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options, **options)
            loss.backward(distribute_tensor(cotangent, mesh, [R]))
        assert error(full(loss), exact["loss"]) < 5e-3
        for name, leaf in placed.leaves.items():
            of_one = error(getattr(alone, name).grad, exact[name])
            allowed = 2 * of_one + 2e-3 * math.log2(2 * mesh.size())
            assert error(full(leaf.grad), exact[name]) <= allowed, (name, options)


@in_worlds(worlds(2, 4, 8))
def test_tokens_whose_loss_is_hundreds_of_nats_stay_finite_and_right(device):
    """The classes of one rank hold all of the probability, the other ranks' classes none."""
    mesh = mesh_of(device, dist.get_world_size())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        inputs = to_device(make_inputs((150, D, V), dtype=dtype), device)
        with torch.no_grad():
            inputs.input.mul_(60.0)
        placed = place(inputs, mesh, [R], [Shard(0)])
        loss = flce_ops.linear_cross_entropy(*placed.args, z_loss=1e-3)
        loss.backward()
        exact, plain = run_reference(inputs, z_loss=1e-3), run(plain_loss, inputs, z_loss=1e-3)
        found = {"loss": full(loss), **{name: full(leaf.grad) for name, leaf in placed.leaves.items()}}
        for name, right in exact.items():
            # several tokens may have two best logits within one unit of bfloat16
            assert error(found[name], right) < max(tolerance, 1.5 * error(plain[name], right)), (name, dtype)
