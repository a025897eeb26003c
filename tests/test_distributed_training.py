"""Training in processes against one process: the loss of every step and the parameters at the end.

Sharded data: `normalizer` = (targets of the global batch) / (data-parallel ranks), for FSDP and DDP average gradients.
"""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from small_transformer import DIM, SmallTransformer, make_batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import flce_ops

STEPS = 4
SEQUENCES = 8
TOLERANCE = 2e-5


def model_and_reference(device, **options) -> tuple[SmallTransformer, SmallTransformer]:
    torch.manual_seed(0)
    model = SmallTransformer(**options).to(device)
    return model, copy.deepcopy(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # SGD: gradients wrong by a factor show, which Adam would hide
    # foreach, the default on CUDA, does not take DTensors beside plain parameters
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)


def reference_losses(model: SmallTransformer, batches) -> list[float]:
    optimizer = optimizer_of(model)
    losses = []
    for tokens, target in batches:
        loss = model.dense_loss(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(model: nn.Module, batches, *, group=None, micro_batches: int = 1, no_sync=None) -> list[float]:
    """Each rank of `group` trains on its share of every batch, in micro-batches; returns the global losses."""
    group = group or dist.group.WORLD
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    optimizer = optimizer_of(model)
    losses = []
    for tokens, target in batches:
        normalizer = (target != -100).sum() / ranks
        mine = zip(tokens.chunk(ranks)[rank].chunk(micro_batches), target.chunk(ranks)[rank].chunk(micro_batches))
        total = torch.zeros((), device=tokens.device)
        for index, (part, part_target) in enumerate(mine):
            with no_sync() if no_sync is not None and index < micro_batches - 1 else nullcontext():
                loss = model(part, part_target, normalizer)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=group)
        losses.append(total.item() / ranks)
    return losses


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()
    }


def check_same(losses, expected, parameters, reference, tolerance=TOLERANCE):
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    exact = dict(reference.named_parameters())
    assert {name.replace("module.", "") for name in parameters} == set(exact)
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            parameter, exact[name.replace("module.", "")].detach(), rtol=tolerance, atol=tolerance, msg=name
        )


# ---------------------------------------------------------------- FSDP2


def shard_with_fsdp2(model: SmallTransformer, wrapping: str, **options) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    if wrapping == "head alone":
        fully_shard(model.head, **options)
    elif wrapping == "tied together":
        fully_shard([model.embed, model.norm, model.head], **options)
    fully_shard(model, **options)


FSDP2_CASES = {
    "root owns the head": {},
    "head alone": {"wrapping": "head alone"},
    "tied, root owns both": {"tied": True},
    "tied, wrapped together": {"tied": True, "wrapping": "tied together"},
    "no reshard after forward": {"wrapping": "head alone", "reshard_after_forward": False},
    "reshard after forward": {"reshard_after_forward": True},
    "checkpointed blocks": {"checkpointed": True, "wrapping": "head alone"},
    "gradient accumulation": {"micro_batches": 2},
    "gradient accumulation, head alone, no reshard": {
        "micro_batches": 2,
        "wrapping": "head alone",
        "reshard_after_forward": False,
    },
}


# FSDP and DDP hand the operator whole weights on any number of ranks: two in CI
@pytest.mark.parametrize("world", worlds(2, 4, 8, gloo=(2,)))
def test_fsdp2_trains_as_one_process(world):
    run_in_world(world, fsdp2, False)


@pytest.mark.parametrize("world", worlds(2))
def test_fsdp2_trains_as_one_process_with_a_head_compiled_as_one_graph(world):
    run_in_world(world, fsdp2, True)


def compile_modules(*modules: nn.Module) -> None:
    """Before wrappers come around them, whose hooks stay outside the graphs."""
    torch._dynamo.reset()
    for module in modules:
        module.compile(fullgraph=True, backend="aot_eager")


