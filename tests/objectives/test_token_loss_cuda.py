"""linear_token_loss in Triton on a GPU: errors, launches, host synchronisation, CUDA graphs, memory."""

# N tokens, K classes of each, D hidden, V vocabulary

import pytest
import torch
from reference_loss import error
from reference_token_loss import dense_token_loss, make_call, run
from test_cuda_contract import captured
from torch.profiler import ProfilerActivity, profile

import flce_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = (700, 256, 5003)
SMALL = 3 << 20  # several chunks


@flce_ops.token_loss
def focal(log_prob, gamma):
    return -((1 - log_prob.exp()) ** gamma) * log_prob


@flce_ops.token_loss
def unlikelihood(log_prob, a):
    return -torch.log1p(-log_prob.exp()) * a - a.log() * log_prob


@flce_ops.token_loss
def of_rows(log_prob, a, *, lse):
    return -a * log_prob + 1e-2 * lse**2


@flce_ops.token_loss
def several(log_prob, q):
    return -(q * log_prob).sum()


@flce_ops.token_loss
def bonus(log_prob, a, *, entropy):
    return -a * log_prob - 0.1 * entropy


fused = flce_ops.token_loss(unlikelihood.function, name="tests.cuda.fused", compile=True)
CASES = {"focal": (focal, 0), "unlikelihood": (unlikelihood, 0), "lse": (of_rows, 0), "K classes": (several, 4)}
CASES |= {"fused": (fused, 0), "entropy": (bonus, 0)}


def made(name, shape=SHAPE):
    function, topk = CASES[name]
    call = make_call(shape, dtype=torch.bfloat16, device="cuda", topk=topk)
    if function is focal:
        return function, call, [2.0]
    tensor = 0.5 + torch.rand(shape[0], *([topk] if topk else []), device="cuda")
    ignored = (call["target"] == -100).view(shape[0], -1).all(1)
    tensor[ignored] = call["input"][ignored] = torch.nan
    return function, call, [tensor]


def of_log_probs(input, linear_weight, target, function, *tensors):
    """The function of linear_log_probs, mapped by torch itself."""
    found = flce_ops.linear_log_probs(input, linear_weight, target, entropy=True)
    counts = target != -100
    valid = counts.view(len(counts), -1).any(1)
    log_probs = torch.where(counts, found.log_probs, -1.0)
    beside = {"lse": found.lse, "entropy": found.entropy}
    numbers = [torch.where(valid, beside[name], 1.0) for name in function.reads]
    tensors = [torch.full_like(found.lse, t) if isinstance(t, float) else t for t in tensors]
    tensors = [t.masked_fill(~valid.view(-1, *[1] * (t.dim() - 1)), 0.0) for t in tensors]
    of_token = lambda lp, numbers, tensors: function.function(lp, *tensors, **dict(zip(function.reads, numbers)))  # noqa: E731
    losses = torch.func.vmap(of_token)(log_probs, numbers, tensors)
    return torch.where(valid, losses, 0.0).sum() / valid.sum(), found.log_probs.detach()


@pytest.mark.parametrize("workspace", [512 << 20, SMALL])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_log_probs(name, workspace, poisoned_memory):
    function, call, tensors = made(name)
    numbers = [torch.tensor(t) if isinstance(t, float) else t for t in tensors]
    exact = run(
        dense_token_loss, call, function, *(t.cuda() for t in numbers), dtype=torch.float64, reads=function.reads
    )
    beside = run(of_log_probs, call, function, *tensors)
    with flce_ops.workspace(workspace):
        first, second = [run(flce_ops.linear_token_loss, call, function, *tensors) for _ in range(2)]
        path = flce_ops.last_path()
    entropy = "entropy" in function.reads
    assert path.implementation == "triton" and (path.op == "linear_cross_entropy_with_grad") == (not entropy)
    assert entropy or (path.chunks > 1) == (workspace == SMALL)
    for key, truth in exact.items():
        assert error(first[key], truth) <= 1.25 * error(beside[key], truth) + 0.25 * 2.0**-8 * (key != "log_probs"), key
        assert name == "fused" or torch.equal(first[key], second[key]), key
    assert error(first["log_probs"], exact["log_probs"]) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_a_cuda_graph_after_one_call_and_no_host_synchronisation_after_the_first(name):
    function, call, tensors = made(name)
    tensors = [torch.tensor(t, device="cuda") if isinstance(t, float) else t for t in tensors]
    x, w, y = (call[n] for n in ("input", "linear_weight", "target"))
    x.requires_grad_(), w.requires_grad_()

    def step():
        found = flce_ops.linear_token_loss(x, w, y, function, *tensors, normalizer=37.5)
        return found.loss.detach(), found.log_probs, *torch.autograd.grad(found.loss, (x, w))

    step()
    if name == "fused":
        step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, results = captured(step)
    for _ in range(2):
        graph.replay()
    for found, truth in zip(results, expected, strict=True):
        assert torch.equal(found, truth)


def kernels_of(step):
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
        step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [event.name for event in events.events() if event.device_type == device]


@pytest.mark.parametrize("name", ["focal", "unlikelihood", "lse", "K classes"])
def test_a_chunk_takes_at_most_8_launches_beside_the_functions_own(name):
    function, call, tensors = made(name)
    tensors = [torch.tensor(t, device="cuda") if isinstance(t, float) else t for t in tensors]
    x, w, y = (call[n] for n in ("input", "linear_weight", "target"))
    x.requires_grad_(), w.requires_grad_()
    topk = {"target_weight": torch.rand(y.shape, device="cuda")} if y.dim() == 2 else {}
    numbers = [-torch.rand(y.shape, device="cuda"), *(torch.rand(len(y), device="cuda") for _ in function.reads)]

    def alone():
        leaves = [number.requires_grad_() for number in numbers]
        losses = function.mapped(leaves, tensors)
        torch.autograd.grad(losses, leaves, torch.ones_like(losses))

    with flce_ops.workspace(SMALL):
        ours = kernels_of(lambda: flce_ops.linear_token_loss(x, w, y, function, *tensors)[0].backward())
        chunks = flce_ops.last_path().chunks
        cross_entropy = kernels_of(lambda: flce_ops.linear_cross_entropy(x, w, y, **topk).backward())
    more = (len(ours) - len(cross_entropy)) / chunks - len(kernels_of(alone))
    assert chunks > 1 and more <= 8, (more, sorted(set(ours) - set(cross_entropy)))


def test_temporary_memory_stays_within_the_workspace():
    tokens, hidden, vocab = shape = (4096, 512, 64128)
    function, call, tensors = made("lse", shape)
    x, w = (call[n].requires_grad_() for n in ("input", "linear_weight"))
    with flce_ops.workspace(128 << 20):
        for _ in range(3):
            x.grad = w.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            flce_ops.linear_token_loss(x, w, call["target"], function, *tensors).loss.backward()
            used = torch.cuda.max_memory_allocated() - before
    assert used <= (128 << 20) + 2 * hidden * (tokens + vocab) + (8 << 20)
