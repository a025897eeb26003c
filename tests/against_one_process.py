"""Trains a small model in one process and on several ranks, and compares losses and parameters."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from small_transformer import SmallTransformer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

STEPS = 4
SEQUENCES = 8
TOLERANCE = 2e-5


def model_and_reference(device, **options) -> tuple[SmallTransformer, SmallTransformer]:
    torch.manual_seed(0)
    model = SmallTransformer(**options).to(device)
    return model, copy.deepcopy(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # SGD, because Adam would hide gradients that are wrong by a factor. foreach, the default on CUDA, does not accept
    # DTensors beside plain parameters.
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
    """Each rank of `group` trains on its share of every batch, in micro-batches. Returns the global losses."""
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


def full_parameters(model: nn.Module, of: str = "data") -> dict[str, torch.Tensor]:
    """The parameters, or their gradients, of all ranks."""
    found = {name: getattr(parameter, of).detach() for name, parameter in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in found.items()}


def check_same(losses, expected, parameters, reference, tolerance=TOLERANCE):
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    exact = dict(reference.named_parameters())
    assert {name.replace("module.", "") for name in parameters} == set(exact)
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            parameter, exact[name.replace("module.", "")].detach(), rtol=tolerance, atol=tolerance, msg=name
        )


def shard_with_fsdp2(model: SmallTransformer, wrapping: str, **options) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    if wrapping == "head alone":
        fully_shard(model.head, **options)
    elif wrapping == "tied together":
        fully_shard([model.embed, model.norm, model.head], **options)
    fully_shard(model, **options)


def compile_modules(*modules: nn.Module) -> None:
    """Compiles modules before wrappers are put around them, whose hooks then stay outside the graphs."""
    torch._dynamo.reset()
    for module in modules:
        module.compile(fullgraph=True, backend="aot_eager")


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# If a gradient of the head, a norm or a block were 10 % too large, the parameters would move by more than this. Tied
# weights sum two gradients, and the loss of the last step falls steeply: ten times the error.
BFLOAT16_TOLERANCE, BFLOAT16_TIED_TOLERANCE = 2e-3, 1.5e-2