@contextmanager
def without_gradient_sync(model: FSDPModule):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def fsdp2(device, compiled):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for name, case in FSDP2_CASES.items():
        case = {"wrapping": "root", "tied": False, "checkpointed": False, "micro_batches": 1} | case
        wrapping, micro_batches = case.pop("wrapping"), case.pop("micro_batches")
        sequences = SEQUENCES * micro_batches
        model, reference = model_and_reference(device, tied=case.pop("tied"), checkpointed=case.pop("checkpointed"))
        if compiled:
            compile_modules(*model.blocks, model.head)
        shard_with_fsdp2(model, wrapping, mesh=mesh, **case)
        assert isinstance(model, FSDPModule)
        batches = make_batches(STEPS, sequences, device)

        losses = train(model, batches, micro_batches=micro_batches, no_sync=partial(without_gradient_sync, model))
        try:
            check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)
        except AssertionError as failure:
            raise AssertionError(name) from failure


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# A gradient of the head, a norm or a block that is 10 % too large moves the parameters by more. Tied weights sum two
# gradients, and the loss of the last step falls steeply: ten times the error.
BFLOAT16_TOLERANCE, BFLOAT16_TIED_TOLERANCE = 2e-3, 1.5e-2


@pytest.mark.parametrize("world", worlds(2, 8))
def test_fsdp2_in_bfloat16_stays_near_one_process_in_float32(world):
    run_in_world(world, fsdp2_bfloat16)


def fsdp2_bfloat16(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for wrapping, tied, options in (
        ("root", False, {}),
        ("head alone", False, {}),
        ("head alone", False, {"reshard_after_forward": False}),
        ("root", True, {}),
        ("tied together", True, {}),
    ):
        model, reference = model_and_reference(device, tied=tied)
        shard_with_fsdp2(model, wrapping, mp_policy=BFLOAT16, mesh=mesh, **options)
        batches = make_batches(STEPS, SEQUENCES, device)
        losses, expected = train(model, batches), reference_losses(reference, batches)
        tolerance = BFLOAT16_TIED_TOLERANCE if tied else BFLOAT16_TOLERANCE
        check_same(losses, expected, full_parameters(model), reference, tolerance)


@pytest.mark.parametrize("world", worlds(2))
def test_fsdp_weights_outside_forward_are_refused_with_the_ways_out(world):
    run_in_world(world, fsdp_mistakes)


def fsdp_mistakes(device):
    class Outside(SmallTransformer):
        def loss(self, tokens, target):
            return flce_ops.linear_cross_entropy(self.hidden(tokens), self.head.weight, target)

    tokens, target = make_batches(1, SEQUENCES, device)[0]
    torch.manual_seed(0)
    model = Outside().to(device)
    exact = model(tokens, target)
    hidden = model.hidden(tokens).detach()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    shard_with_fsdp2(model, "root", mesh=mesh)
    with pytest.raises(ValueError, match="input is a plain tensor.*inside the forward.*register_fsdp_forward_method"):
        flce_ops.linear_cross_entropy(hidden, model.head.weight, target)
    register_fsdp_forward_method(model, "loss")
    torch.testing.assert_close(model.loss(tokens, target), exact)
    model.unshard()
    torch.testing.assert_close(flce_ops.linear_cross_entropy(hidden, model.head.weight, target), exact)

    flat = fsdp1(SmallTransformer().to(device), device, use_orig_params=False)
    flat_weight = flat._handle.flat_param
    with pytest.raises(ValueError, match="a 1-D weight is what FSDP1 leaves outside the forward"):
        flce_ops.linear_cross_entropy(hidden, flat_weight, target)
    with_names = fsdp1(SmallTransformer().to(device), device, use_orig_params=True)
    with pytest.raises(ValueError, match="a 1-D weight is what FSDP1 leaves outside the forward"):
        flce_ops.linear_cross_entropy(hidden, with_names.module.head.weight, target)


# ---------------------------------------------------------------- DDP, FSDP1


@pytest.mark.parametrize("world", worlds(2, 4, 8, gloo=(2,)))
def test_ddp_trains_as_one_process(world):
    run_in_world(world, ddp)


def ddp(device):
    for options in (
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"tied": True},
        {"checkpointed": True},
        {"compiled": True},
        {"micro_batches": 2},
    ):
        options = {"tied": False, "checkpointed": False, "compiled": False, "micro_batches": 1} | options
        model, reference = model_and_reference(
            device, tied=options.pop("tied"), checkpointed=options.pop("checkpointed")
        )
        if options.pop("compiled"):
            compile_modules(model)
        micro_batches = options.pop("micro_batches")
        device_ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
        batches = make_batches(STEPS, SEQUENCES * micro_batches, device)
        losses = train(wrapped, batches, micro_batches=micro_batches, no_sync=wrapped.no_sync)
        check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)


