"""torch.compile(mode="reduce-overhead"): a training step replayed as CUDA graphs on new tokens and moving weights."""

# N tokens, D hidden, V vocabulary

import copy

import pytest
import torch
from inputs import make_inputs
from reference_loss import error
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import flce_ops

STEPS = 6  # warm-up, recording, replays


class Model(nn.Module):
    def __init__(self, D, V):
        super().__init__()
        self.trunk = nn.Linear(D, D)
        self.head = flce_ops.LinearCrossEntropyHead(D, V, bias=True)

    def forward(self, input, target):
        return self.head(torch.tanh(self.trunk(input)), target)


def train(model, loss_of, batches) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs in batches:
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(inputs.input, inputs.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),  # a CPU has no graphs; the mode must do no harm there
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_training_with_reduce_overhead_is_eager_training(device, dtype):
    N, D, V = (128, 64, 1021) if device == "cuda" else (12, 11, 31)
    batches = [make_inputs((N, D, V), device=device, dtype=dtype, requires_grad=False) for _ in range(STEPS)]
    eager = Model(D, V).to(device, dtype)
    model = copy.deepcopy(eager)
    expected = train(eager, eager, batches)
    counters.clear()
    loss_of = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    losses = train(model, loss_of, batches[:-1])
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        losses += train(model, loss_of, batches[-1:])
    if device == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0
        launched = {event.key: event.count for event in profiler.key_averages()}
        assert launched.get("cudaGraphLaunch", 0) >= 2, launched  # forward and backward
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    assert error(torch.tensor(losses), torch.tensor(expected)) < tolerance
    for name, parameter in model.named_parameters():
        assert error(parameter, eager.get_parameter(name)) < tolerance, name
