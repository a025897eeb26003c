"""Zero-bubble pipelines, whose backward makes the gradient of a stage's input first and those of parameters later."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import contextlib

import pytest
import torch
import torch.distributed as dist
from against_one_process import model_and_reference
from in_worlds import in_worlds
from process_pool import worlds
from reference_loss import error
from sharded_inputs import TOLERANCE, R, batch, full, mesh_of, place
from small_transformer import SmallTransformer, make_batches
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion

import flce_ops


def mean(hidden, weight, target, count):
    return flce_ops.linear_cross_entropy(hidden, weight, target, normalizer=count)


def log_probs(hidden, weight, target, count):
    return -flce_ops.linear_log_probs(hidden, weight, target).log_probs.sum() / count


def policy(hidden, weight, target, count):
    tokens = torch.linspace(-1.0, 1.0, target.numel(), device=target.device).view(target.shape)
    return flce_ops.linear_policy_loss(hidden, weight, target, tokens, tokens - 3.0, normalizer=count).loss


def kl_div(hidden, weight, target, count):
    teacher = torch.ones_like(hidden).cumsum(-1) / 9.0, weight.detach().sin()
    return flce_ops.linear_kl_div(hidden, weight, *teacher, target=target, normalizer=count)


class Stage(nn.Module):
    """One block. The first stage has the embedding, too, the last one the norm and the head."""

    def __init__(self, model: SmallTransformer, place: int) -> None:
        super().__init__()
        last = len(model.blocks) - 1
        self.embed = model.embed if place == 0 else nn.Identity()
        self.block = model.blocks[place]
        self.norm, self.head = (model.norm, model.head) if place == last else (nn.Identity(), None)

    def forward(self, x):
        return self.norm(self.block(self.embed(x)))


@pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"), reason="torch 2.11's stage_backward_weight takes no autograd Function"
)
@pytest.mark.parametrize("loss", [mean, log_probs, policy, kl_div])
@in_worlds(worlds(2, 4))
def test_losses_and_gradients_are_those_of_one_process(device, loss):
    """Of a loss whose gradients forward has made, and of one that leaves them to backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    stages = micro_batches = 2 * size
    [(tokens, target)] = make_batches(1, micro_batches, device)
    count = (target != -100).sum()
    in_v = rank, stages - 1 - rank
    schedules = [
        (ScheduleZBVZeroBubble, in_v),
        (ScheduleDualPipeV, in_v),
        (ScheduleInterleavedZeroBubble, (rank, rank + size)),
    ]
    for schedule, places in schedules if size == 2 or loss is mean else schedules[:1]:
        for block in (contextlib.nullcontext, flce_ops.gradients_in_backward):
            model, reference = model_and_reference(device, depth=stages)
            parts = {at: Stage(model, at) for at in places}
            last = parts.get(stages - 1)
            runner = schedule(
                [PipelineStage(part, at, stages, device) for at, part in parts.items()],
                n_microbatches=micro_batches,
                loss_fn=lambda hidden, target, last=last: loss(hidden, last.head.weight, target, count),
                scale_grads=False,
            )
            losses: list[torch.Tensor] = []
            arguments = {"target": target, "losses": losses} if last else {}
            with block():
                runner.step(*([tokens] if 0 in parts else []), **arguments)
            micro = zip(tokens.chunk(micro_batches), target.chunk(micro_batches), strict=True)
            expected = [loss(reference.hidden(x), reference.head.weight, y, count) for x, y in micro]
            sum(expected).backward()
            if last:
                torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach(), rtol=1e-5, atol=1e-6)
            for at, part in parts.items():
                exact = dict(Stage(reference, at).named_parameters())
                for name, parameter in part.named_parameters():
                    torch.testing.assert_close(parameter.grad, exact[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("block", [contextlib.nullcontext, flce_ops.gradients_in_backward])
@in_worlds(worlds(2, 4))
def test_gradients_over_a_sharded_vocabulary_are_made_one_by_one(device, block):
    """Ranks exchange the same numbers in both backwards."""
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    count = torch.tensor(9.0, device=device)
    for loss in (mean, log_probs, kl_div):
        exact = loss(inputs.input, inputs.linear_weight, inputs.target, count)
        with block():
            value = loss(placed.input, placed.linear_weight, placed.target, count)
        for name in ("linear_weight", "input"):
            (expected,) = torch.autograd.grad(exact, getattr(inputs, name), retain_graph=True)
            (found,) = torch.autograd.grad(value, getattr(placed, name), retain_graph=True)
            assert error(full(found), expected) < TOLERANCE, (loss.__name__, name)