def fsdp1(model: nn.Module, device, **options) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=device, **options)


@pytest.mark.parametrize("world", worlds(2, 4, 8, gloo=(2,)))
def test_fsdp1_trains_as_one_process(world):
    run_in_world(world, fsdp1_training)


def fsdp1_training(device):
    from small_transformer import Block

    for use_orig_params in (False, True):
        for policy in (None, ModuleWrapPolicy({Block}), ModuleWrapPolicy({Block, flce_ops.LinearCrossEntropyHead})):
            check_fsdp1(device, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    blocks = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({Block})}
    check_fsdp1(device, checkpointed=True, **blocks)
    check_fsdp1(device, compiled=True, **blocks)
    check_fsdp1(device, micro_batches=2, **blocks)


def check_fsdp1(device, *, checkpointed=False, compiled=False, micro_batches=1, **options):
    model, reference = model_and_reference(device, checkpointed=checkpointed)
    if compiled:
        compile_modules(model.head)
    wrapped = fsdp1(model, device, **options)
    batches = make_batches(STEPS, SEQUENCES * micro_batches, device)
    losses = train(wrapped, batches, micro_batches=micro_batches, no_sync=wrapped.no_sync)
    expected = reference_losses(reference, batches)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        parameters = {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in wrapped.named_parameters()
        }
    check_same(losses, expected, parameters, reference)


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


@pytest.mark.parametrize("world", worlds(2, 4, 8))
def test_tensor_parallel_model_trains_as_one_process(world):
    run_in_world(world, tensor_parallel_training)


def tensor_parallel_training(device):
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
    """Every rank sees the whole batch: no data parallelism."""
    optimizer = optimizer_of(model)
    losses = []
    for tokens, target in batches:
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world", worlds(2))
def test_compiled_tensor_parallel_model_trains_as_one_process(world):
    run_in_world(world, compiled_tensor_parallel_training)


