"""Kernels that run an objective's functions compile for a GPU that is not there. The interpreter is less strict."""

import pytest
from fresh_process import run_script

pytest.importorskip("triton")

SPECIALIZED = """
import importlib, os, pkgutil
os.environ["TRITON_INTERPRET"] = "0"
import triton
import flce_ops.triton
from flce_ops.triton.kernel import VARIES_WITH_TOKENS

kernels = set()
for module in pkgutil.walk_packages(flce_ops.triton.__path__, "flce_ops.triton."):
    found = vars(importlib.import_module(module.name)).items()
    kernels |= {kernel for name, kernel in found if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction)}
assert len(kernels) > 25, len(kernels)
for kernel in kernels:
    for parameter in kernel.params:
        assert parameter.is_constexpr or parameter.do_not_specialize == (parameter.name in VARIES_WITH_TOKENS), (
            kernel.__name__, parameter.name
        )
"""


def test_no_kernel_is_compiled_again_because_the_number_of_tokens_is_one_or_a_multiple_of_16():
    done = run_script(SPECIALIZED)
    assert done.returncode == 0, done.stderr


COMPILED = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import torch
import triton
from triton.backends.compiler import GPUTarget

class Hopper:
    launcher_cls = lambda *args, **options: None
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *args: 0

triton.runtime.driver.set_active(Hopper())
from flce_ops.triton.given_logits import cross_entropy
from flce_ops.triton.divergence import kl_div
from flce_ops.triton.steps import forward, with_grad

OF_ROWS = "finish_rows_kernel", "finish_forward_kernel", "row_statistics_kernel"
KERNELS = *OF_ROWS, "divergence_kernel", "finish_divergence_kernel", "rows_kernel"
compiled = []

def compile_only(kernel, grid):
    def launch(*args, **options):
        if kernel.__name__ in KERNELS:
            assert "cubin" in kernel.warmup(*args, grid=grid, **options).asm
            compiled.append(kernel.__name__)
    return launch

triton.runtime.jit.JITFunction.__getitem__ = compile_only
for launcher in (with_grad, forward, cross_entropy):
    launcher.assert_in_range = lambda *args: None
torch.set_default_device("meta")
tokens, hidden, vocab, slots = 256, 64, 1000, 5
input, weight = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (tokens, vocab))
target, targets = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, slots, dtype=torch.int64)
per_token, per_target, per_class, number = (torch.empty(s) for s in ((tokens,), (tokens, slots), (vocab,), ()))
every = {"output_mask": [True, True, True]}

def one_pass(target=target, class_weight=None, **options):
    with_grad.launch_with_grad(input, weight, target, None, class_weight, None, None, **every, **options)

one_pass()
one_pass(class_weight=per_class, label_smoothing=0.1, z_loss=number)
one_pass(targets, target_weight=per_target)
shard = {"group": "", "ranks": 1, "vocab_start": 0, "vocab_size": vocab}
with_grad.launch_vocab_parallel_with_grad(input, weight, target, None, None, per_token, **shard, **every)
policy = (input, weight, target, None, per_token, per_token, per_token, None, None)
clip = {"clip_low": number, "clip_high": number, **every}
for objective, beta, kl_estimator in (("ppo", number, "k1"), ("cispo", number, "k2"), ("ppo", None, "k3")):
    options = {"dual_clip": number if objective == "ppo" else None, "beta": beta, "kl_estimator": kl_estimator}
    with_grad.launch_policy_with_grad(*policy, objective=objective, **options, **clip)
assert compiled == ["finish_rows_kernel"] * 7, compiled
compiled.clear()
one_pass(lse=True, entropy=True, log_sum_sq_probs=True)
forward.launch_forward(input, weight, target, None, expected_log_prob=True, log_sum_sq_probs=True)
of_rows = ["row_statistics_kernel", "finish_forward_kernel", "row_statistics_kernel"]
assert compiled == ["finish_rows_kernel", *of_rows], compiled
compiled.clear()
for kind, beta in (("forward", None), ("reverse", None), ("jsd", number), ("tv", None), ("nla", None)):
    models = (input, weight, None, input, weight, None, None, None)
    kl_div.launch_kl_div_with_grad(*models, per_token, kind=kind, beta=beta, **every)
assert compiled.count("divergence_kernel") == 9 and compiled.count("finish_divergence_kernel") == 5, compiled
logits = torch.empty(tokens, vocab, dtype=torch.bfloat16)
cross_entropy.launch_with_grad(logits, target, None, None, None, label_smoothing=0.1, z_loss=number)
assert compiled[-1] == "rows_kernel"
"""


def test_kernels_of_objectives_compile_for_a_gpu():
    done = run_script(COMPILED)
    assert done.returncode == 0, done.stderr


GRIDS = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "0"
import torch
import triton

grids = []

def look(kernel, grid):
    return lambda *args, **options: grids.append((kernel.__name__, [*grid, 1, 1][:3]))

triton.runtime.jit.JITFunction.__getitem__ = look
from flce_ops.triton.divergence import kl_div
from flce_ops.triton.given_logits import cross_entropy
from flce_ops.triton.steps import backward, forward, with_grad

for launcher in (with_grad, forward, cross_entropy):
    launcher.assert_in_range = lambda *args: None
torch.set_default_device("meta")
tokens, hidden, vocab = 2**21 + 5, 64, 150
input, weight = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (tokens, vocab))
target, per_token = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
every = {"output_mask": [True, True, False]}

def loss(**options):
    with_grad.launch_with_grad(input, weight, target, None, None, None, None, **every, **options)

def rows():
    found = forward.launch_forward(input, weight, target, None, expected_log_prob=True)
    known = {"lse_rest": found[8], "expected_log_prob": found[3], "grad_expected_log_prob": per_token}
    backward.launch_backward(per_token, per_token, None, input, weight, target, None, None, found[1], **known, **every)

def divergence():
    models = (input, weight, None, input, weight, None, None, None)
    kl_div.launch_kl_div_with_grad(*models, per_token, kind="reverse", **every)

def logits():
    cross_entropy.launch_with_grad(torch.empty(tokens, vocab, dtype=torch.bfloat16), target, None, None, None)

def sparse():
    loss(gradient_threshold=0.02, gradient_mode="unbiased", gradient_seed=torch.empty((), dtype=torch.int64))

for call in (loss, rows, divergence, logits, sparse):
    before = len(grids)
    call()
    print(call.__name__, len(grids) - before)
print(json.dumps([found for found in grids if max(found[1][1:]) > 65535]))
"""


def test_only_the_first_dimension_of_a_grid_grows_with_the_tokens():
    """CUDA has room for 65,535 programs in the others."""
    done = run_script(GRIDS)
    assert done.returncode == 0, done.stderr
    *launches, too_large = done.stdout.splitlines()
    assert len(launches) == 5 and all(int(line.split()[1]) > 1 for line in launches), launches
    assert too_large == "[]"
