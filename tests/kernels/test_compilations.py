"""Triton compiles the kernels of a head once for every number of tokens."""

import pytest
from fresh_process import run_script

pytest.importorskip("triton")

IN_TURN = """
import os, pathlib, sys, tempfile
os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp()
import torch, flce_ops

weight = torch.randn(8000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

def kernels():
    return len(list(pathlib.Path(folder).rglob("*.cubin")))

def step(tokens):
    hidden = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(8000, (tokens,), device="cuda")
    if sys.argv[1] == "loss":
        flce_ops.linear_cross_entropy(hidden, weight, target).backward()
    else:
        found = flce_ops.linear_log_probs(hidden, weight, target, entropy=True)
        (found.log_probs.sum() + found.entropy.sum()).backward()
    torch.cuda.synchronize()

step(512)
first = kernels()
for tokens in (2048, 2047, 1000, 128, 100, 17, 1, 20000):
    step(tokens)
print(first, kernels())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["loss", "log_probs"])
def test_steps_of_any_number_of_tokens_compile_nothing_after_the_first(what):
    done = run_script(IN_TURN, what)
    assert done.returncode == 0, done.stderr
    first, in_the_end = map(int, done.stdout.split())
    assert 0 < first == in_the_end
