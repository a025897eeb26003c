"""Memory that runs out, an interrupt, a hook that raises: no state stays behind, no memory, and the next call is right.

A fault is put in place of every operation of ATen that a call makes, one after another (tests/faults.py). What a graph
holds after a failed backward is torch's: asked once more it is refused, never wrong.
"""

# N tokens, D hidden, V vocabulary

import os
import subprocess
import sys
import threading

import pytest
import torch
from faults import failing_calls, fault, state
from fresh_process import ROOT
from inputs import make_inputs
from torch import Tensor

import flce_ops

SHAPE, WORKSPACE = (140, 6, 31), 1 << 15  # two chunks, of several blocks each


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("no memory left, says the test")


def cross_entropy(inputs, **options):
    return flce_ops.linear_cross_entropy(*inputs.args, **options)


def log_probs(inputs):
    found = flce_ops.linear_log_probs(*inputs.args, entropy=True)
    return found.log_probs.sum() + found.entropy.sum()


def policy(inputs):
    per_token = torch.ones_like(inputs.target, dtype=torch.float32)
    return flce_ops.linear_policy_loss(*inputs.args[:3], per_token, -per_token, linear_bias=inputs.linear_bias)[0]


def divergence(inputs):
    x, w, _, b = inputs.args
    return flce_ops.linear_kl_div(x, w, x.detach().flip(0), w.detach().flip(0), linear_bias=b)


def given_logits(inputs):
    x, w, target, b = inputs.args
    return flce_ops.cross_entropy(torch.nn.functional.linear(x, w, b), target)


def soft_targets(inputs):
    x, w, target, b = inputs.args
    classes = torch.stack([target, target.roll(1)], 1).clamp(min=0)
    return flce_ops.linear_cross_entropy(x, w, classes, b, target_weight=torch.full_like(classes, 0.5, dtype=x.dtype))


