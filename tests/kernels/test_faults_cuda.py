"""On a GPU: memory that really runs out, two CUDA graphs in two streams, a workspace that changes among repeated steps.

tests/sinks/test_faults.py runs there, too: a fault at each operation of a step of Triton's kernels.
"""

# N tokens, D hidden, V vocabulary

import threading

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, run_reference
from test_cuda_contract import captured, forward_and_backward

import flce_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MiB = 2**20


@pytest.fixture
def limit():
    """Sets how many bytes the caching allocator may take from the driver."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda nbytes: torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("calls", [0, 1, 4], ids=["first", "captured", "repeated"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_call_after_one_that_found_no_memory_is_right(limit, reduction, calls):
    """With ever more bytes, until they are enough. `calls`: how often the step has run."""
    inputs = make_inputs((2048, 512, 32003), device="cuda", dtype=torch.bfloat16)
    other = make_inputs((2048, 512, 32003), device="cuda", dtype=torch.bfloat16)
    expected = forward_and_backward(inputs, reduction=reduction)
    failures, extra = 0, 0
    while True:
        flce_ops.set_workspace(512 * MiB + extra)  # another kind of call: its launches are not captured yet
        for _ in range(calls):
            forward_and_backward(other, reduction=reduction)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        limit(torch.cuda.memory_reserved() + extra)
        try:
            forward_and_backward(inputs, reduction=reduction)
            enough = True
        except torch.OutOfMemoryError:
            enough = False
        limit(torch.cuda.get_device_properties(0).total_memory)
        assert torch.cuda.memory_allocated() == before
        loss, grads = forward_and_backward(inputs, reduction=reduction)
        assert torch.equal(loss, expected[0]) and all(map(torch.equal, grads, expected[1])), extra
        del loss, grads
        if enough:
            break
        failures, extra = failures + 1, extra + 16 * MiB
    flce_ops.set_workspace(512 * MiB)
    assert failures > 2


def test_two_graphs_are_replayed_in_two_streams_at_once():
    """Neither writes to the other's memory, and none to that of steps launched beside them."""
    problems = [make_inputs((512, 128, 5003), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    expected = [forward_and_backward(inputs) for inputs in problems]
    graphs = [captured(lambda inputs=inputs: forward_and_backward(inputs)) for inputs in problems[:2]]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        beside = forward_and_backward(problems[2])
        torch.cuda.synchronize()
        for (loss, grads), (right, right_grads) in zip([*(found for _, found in graphs), beside], expected):
            assert torch.equal(loss, right) and all(map(torch.equal, grads, right_grads))


def test_steps_in_many_threads_and_streams_are_right():
    problems = [make_inputs((300 + 17 * k, 64, 1021), device="cuda", dtype=torch.bfloat16) for k in range(4)]
    expected = [forward_and_backward(inputs) for inputs in problems]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(k: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                loss, grads = forward_and_backward(problems[k])
                stream.synchronize()
                right, right_grads = expected[k]
                if not (torch.equal(loss, right) and all(map(torch.equal, grads, right_grads))):
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_repeated_steps_are_right_while_another_thread_changes_the_workspace(reduction):
    inputs = make_inputs((2000, 64, 8003), device="cuda", dtype=torch.bfloat16)
    exact = run_reference(inputs, reduction=reduction)
    done = threading.Event()

    def change() -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            with flce_ops.workspace((1, 4, 16, 64)[turn % 4] * MiB):
                done.wait(1e-3)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(60):
            loss, grads = forward_and_backward(inputs, reduction=reduction)
            assert error(loss, exact["loss"]) < 5e-6
            for name, found in zip(inputs.leaves, grads):
                assert error(found, exact[name]) < 8e-3, name
    finally:
        done.set()
        thread.join()
    assert flce_ops.get_workspace() == 512 * MiB
