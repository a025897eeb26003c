"""The logits kernel's rescue on a GPU, where programs run at once; test_triton_interpreter.py has its numbers."""

import pytest
from fresh_process import run_fresh
from marks import ON_CUDA

pytestmark = ON_CUDA

# All rows overflow in the last tiles of the vocabulary. So some programs store in the guard while the others have just
# walked their tiles and read it. One step of 500 in which the threads of a program disagree loses the device.
LATE = """
import math, sys, torch
from flce_ops.math.options import LogitOptions
from flce_ops.triton.gemm.epilogues import ExpSum
from flce_ops.triton.gemm.logits_gemm import launch_logits_gemm
from flce_ops.triton.rows.valid_tokens import ValidTokens

tokens, hidden, classes, raised_at = 2048, int(sys.argv[1]), 32000, 64.0
x = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
w = torch.zeros(classes, hidden, device="cuda", dtype=torch.bfloat16)
x[:, 0], w[:, 0], w[-1, 0] = 1.0, -9.0, raised_at
order = torch.arange(tokens, device="cuda", dtype=torch.int32)
rows = ValidTokens(order, torch.full((), tokens, device="cuda", dtype=torch.int32), 0)
reference = torch.zeros(tokens, device="cuda")
wrong = torch.zeros((), device="cuda", dtype=torch.int64)
for step in range(500):
    guard, raised = torch.zeros((), device="cuda", dtype=torch.int32), reference.clone()
    epilogue = ExpSum(reference, None, None, guard=guard, raised=raised)
    launch_logits_gemm(x, w, None, epilogue, LogitOptions(), rows)
    wrong += ((raised - raised_at / math.log(2.0)).abs() > 1e-4).sum() + (guard != 1)
print(wrong.item())
"""


@pytest.mark.parametrize("hidden", [64, 63])  # with tensor maps, and by pointers
def test_all_threads_of_a_program_walk_a_second_time_or_none(hidden):
    assert run_fresh(LATE, str(hidden)).split() == ["0"]
