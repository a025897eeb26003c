"""Pipeline, FSDP2, context and tensor parallelism at once, as torchtitan composes them, with the head in the last
stage, give the losses and parameters of one process.

    mesh (pp, dp, cp, tp)    pp: two stages, micro-batches by 1F1B      dp: sequences, and cp: parts of each sequence,
                             tp: features of blocks, the vocabulary     over the ranks of which FSDP2 shards

The last stage gets plain labels, those of its rank's sequences and positions. FSDP averages over dp and cp, so the
normalizer is the number of targets / (dp cp). Two dimensions have two ranks, the others one.
"""

# B batch, T tokens of one sequence

import pytest
import torch
import torch.distributed as dist
from against_one_process import (
    SEQUENCES,
    STEPS,
    TOLERANCE,
    compile_modules,
    full_parameters,
    model_and_reference,
    optimizer_of,
    reference_losses,
)
from process_pool import run_in_world, worlds
from small_transformer import make_batches
from test_tensor_parallel_training import tensor_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SHAPES = {  # pp, dp, cp, tp
    "pp x dp": (2, 2, 1, 1),
    "pp x cp": (2, 1, 2, 1),
    "pp x tp": (2, 1, 1, 2),
    "dp x cp": (1, 2, 2, 1),
    "dp x tp": (1, 2, 1, 2),
    "cp x tp": (1, 1, 2, 2),
}


class Stage(nn.Module):
    """A contiguous part of the model; without a head it returns hidden states, and so does the last one."""

    def __init__(self, model, first: bool, last: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.blocks = nn.ModuleList(model.blocks[0 if first else half : None if last else half])
        self.embed = model.embed if first else None
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None else self.norm(x)


@pytest.mark.parametrize("world", worlds(4))
@pytest.mark.parametrize("dimensions", SHAPES)
def test_four_dimensions_train_as_one_process(world, dimensions):
    run_in_world(world, trains_as_one_process, SHAPES[dimensions], Schedule1F1B)


@pytest.mark.parametrize("world", worlds(2))
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_pipeline_trains_as_one_process(world, schedule, compiled):
    run_in_world(world, trains_as_one_process, (2, 1, 1, 1), schedule, compiled)


def trains_as_one_process(device, shape, schedule, compiled=False):
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    size = dict(zip(mesh.mesh_dim_names, mesh.shape))
    rank = {name: mesh.get_local_rank(name) for name in size}
    first, last = rank["pp"] == 0, rank["pp"] == size["pp"] - 1
    data = mesh["dp", "cp"]._flatten("fsdp")
    model, reference = model_and_reference(device)
    if size["tp"] > 1:
        tensor_parallel(model, mesh["tp"], sequence_parallel=True)
    part = Stage(model, first, last)
    layers = [*part.blocks, part.head] if last else [*part.blocks]
    if compiled:
        compile_modules(*layers)
    if data.size() > 1:
        for layer in (*layers, part):
            fully_shard(layer, mesh=data)
    stage = PipelineStage(part, rank["pp"], size["pp"], device, group=mesh.get_group("pp"))
    normalizer = torch.zeros((), device=device)

    def loss_of_micro_batch(hidden, target):
        return part.head(hidden, target, normalizer=normalizer)

    runner = schedule(stage, n_microbatches=2, loss_fn=loss_of_micro_batch, scale_grads=False)
    optimizer, batches = optimizer_of(part), make_batches(STEPS, SEQUENCES, device)
    losses = []
    for tokens, target in batches:
        normalizer.copy_((target != -100).sum() / data.size())
        for name, dim in (("dp", 0), ("cp", 1)):
            tokens, target = (of.chunk(size[name], dim)[rank[name]].contiguous() for of in (tokens, target))
        found: list[torch.Tensor] = []
        runner.step(*([tokens] if first else []), **({"target": target, "losses": found} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if last:
            total = torch.stack([loss.detach() for loss in found]).sum() / data.size()
            dist.all_reduce(total, group=data.get_group())
            losses.append(total.item())
    expected = reference_losses(reference, batches)
    if last:
        torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)
    exact = dict(Stage(reference, first, last).named_parameters())
    for name, parameter in full_parameters(part).items():
        torch.testing.assert_close(parameter, exact[name].detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=name)
