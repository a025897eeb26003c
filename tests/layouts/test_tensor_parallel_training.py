"""Training with a sharded vocabulary equals training in one process: tensor parallelism, FSDP2."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from against_one_process import (
    BFLOAT16,
    BFLOAT16_TOLERANCE,
    SEQUENCES,
    STEPS,
    TOLERANCE,
    check_same,
    compile_modules,
    full_parameters,
    model_and_reference,
    optimizer_of,
    reference_losses,
    shard_with_fsdp2,
)
from in_worlds import in_worlds
from process_pool import worlds
from small_transformer import DIM, VOCAB, SmallTransformer, make_batches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import flce_ops

# ---------------------------------------------------------------- tensor parallelism, alone and under FSDP2


def tensor_parallel(model: SmallTransformer, mesh, *, sequence_parallel: bool, tied: bool = False) -> None:
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "head": flce_ops.VocabParallel(input_layouts=hidden),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embed.weight
    for block in model.blocks:
        plan = {"up": ColwiseParallel(input_layouts=hidden), "down": RowwiseParallel(output_layouts=hidden)}
        if sequence_parallel:
            plan["norm"] = SequenceParallel(use_local_output=True)
        parallelize_module(block, mesh, plan)


@in_worlds(worlds(2, 4, 8))
def test_tensor_parallel_model_trains_as_one_process(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    for options in (
        {"sequence_parallel": False},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "tied": True},
        {"sequence_parallel": True, "checkpointed": True},
    ):
        options = dict(options)
        checkpointed = options.pop("checkpointed", False)
        model, reference = model_and_reference(device, checkpointed=checkpointed, tied=options.get("tied", False))
        tensor_parallel(model, mesh, **options)
        batches = make_batches(STEPS, SEQUENCES, device)
        losses = train_with_groups_of_one(model, batches)
        check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)


def train_with_groups_of_one(model, batches) -> list[float]:
    """Every rank has the whole batch, because there is no data parallelism."""
    optimizer = optimizer_of(model)
    losses = []
    for tokens, target in batches:
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@in_worlds(worlds(2))
def test_compiled_tensor_parallel_model_trains_as_one_process(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    for checkpointed in (False, True):
        model, reference = model_and_reference(device, depth=1, checkpointed=checkpointed)
        tensor_parallel(model, mesh, sequence_parallel=True)
        compile_modules(model)
        batches = make_batches(STEPS, SEQUENCES, device)
        losses = train_with_groups_of_one(model, batches)
        check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)


@pytest.mark.exhaustive
@in_worlds(worlds(2))
def test_async_tensor_parallelism_leaves_the_head_as_it_is(device):
    """Inductor's pass fuses an all_gather with the matmul behind it, and finds none: the operator is behind it."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    head = flce_ops.LinearCrossEntropyHead(DIM, VOCAB).to(device)
    parallelize_module(head, mesh, flce_ops.VocabParallel(input_layouts=Shard(1)))
    _, target = make_batches(1, SEQUENCES, device)[0]
    hidden = torch.randn(SEQUENCES, target.shape[1] // mesh.size(), DIM, device=device, requires_grad=True)
    found = []
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        for function in (head, torch.compile(head, fullgraph=True)):
            loss = function(hidden, target)
            found.append((loss, *torch.autograd.grad(loss, hidden)))
    torch.testing.assert_close(*found)


@in_worlds(worlds(4, 8, gloo=(4, 8)))
def test_fsdp2_and_hsdp_over_tensor_parallelism_train_as_one_process(device):
    size = dist.get_world_size()
    both = ({"sequence_parallel": True}, {"sequence_parallel": False})
    if size == 4:  # a mesh dimension of one rank, in either place
        cases = [((2, 2), both), ((1, 2, 2), both[:1]), ((2, 1, 2), both[1:])]
    else:
        cases = [((2, 2, 2), both)]
    for shape, ways in cases:
        hsdp = len(shape) == 3
        names = ("replicate", "shard", "tp") if hsdp else ("dp", "tp")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        data = mesh["replicate", "shard"] if hsdp else mesh["dp"]
        groups = [data.get_group(dim) for dim in range(data.ndim)]
        for options in ways:
            model, reference = model_and_reference(device)
            tensor_parallel(model, mesh["tp"], **options)
            shard_with_fsdp2(model, "head alone" if options["sequence_parallel"] else "root", mesh=data)
            batches = make_batches(STEPS, SEQUENCES, device)
            losses = train_data_parallel(model, batches, groups)
            check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)


