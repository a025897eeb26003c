"""torch's memory estimators under FakeTensorMode: their peak is the one of `python -m flce_ops.plan`."""

# N tokens, D hidden, V vocabulary

import gc

import pytest
import torch
from test_compile import compiled, ignored_inputs, kl_div, policy, tensors_of
from test_compiled_autograd import focal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx.experimental.proxy_tensor import make_fx

import flce_ops
from flce_ops.plan import plan

N, D, V = 2048, 1024, 4096
WORKSPACE = 8 << 20  # half of the logits, and more than the fewest rows of a chunk
FUNCTIONS = {  # and its row in the plan
    "mean": (flce_ops.linear_cross_entropy, 2),
    "policy": (policy, 2),
    "token loss": (lambda *args: flce_ops.linear_token_loss(*args, focal).loss, 2),
    "kl_div": (kl_div, 2),
    "none": (lambda *args: flce_ops.linear_cross_entropy(*args, reduction="none"), 3),
    "log_probs": (lambda *args: flce_ops.linear_log_probs(*args), 3),
    "kl_div none": (lambda *args: kl_div(*args, reduction="none"), 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_peak_of_a_step_is_the_plan(device, name):
    """In forward or in backward, which multiplies the gradients made in forward in place, as with real tensors."""
    function, row = FUNCTIONS[name]
    with FakeTensorMode(), flce_ops.workspace(WORKSPACE), MemTracker() as tracker:
        input, weight = (
            torch.empty(rows, D, dtype=torch.bfloat16, device=device, requires_grad=True) for rows in (N, V)
        )
        target = torch.zeros(N, dtype=torch.int64, device=device)
        teacher = 2 * 2 * D * (N + V) if name.startswith("kl_div") else 0  # `kl_div` flips copies
        loss = sum(value.sum() for value in tensors_of(function(input, weight, target)) if value.requires_grad)
        held = current(tracker)
        loss.backward()
        peak = max(total(snapshot) for snapshot in tracker.get_tracker_snapshot("peak").values())
        temporaries = plan(N, D, V, 600.0)[row].temporaries
    assert peak == pytest.approx(2 * 2 * D * (N + V) + teacher / 2 + temporaries, rel=0.04)
    made, saved = 2 * D * (N + V), 2 * N * V
    assert held < 2 * D * (N + V) + teacher / 2 + max(made, saved * (row == 3)) + (1 << 20), "the workspace is kept"


def total(snapshot):
    return next(number for kind, number in snapshot.items() if "Total" in str(kind))


def current(tracker):
    gc.collect()
    return max(total(snapshot) for snapshot in tracker.get_tracker_snapshot("current").values())


def test_graphs_hold_no_allocation_for_the_workspace():
    def step(*args):
        loss = flce_ops.linear_cross_entropy(*args)
        return torch.autograd.grad(loss, args[:2])

    args = ignored_inputs()
    loss, counter = compiled(flce_ops.linear_cross_entropy)
    loss(*args).backward()
    for graph in (make_fx(step, tracing_mode="fake")(*args), *counter.graphs):
        assert not [node for node in graph.graph.nodes if "empty" in str(node.target)]
