"""The logits kernel's rescue on a GPU, where programs run at once; test_triton_interpreter.py has its numbers."""

import pytest
from fresh_process import run_fresh
from marks import ON_CUDA

pytestmark = ON_CUDA

# All programs end together, and in the last tiles of some all rows overflow. So these store in the guard while the
# others read it. If the threads of a program disagree, the kernel does not end, or the device is lost.
AT_ONCE = """
import math, signal, sys, torch
from flce_ops.math.options import LogitOptions
from flce_ops.triton.gemm.epilogues import ExpSum
from flce_ops.triton.gemm.logits_gemm import launch_logits_gemm
from flce_ops.triton.gemm.tiles import multiprocessors, tiles_for
from flce_ops.triton.rows.valid_tokens import ValidTokens

hidden, tokens, largest = int(sys.argv[1]), 2048, 64.0
order = torch.arange(tokens, device="cuda", dtype=torch.int32)
x = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
tiles, programs = tiles_for(x), multiprocessors(x)
classes = tiles.block_n * programs // math.gcd(tokens // tiles.block_m, programs)  # as many tiles for each program
w = torch.zeros(classes, hidden, device="cuda", dtype=torch.bfloat16)
x[:, 0], w[:, 0], w[-1, 0] = 1.0, -9.0, largest
rows = ValidTokens(order, torch.full((), tokens, device="cuda", dtype=torch.int32), 0)
reference, wrong = torch.zeros(tokens, device="cuda"), torch.zeros((), device="cuda", dtype=torch.int64)
for step in range(2001):
    guard, raised = torch.zeros((), device="cuda", dtype=torch.int32), reference.clone()
    launch_logits_gemm(
        x, w, None, ExpSum(reference, None, None, guard=guard, raised=raised), LogitOptions(), rows
    )
    wrong += ((raised - largest / math.log(2.0)).abs() > 1e-4).sum() + (guard != 1)
    if step == 0:
        torch.cuda.synchronize()
        signal.alarm(200)  # the kernel is compiled; the rest takes a second
print(wrong.item())
"""


@pytest.mark.parametrize("hidden", [64, 63])  # with tensor maps, and by pointers
def test_all_threads_of_a_program_walk_a_second_time_or_none(hidden):
    assert run_fresh(AT_ONCE, str(hidden)).split() == ["0"]
