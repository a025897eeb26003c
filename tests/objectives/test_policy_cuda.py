"""linear_policy_loss in Triton on a GPU: the interpreter's cases in bfloat16, repeated launches, CUDA graphs."""

# N tokens, D hidden, V vocabulary

import math

import pytest
import torch
from reference_loss import error
from reference_policy import cancellation, make_policy, plain_policy_loss, run_policy
from test_cuda_contract import captured
from test_policy import CAPPED, KL, OBJECTIVES, SAMPLED

import flce_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = (700, 256, 5003)
SMALL = 3 << 20  # several chunks
CASES = {
    **{name: ({}, options | kl) for (name, options), kl in zip(OBJECTIVES.items(), KL * 2)},
    "on policy": ({"on_policy": True, "bias": True}, {"beta": 0.04}),
    "sampling": ({"token_weight": True, "logits": SAMPLED}, {**SAMPLED, "dual_clip": 3.0}),
    "capped": ({"bias": True, "logits": CAPPED}, {**CAPPED, "beta": 0.1}),
}


def call_of(made, shape=SHAPE):
    return make_policy(shape, dtype=torch.bfloat16, device="cuda", **made)


@pytest.mark.parametrize("workspace", [512 << 20, SMALL])
@pytest.mark.parametrize("name", CASES)
def test_triton_is_no_worse_than_plain_torch_and_gives_the_same_bits_again(name, workspace, poisoned_memory):
    made, options = CASES[name]
    call = call_of(made)
    exact = run_policy(plain_policy_loss, call, dtype=torch.float64, **options)
    plain = run_policy(plain_policy_loss, call, **options)
    with flce_ops.workspace(workspace):
        first, *others = [run_policy(flce_ops.linear_policy_loss, call, **options) for _ in range(4)]
        path = flce_ops.last_path()
    assert (path.op, path.implementation) == ("linear_cross_entropy_with_grad", "triton")
    assert (path.chunks > 1) == (workspace == SMALL)
    for key, found in first.items():
        unit = 0.5 * 2.0**-8 * (cancellation(call, **options) if key == "loss" else 1.0)
        assert error(found, exact[key]) <= 1.25 * error(plain[key], exact[key]) + unit, key
        assert all(torch.equal(found, other[key]) for other in others), key
    # float32 products of the unrounded operands: log-probabilities do not come from rounded logits
    assert error(first["log_probs"], exact["log_probs"]) < 1e-5


def test_clipped_tokens_of_infinite_ratios_and_ignored_ones_that_hold_nan(poisoned_memory):
    call = call_of({})
    ignored = call["target"] == -100
    call["advantages"] = call["advantages"].abs()
    call["old_log_probs"] = torch.full_like(call["old_log_probs"], -150.0)
    call["old_log_probs"][::3] = 0.0
    for name in ("input", "advantages", "old_log_probs", "ref_log_probs"):
        call[name][ignored] = math.nan
    found = run_policy(flce_ops.linear_policy_loss, call)
    within = torch.zeros_like(ignored)
    within[::3] = True
    assert not found["input"][~within | ignored].any() and found["input"][within & ~ignored].any(1).all()
    assert all(result.isfinite().all() for result in found.values())


def test_a_cuda_graph_and_no_host_synchronisation():
    call = call_of({"token_weight": True})
    leaves = {n: t if t is None else t.requires_grad_(n in ("input", "linear_weight")) for n, t in call.items()}
    wanted = leaves["input"], leaves["linear_weight"]

    def step():
        found = flce_ops.linear_policy_loss(**leaves, beta=0.1, normalizer=37.5)
        # detached, because a graph that outlives its step keeps the leaves' nodes, which belong to the stream they were
        # made on
        return found.loss.detach(), found.log_probs, *torch.autograd.grad(found.loss, wanted)

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, results = captured(step)
    graph.replay()
    for found, truth in zip(results, expected, strict=True):
        assert torch.equal(found, truth)


def test_temporary_memory_stays_within_the_workspace():
    tokens, hidden, vocab = shape = (4096, 512, 64128)
    call = call_of({}, shape)
    leaves = {n: t if t is None else t.requires_grad_(n in ("input", "linear_weight")) for n, t in call.items()}
    with flce_ops.workspace(128 << 20):
        for _ in range(3):  # the last call repeats launches
            leaves["input"].grad = leaves["linear_weight"].grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            flce_ops.linear_policy_loss(**leaves, beta=0.1).loss.backward()
            used = torch.cuda.max_memory_allocated() - before
    assert used <= (128 << 20) + 2 * hidden * (tokens + vocab) + (8 << 20)