ON_2_X_2_RANKS = {  # wrapping, of tied weights, options of fully_shard
    "root owns the head": ("root", False, {}),
    "head alone, no reshard": ("head alone", False, {"reshard_after_forward": False}),
    "tied, root owns both": ("root", True, {}),
    "tied, wrapped together, no reshard": ("tied together", True, {"reshard_after_forward": False}),
}


@in_worlds(worlds(4))
@pytest.mark.parametrize("wrapping", ON_2_X_2_RANKS)
@pytest.mark.parametrize("second", ["shard", "tp"])
def test_hsdp_and_fsdp2_over_tensor_parallelism_accumulate_gradients_without_sync(device, second, wrapping):
    wrapping, tied, options = ON_2_X_2_RANKS[wrapping]
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", second))
    data = mesh if second == "shard" else mesh["dp"]
    model, reference = model_and_reference(device, tied=tied)
    if second == "tp":
        tensor_parallel(model, mesh["tp"], sequence_parallel=True, tied=tied)
    shard_with_fsdp2(model, wrapping, mesh=data, **options)
    batches = make_batches(STEPS, SEQUENCES, device)
    groups = [data.get_group(dim) for dim in range(data.ndim)]
    losses = train_data_parallel(model, batches, groups, micro_batches=2)
    check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)


@pytest.mark.exhaustive
@in_worlds(worlds(4))
def test_fsdp2_over_tensor_parallelism_checkpointed_compiled_and_in_bfloat16(device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    for checkpointed, compiled, precision, tolerance in (
        (True, False, {}, TOLERANCE),
        (True, True, {}, TOLERANCE),
        (False, False, {"mp_policy": BFLOAT16}, BFLOAT16_TOLERANCE),
    ):
        model, reference = model_and_reference(device, checkpointed=checkpointed)
        tensor_parallel(model, mesh["tp"], sequence_parallel=True)
        if compiled:
            # without this hook, torch 2.13 loses the gradient of a RowwiseParallel embedding before compiled blocks
            model.embed.register_forward_hook(lambda module, args, output: output + 0)
            compile_modules(*model.blocks, model.head)
        shard_with_fsdp2(model, "head alone", mesh=mesh["dp"], **precision)
        with pytest.raises(ValueError, match="as it is stored between uses.*register_fsdp_forward_method"):
            hidden = DTensor.from_local(torch.zeros(4, DIM, device=device), mesh, [Replicate(), Replicate()])
            flce_ops.linear_cross_entropy(hidden, model.head.weight, torch.zeros(4, dtype=torch.long, device=device))
        batches = make_batches(STEPS, SEQUENCES, device)
        losses = train_data_parallel(model, batches, [mesh["dp"].get_group()])
        check_same(losses, reference_losses(reference, batches), full_parameters(model), reference, tolerance)


def train_data_parallel(model, batches, groups, micro_batches: int = 1) -> list[float]:
    """`train` over the product of `groups`: the first group divides the batch, the second one each part. Gradients are
    reduced after the last micro-batch alone.
    """
    optimizer = optimizer_of(model)
    ranks = 1
    for group in groups:
        ranks *= dist.get_world_size(group)
    losses = []
    for tokens, target in batches:
        normalizer = (target != -100).sum() / ranks
        for group in groups:
            tokens = tokens.chunk(dist.get_world_size(group))[dist.get_rank(group)]
            target = target.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        total = torch.zeros((), device=tokens.device)
        for index, part in enumerate(zip(tokens.chunk(micro_batches), target.chunk(micro_batches))):
            model.set_requires_gradient_sync(index == micro_batches - 1)
            loss = model(*part, normalizer)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        for group in groups:
            dist.all_reduce(total, group=group)
        losses.append(total.item() / ranks)
    return losses
