"""On a GPU: steps of many threads and streams, and a workspace that another thread changes between repeated steps."""

# N tokens, D hidden, V vocabulary

import threading

import pytest
import torch
from inputs import make_inputs
from marks import ON_CUDA
from reference_loss import error, run_reference
from test_cuda_contract import forward_and_backward

import flce_ops

pytestmark = ON_CUDA

MiB = 2**20


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
