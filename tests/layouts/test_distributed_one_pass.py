"""A scalar loss over a sharded vocabulary, with gradients from the same pass: GEMM passes, chunks, kernels, opcheck."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from inputs import make_inputs, scalars
from process_pool import run_in_world, worlds
from reference_loss import error, run_reference
from sharded_inputs import (
    OPTIONS,
    TOLERANCE,
    B,
    D,
    R,
    T,
    V,
    batch,
    check_same_as_one_process,
    full,
    mesh_of,
    place,
    to_device,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.aten.cross_entropy import with_grad
from flce_ops.distributed.layout import layout_of


@in_worlds(worlds(2, 4))
def test_sharded_vocabulary_makes_scalar_gradients_in_one_pass_over_several_chunks(device):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        inputs = to_device(make_inputs((300, D, V), bias=True, weight=True, token_weight=True), device)
        placed = place(inputs, mesh, [R], [Shard(0)])
        with flce_ops.workspace(1):
            check_same_as_one_process(placed, inputs, **options)
            path = flce_ops.last_path()
        if options.get("reduction") != "none":
            assert path.op == "linear_cross_entropy_with_grad" and path.chunks > 1, path


@in_worlds(worlds(2, 4))
def test_a_step_on_a_sharded_vocabulary_is_three_gemm_passes_over_the_shard(device):
    inputs = batch(device, vocab=64)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    with FlopCounterMode(display=False) as counter:
        flce_ops.linear_cross_entropy(*placed.args).backward()
    assert counter.get_total_flops() == 3 * 2 * B * T * D * 64 // dist.get_world_size()


@in_worlds(worlds(2))
def test_grad_outputs_and_a_second_backward_scale_the_saved_gradients_once(device):
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    loss = 3 * flce_ops.linear_cross_entropy(*placed.args)
    loss.backward(retain_graph=True)
    loss.backward()
    exact = run_reference(inputs, torch.tensor(6.0))
    for name, leaf in placed.leaves.items():
        assert error(full(leaf.grad), exact[name]) < TOLERANCE, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [pytest.param(("cpu", 2), id="interpreter2")])
def test_triton_one_pass_equals_the_aten_one_pass(world):
    if torch.cuda.is_available():
        pytest.skip("the kernels run for real on this machine: the bfloat16 tests")
    run_in_world(world, triton_one_pass)


def triton_one_pass(device):
    from flce_ops.triton.steps.with_grad import launch_with_grad

    mesh = mesh_of(device, dist.get_world_size())
    layout = layout_of(*(distribute_tensor(torch.zeros(35, 1), mesh, [p]) for p in (R, Shard(0))), "op")
    start, size = layout.vocabulary_range(131)
    for options, scale, off in (
        ({}, 1.0, 131),
        ({"softcap": 4.0, "logit_scale": 0.7, "z_loss": 1e-2}, 1.0, 131),
        ({"label_smoothing": 0.1, "logit_scale": 0.7}, 1.0, 131),
        ({"z_loss": 1e-2}, 60.0, 131),  # with losses of hundreds of nats, a shard's share of the softmax underflows
        ({"z_loss": 1e-2}, 1.0, 66),  # a bias of -inf switches off the classes of the second rank
    ):
        inputs = make_inputs((140, 35, 131), bias=True, weight=True, requires_grad=False)
        inputs.target.clamp_(max=off - 1)
        inputs.linear_bias[off:] = -torch.inf
        own = slice(start, start + size)
        row_scale = torch.linspace(-0.2, 1.0, 140)
        sharing = {"group": mesh.get_group().group_name, "ranks": mesh.size(), "vocab_start": start}
        arguments = {**sharing, "vocab_size": 131, "output_mask": [True, True, True], **scalars(options)}
        arguments |= dict.fromkeys(("argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit"), scale == 1.0)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
            if scale != 1.0:
                if dtype == torch.float16:
                    continue
                tolerance = 5e-5  # a float32 logit of hundreds is accurate to 3e-5
            # float16 stands in for bfloat16. The factor 0.3 keeps the losses below 11 nats, because only bfloat16's
            # exponent has room for more.
            input = inputs.input * (0.3 if dtype == torch.float16 else scale)
            operands = (input, inputs.linear_weight[own], inputs.target, inputs.linear_bias[own])
            halved = [x.to(dtype) if x.is_floating_point() else x for x in operands]
            with flce_ops.workspace(1):  # two chunks
                found = launch_with_grad(*halved, inputs.weight, row_scale, **arguments)
            doubled = [x.double() if x.is_floating_point() else x for x in (*halved, inputs.weight, row_scale)]
            exact = with_grad(*doubled, **arguments)
            for name, ours, truth in zip(("loss", "losses", "input", "weight", "bias"), found, exact):
                assert error(ours, truth) < tolerance, (name, dtype, options, error(ours, truth))
            if dtype == torch.float32:
                assert torch.equal(found[5], exact[5])
                assert all(error(ours, truth) < tolerance for ours, truth in zip(found[6:10], exact[6:10]))


@in_worlds(worlds(2))
def test_one_pass_operator_passes_opcheck(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = to_device(make_inputs((37, D, 60), bias=True, weight=True, requires_grad=False), device)
    own = slice(30 * mesh.get_local_rank(), 30 * mesh.get_local_rank() + 30)
    row_scale = torch.full((37,), 0.1, device=device)
    operands = (inputs.input, inputs.linear_weight[own], inputs.target, inputs.linear_bias[own], inputs.weight)
    sharing = {"group": mesh.get_group().group_name, "ranks": 2, "vocab_start": own.start, "vocab_size": 60}
    op = torch.ops.flce.linear_cross_entropy_with_grad.default
    # its derivative needs the mesh, so VocabParallelFunction calls it from above the autograd keys
    checks = ("test_schema", "test_faketensor")
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        arguments = {**sharing, "output_mask": mask, **scalars({"z_loss": 1e-3}, device)}
        torch.library.opcheck(op, (*operands, row_scale), arguments, test_utils=checks)