def under_autocast(inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(inputs)


CALLS = {
    "loss": cross_entropy,
    "losses": lambda inputs: cross_entropy(inputs, reduction="none").sum(),
    "every term": lambda inputs: cross_entropy(inputs, softcap=5.0, label_smoothing=0.1, z_loss=0.01),
    "metrics": lambda inputs: cross_entropy(inputs, return_metrics=["entropy", "lse"])[0],
    "log-probabilities": log_probs,
    "policy": policy,
    "divergence": divergence,
    "soft targets": soft_targets,
    "given logits": given_logits,
    "autocast": under_autocast,
}
QUICK = ("loss", "losses", "divergence", "given logits", "autocast")  # one of each loop over rows, and the casts
OTHERS = [call for call in CALLS if call not in QUICK]


def operands():
    """On a CPU: on a GPU cuBLAS allocates its own workspace, and a fault hits launches that are only recorded."""
    return make_inputs(SHAPE, bias=True)


def step_of(call, inputs, factor: float = 3.0):
    """Results, after forward and backward in two chunks; a factor, which backward multiplies by."""
    leaves = list(inputs.leaves.values())

    def step() -> list[Tensor]:
        with flce_ops.workspace(WORKSPACE):
            loss = call(inputs)
            return [loss.detach(), *torch.autograd.grad(factor * loss, leaves)]

    return step


@pytest.mark.parametrize("call", [*QUICK, *(pytest.param(call, marks=pytest.mark.exhaustive) for call in OTHERS)])
def test_memory_that_runs_out_anywhere_in_a_step_leaves_nothing_behind(call, monkeypatch):
    step = step_of(CALLS[call], operands())
    step()
    assert failing_calls(monkeypatch, step, out_of_memory, next_call_every=8) > 10


@pytest.mark.parametrize("call", ["loss", pytest.param("losses", marks=pytest.mark.exhaustive)])
def test_an_interrupt_anywhere_in_a_step_leaves_nothing_behind(call, monkeypatch):
    assert failing_calls(monkeypatch, step_of(CALLS[call], operands()), KeyboardInterrupt) > 10


@pytest.mark.parametrize("call", CALLS)
def test_a_backward_that_failed_is_refused_or_right_the_second_time(call, monkeypatch):
    """The gradients that forward made are multiplied where they are: some of them once, some not at all."""
    inputs = operands()
    leaves = list(inputs.leaves.values())
    expected, at = torch.autograd.grad(3.0 * CALLS[call](inputs), leaves), 1
    while True:
        loss, failed = 3.0 * CALLS[call](inputs), False
        try:
            with fault(monkeypatch, at, out_of_memory):
                torch.autograd.grad(loss, leaves)
        except torch.OutOfMemoryError:
            failed = True
        if not failed:
            break
        try:
            assert all(map(torch.equal, torch.autograd.grad(loss, leaves), expected)), at
        except RuntimeError as refused:
            assert "a second time" in str(refused)
        at += 1
    assert at > 1


HOOKS = {
    "of the loss": lambda loss, leaves, hook: loss.register_hook(hook),
    "of its node": lambda loss, leaves, hook: loss.grad_fn.register_hook(hook),
    "before its node": lambda loss, leaves, hook: loss.grad_fn.register_prehook(hook),
    "of input": lambda loss, leaves, hook: leaves[0].register_hook(hook),
    "of the parameter": lambda loss, leaves, hook: leaves[1].register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_hook_that_raises_leaves_nothing_behind(where, reduction):
    inputs, before = operands(), state()
    leaves = list(inputs.leaves.values())

    def loss():
        return cross_entropy(inputs, reduction=reduction).sum()

    def raising(*_):
        raise ZeroDivisionError("of the hook")

    expected = torch.autograd.grad(3.0 * loss(), leaves)
    failing = loss()
    handle = HOOKS[where](failing, leaves, raising)
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        (3.0 * failing).backward()
    handle.remove()
    assert state() == before
    try:
        assert all(map(torch.equal, torch.autograd.grad(3.0 * failing, leaves), expected))
    except RuntimeError as refused:
        assert "a second time" in str(refused)
    assert all(map(torch.equal, torch.autograd.grad(3.0 * loss(), leaves), expected))


def test_threads_that_call_at_once_have_the_results_of_one():
    """Each with its own operands and options; one of the threads fails all the time."""
    calls = ["loss", "losses", "divergence", "policy"]
    steps = [step_of(CALLS[call], operands()) for call in calls]
    expected = [step() for step in steps]
    wrong: list[str] = []

    def work(name: str, step, right) -> None:
        for _ in range(20):
            if not all(map(torch.equal, step(), right)):
                wrong.append(name)

    def fail() -> None:
        inputs = operands()
        for _ in range(20):
            with pytest.raises(ValueError, match="label_smoothing"):
                cross_entropy(inputs, label_smoothing=2.0)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=given) for given in zip(calls, steps, expected)]
    threads.append(threading.Thread(target=fail))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not wrong


PROCESSES = """
import multiprocessing, os, sys
import torch, flce_ops

def step():
    torch.manual_seed(0)
    x, w = torch.randn(70, 6, requires_grad=True), torch.randn(31, 6, requires_grad=True)
    with flce_ops.workspace(1 << 15):
        loss = flce_ops.linear_cross_entropy(x, w, torch.arange(70) % 31)
        return [part.tolist() for part in (loss, *torch.autograd.grad(3.0 * loss, (x, w)))]

def child(results):
    results.put((step(), flce_ops.get_workspace()))

if __name__ == "__main__":
    expected = step()
    context = multiprocessing.get_context(sys.argv[1])
    results = context.Queue()
    with flce_ops.workspace(1 << 20):  # a forked process starts inside of the block
        process = context.Process(target=child, args=(results,))
        process.start()
    found, workspace = results.get(timeout=500)
    process.join()
    assert process.exitcode == 0
    assert found == expected
    inside = sys.argv[1] == "fork"
    assert workspace == (1 << 20 if inside else 512 << 20), workspace
"""


# threads and locks of a forked process are copies
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_a_process_that_is_started_by_one_that_calls_has_its_results(method, tmp_path):
    script = tmp_path / "processes.py"  # a file, which a spawned process imports
    script.write_text(PROCESSES)
    # GNU's OpenMP, and so torch's CPU build, waits forever in a forked child whose parent has used several threads
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