def compiled_tensor_parallel_training(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    for checkpointed in (False, True):
        model, reference = model_and_reference(device, depth=1, checkpointed=checkpointed)
        tensor_parallel(model, mesh, sequence_parallel=True)
        compile_modules(model)
        batches = make_batches(STEPS, SEQUENCES, device)
        losses = train_with_groups_of_one(model, batches)
        check_same(losses, reference_losses(reference, batches), full_parameters(model), reference)


@pytest.mark.parametrize("world", worlds(4, 8, gloo=(4, 8)))
def test_fsdp2_and_hsdp_over_tensor_parallelism_train_as_one_process(world):
    run_in_world(world, fsdp2_times_tensor_parallel)


def fsdp2_times_tensor_parallel(device):
    size = dist.get_world_size()
    both = ({"sequence_parallel": True}, {"sequence_parallel": False})
    if size == 4:  # mesh dimensions of one rank, in either place
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


@pytest.mark.parametrize("world", worlds(4))
def test_fsdp2_over_tensor_parallelism_checkpointed_compiled_tied_and_in_bfloat16(world):
    run_in_world(world, variants_of_fsdp2_times_tensor_parallel)


def variants_of_fsdp2_times_tensor_parallel(device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    for checkpointed, compiled, tied, precision, tolerance in (
        (True, False, False, {}, TOLERANCE),
        (True, True, False, {}, TOLERANCE),
        (False, False, True, {}, TOLERANCE),
        (False, False, False, {"mp_policy": BFLOAT16}, BFLOAT16_TOLERANCE),
    ):
        model, reference = model_and_reference(device, checkpointed=checkpointed, tied=tied)
        tensor_parallel(model, mesh["tp"], sequence_parallel=True, tied=tied)
        if compiled:
            # without it torch 2.13 loses the gradient of a RowwiseParallel embedding before compiled blocks
            model.embed.register_forward_hook(lambda module, args, output: output + 0)
            compile_modules(*model.blocks, model.head)
        shard_with_fsdp2(model, "tied together" if tied else "head alone", mesh=mesh["dp"], **precision)
        with pytest.raises(ValueError, match="as it is stored between uses.*register_fsdp_forward_method"):
            hidden = DTensor.from_local(torch.zeros(4, DIM, device=device), mesh, [Replicate(), Replicate()])
            flce_ops.linear_cross_entropy(hidden, model.head.weight, torch.zeros(4, dtype=torch.long, device=device))
        batches = make_batches(STEPS, SEQUENCES, device)
        losses = train_data_parallel(model, batches, [mesh["dp"].get_group()])
        check_same(losses, reference_losses(reference, batches), full_parameters(model), reference, tolerance)


def train_data_parallel(model, batches, groups) -> list[float]:
    """`train` over the product of `groups`: the batch is split by the first, each part by the second."""
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
        loss = model(tokens, target, normalizer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        for group in groups:
            dist.all_reduce(total, group=group)
        losses.append(total.item() / ranks)
    return losses


# ---------------------------------------------------------------- pipelining


@pytest.mark.parametrize("world", worlds(2))
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_last_pipeline_stage_trains_as_one_process(world, schedule, compiled):
    run_in_world(world, pipelined, schedule, compiled=compiled)


@pytest.mark.parametrize("world", worlds(4))
@pytest.mark.parametrize("inner", ["dp", "tp"])
def test_last_pipeline_stage_may_be_sharded(world, inner):
    run_in_world(world, pipelined, ScheduleGPipe, inner=inner)


class FirstStage(nn.Module):
    def __init__(self, model: SmallTransformer) -> None:
        super().__init__()
        self.embed, self.block = model.embed, model.blocks[0]

    def forward(self, tokens):
        return self.block(self.embed(tokens))


class LastStage(nn.Module):
    def __init__(self, model: SmallTransformer) -> None:
        super().__init__()
        self.block, self.norm, self.head = model.blocks[1], model.norm, model.head

    def forward(self, x):
        return self.norm(self.block(x))


def pipelined(device, schedule, *, compiled=False, inner=None):
    """Two stages; with `inner` two processes each, which share the tokens (FSDP2) or the vocabulary of the head."""
    names = ("pp",) if inner is None else ("pp", inner)
    mesh = init_device_mesh(device.type, (2,) * len(names), mesh_dim_names=names)
    last = mesh["pp"].get_local_rank() == 1
    stage_of = LastStage if last else FirstStage
    model, reference = model_and_reference(device)
    part = stage_of(model)
    if compiled:
        compile_modules(*(part.head, part.block) if last else (part.block,))
    if inner == "tp" and last:
        parallelize_module(part, mesh["tp"], {"head": flce_ops.VocabParallel()})
    shares, share = 1, 0
    if inner == "dp":
        shares, share = 2, mesh["dp"].get_local_rank()
        if last:
            fully_shard(part.head, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
    stage = PipelineStage(part, mesh["pp"].get_local_rank(), 2, device, group=mesh["pp"].get_group())
    normalizer = torch.zeros((), device=device)

    def loss_of_micro_batch(hidden, target):
        return part.head(hidden, target, normalizer=normalizer)

    runner = schedule(stage, n_microbatches=4, loss_fn=loss_of_micro_batch, scale_grads=False)
    optimizer = optimizer_of(part)
    batches = make_batches(STEPS, SEQUENCES, device)
    losses = []
    for tokens, target in batches:
        normalizer.copy_((target != -100).sum() / shares)
        micro_batch_losses: list[torch.Tensor] = []
        if last:
            runner.step(target=target.chunk(shares)[share], losses=micro_batch_losses)
            total = sum(loss.detach() for loss in micro_batch_losses) / shares
            if inner == "dp":
                dist.all_reduce(total, group=mesh["dp"].get_group())
            losses.append(total.item())
        else:
            runner.step(tokens.chunk(shares)[share])
        optimizer.step()
        optimizer.zero_grad()
    expected = reference_losses(reference, batches)
    exact = dict(stage_of(reference).named_parameters())
    for name, parameter in full_parameters(part).items():
        torch.testing.assert_close(parameter, exact[name].detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    if last:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE)
