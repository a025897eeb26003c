"""Training on several processes equals training in one: the loss of every step, and the parameters at the end.

With sharded data, `normalizer` = (targets of the global batch) / (data-parallel ranks), because FSDP and DDP average
gradients.
"""

# B batch, T tokens of one sequence, D hidden, V vocabulary

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from against_one_process import (
    BFLOAT16,
    BFLOAT16_TIED_TOLERANCE,
    BFLOAT16_TOLERANCE,
    SEQUENCES,
    STEPS,
    check_same,
    compile_modules,
    full_parameters,
    model_and_reference,
    reference_losses,
    shard_with_fsdp2,
    train,
)
from in_worlds import in_worlds
from process_pool import run_in_world, worlds
from small_transformer import SmallTransformer, make_batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import flce_ops

# ---------------------------------------------------------------- FSDP2


FSDP2_CASES = {
    "root owns the head": {},
    "head alone": {"wrapping": "head alone"},
    "tied, root owns both": {"tied": True},
    "tied, wrapped together": {"tied": True, "wrapping": "tied together"},
    "no reshard after forward": {"wrapping": "head alone", "reshard_after_forward": False},
    "reshard after forward": {"reshard_after_forward": True},
    "checkpointed blocks": {"checkpointed": True, "wrapping": "head alone"},
    "gradient accumulation": {"micro_batches": 2},
}


# FSDP and DDP pass whole weights to the operator, whatever the number of ranks, so CI runs two
@pytest.mark.parametrize("world", worlds(2, 4, 8, gloo=(2,)))
def test_fsdp2_trains_as_one_process(world):
    run_in_world(world, fsdp2, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", worlds(2))
def test_fsdp2_trains_as_one_process_with_a_head_compiled_as_one_graph(world):
    run_in_world(world, fsdp2, True)


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


@in_worlds(worlds(2, 8))
def test_fsdp2_in_bfloat16_stays_near_one_process_in_float32(device):
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


@in_worlds(worlds(2))
def test_mixed_precision_rounds_a_floating_normalizer_and_output_dtype_the_loss(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tokens, target = make_batches(1, SEQUENCES, device)[0]
    count = torch.tensor(1001, device=device)  # 1000 in bfloat16

    def trained(of_head, of_root):
        """The loss, that of a floating count, and gradients."""
        torch.manual_seed(0)
        model = SmallTransformer().to(device)
        for layer, options in ((model.blocks[0], {}), (model.blocks[1], {}), (model.head, of_head), (model, of_root)):
            fully_shard(layer, mesh=mesh, mp_policy=replace(BFLOAT16, **options))
        loss = model(tokens, target, count)
        loss.backward()
        gradients = full_parameters(model, "grad")
        return loss, model(tokens, target, count.float()), gradients

    exact, rounded, gradients = trained({}, {})
    assert exact.dtype == torch.float32
    torch.testing.assert_close(rounded / exact, torch.tensor(1.001, device=device), rtol=1e-6, atol=0)
    for loss in trained({"cast_forward_inputs": False}, {"cast_forward_inputs": False})[:2]:
        torch.testing.assert_close(loss, exact, rtol=1e-6, atol=0)
    for policies in (({"output_dtype": torch.bfloat16}, {}), ({}, {"output_dtype": torch.bfloat16})):
        loss, _, of_rounded = trained(*policies)
        assert loss.dtype == torch.bfloat16 and loss == exact.bfloat16() and loss != exact
        torch.testing.assert_close(of_rounded, gradients, rtol=1e-3, atol=1e-5)


@in_worlds(worlds(2))
def test_fsdp_weights_outside_forward_are_refused_with_the_ways_out(device):
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


@in_worlds(worlds(2, 4, 8, gloo=(2,)))
def test_ddp_trains_as_one_process(device):
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


@in_worlds(worlds(2, 4, 8, gloo=(2,)))
def test_fsdp1_trains_as_one_process(device):
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
