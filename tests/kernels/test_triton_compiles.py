"""The kernels compile for GPUs that are not there: the interpreter is less strict. No kernel is launched."""

import json

import pytest
from fresh_process import run_fresh

pytest.importorskip("triton")

SPECIALIZED = """
import importlib, os, pkgutil
os.environ["TRITON_INTERPRET"] = "0"
import triton
import flce_ops.triton
from flce_ops.triton.kernel import VARIES_WITH_TOKENS, Kernel

kernels = set()
for module in pkgutil.walk_packages(flce_ops.triton.__path__, "flce_ops.triton."):
    for name, member in vars(importlib.import_module(module.name)).items():
        # no kernel is launched past Kernel's options
        assert not (isinstance(member, triton.JITFunction) and name.endswith("_kernel")), name
        kernels |= {member.jit} if isinstance(member, Kernel) else set()
assert len(kernels) > 25, len(kernels)
for kernel in kernels:
    for parameter in kernel.params:
        assert parameter.is_constexpr or parameter.do_not_specialize == (parameter.name in VARIES_WITH_TOKENS), (
            kernel.__name__, parameter.name
        )
"""


def test_no_kernel_is_compiled_again_because_the_number_of_tokens_is_one_or_a_multiple_of_16():
    run_fresh(SPECIALIZED)


# operands without memory, and every way to launch; `look(kernel, grid, arguments, options)` stands for a launch
ON_META = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "0"
import torch
import triton
from triton.backends.compiler import GPUTarget
from flce_ops import token_loss
from flce_ops.support import Chip
from flce_ops.triton.logits import kl_div
from flce_ops.triton.gemm import tiles
from flce_ops.triton.logits import cross_entropy
from flce_ops.triton.kernel import OPTIONS, Kernel
from flce_ops.triton.steps import backward, forward, with_grad

card, tokens, hidden, vocab = map(int, sys.argv[1:5])

class Card:
    launcher_cls = lambda *args, **options: None
    get_current_target = lambda self: GPUTarget("cuda", card, 32)
    get_current_device = get_current_stream = lambda self, *args: 0

triton.runtime.driver.set_active(Card())
tiles.chip_of = lambda of: Chip(card, 132)
Kernel.__getitem__ = lambda kernel, grid: lambda *args, **options: look(kernel, grid, args, OPTIONS | options)
for launcher in (with_grad, forward, cross_entropy):
    launcher.assert_in_range = lambda *args: None
torch.set_default_device("meta")
input, weight = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (tokens, vocab))
logits_made = torch.empty(tokens, vocab, dtype=torch.bfloat16)
target, targets = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, 5, dtype=torch.int64)
per_token, per_target, per_class, number = (torch.empty(s) for s in ((tokens,), (tokens, 5), (vocab,), ()))
every = {"output_mask": [True, True, True]}

def loss(target=target, class_weight=None, **options):
    with_grad.launch_with_grad(input, weight, target, None, class_weight, None, None, **every, **options)

def shard():
    of_rank = {"group": "", "ranks": 1, "vocab_start": 0, "vocab_size": vocab}
    with_grad.launch_with_grad(input, weight, target, None, None, per_token, **of_rank, **every)

token_loss(lambda lp, a, *, lse: -a * lp * lse, name="of.lse")
token_loss(lambda lp, q, kind, flag: -(q * lp).sum() * flag / (1 + kind), name="of.classes")
kind, flag = torch.empty(tokens, dtype=torch.int32), torch.empty(tokens, dtype=torch.bool)

def token(function, *tensors, target=target):
    named = {"function": function, "tensors": list(tensors)}
    with_grad.launch_with_grad(input, weight, target, None, None, None, **named, **every)

def rows(**options):
    options = {"expected_log_prob": True, **options}
    found = forward.launch_forward(input, weight, target, None, **options)
    known = {"expected_log_prob": found[3], "grad_expected_log_prob": per_token}
    known["retained"] = found[8] if options.get("retain") else None
    backward.launch_backward(per_token, per_token, None, input, weight, target, None, None, found[1], **known, **every)

def divergence(kind="reverse", beta=None, **options):
    models = (input, weight, None, input, weight, None, None, None)
    kl_div.launch_kl_div_with_grad(*models, per_token, kind=kind, beta=beta, **every, **options)

def known_divergence():
    models, pair = (input, weight, None, input, weight, None, None, None), torch.empty(tokens, 2)
    kl_div.launch_kl_div_backward(per_token, *models, pair, pair, per_token, kind="reverse", **every)

def learnt(columns):
    given = torch.empty(hidden, tokens, dtype=torch.bfloat16).T if columns else input
    found = {"logit_scale": number, "scale_gradient": True}
    pair = torch.empty(tokens, 2)
    backward.launch_backward(per_token, per_token, None, given, weight, target, None, None, pair, **found, **every)
    with_grad.launch_with_grad(given, weight, target, None, None, None, None, None, **found, **every)

def logits():
    options = {"label_smoothing": 0.1, "z_loss": number, **every}
    cross_entropy.launch_with_grad(logits_made, None, target, None, None, None, **options)

def sparse():
    loss(gradient_threshold=0.02, gradient_mode="unbiased", gradient_seed=torch.empty((), dtype=torch.int64))
"""


OBJECTIVES = """
OF_TOKENS = "finish_rows_kernel", "token_numbers_kernel", "in_order_kernel"
KERNELS = *OF_TOKENS, "row_numbers_kernel", "stored_tiles_kernel", "finish_divergence_kernel", "rows_kernel"
compiled = []

def look(kernel, grid, args, options):
    if kernel.__name__ in KERNELS:
        assert "cubin" in kernel.jit.warmup(*args, grid=grid, **options).asm
        compiled.append(kernel.__name__)

loss()
loss(class_weight=per_class, label_smoothing=0.1, z_loss=number)
loss(targets, target_weight=per_target)
shard()
assert compiled == ["finish_rows_kernel"] * 4, compiled
compiled.clear()
of_tokens = ["token_numbers_kernel", "finish_rows_kernel"]
token("flce_ops.ppo.old", per_token, per_token, number, number, number)
token("of.lse", per_token)
token("of.classes", per_target, kind, flag, target=targets)
in_order = "in_order_kernel"
assert compiled == [in_order, in_order, *of_tokens, in_order, *of_tokens, *[in_order] * 3, *of_tokens], compiled
compiled.clear()
loss(lse=True, entropy=True, log_sum_sq_probs=True)
forward.launch_forward(input, weight, target, None, expected_log_prob=True, log_sum_sq_probs=True)
assert compiled == ["finish_rows_kernel", "row_numbers_kernel", "row_numbers_kernel"], compiled
compiled.clear()
for kind, beta in (("forward", None), ("reverse", None), ("jsd", number), ("tv", None), ("nla", None)):
    divergence(kind, beta)
assert compiled.count("stored_tiles_kernel") == 9 and compiled.count("finish_divergence_kernel") == 5, compiled
compiled.clear()
divergence("forward", softcap=number)
known_divergence()
rows(retain=tokens)
assert compiled.count("stored_tiles_kernel") == 3, compiled
logits()
assert compiled[-1] == "rows_kernel"
KERNELS = "input_gradient_kernel", "finish_product_kernel"
compiled.clear()
learnt(columns=False)
learnt(columns=True)
assert len(compiled) == 8, compiled
"""


def test_kernels_of_objectives_compile_for_a_gpu():
    run_fresh(ON_META + OBJECTIVES, "90", "256", "64", "1000")


GUARD = """
import re
from flce_ops.support.workspace import set_workspace

by_tensor_maps, read_once = hidden % 16 == 0, []
if not by_tensor_maps:
    set_workspace(1 << 15)  # without room for operands of padded features

def look(kernel, grid, args, options):
    if kernel.__name__ == "logits_gemm_kernel" and options["RAISES"]:
        ptx = kernel.jit.warmup(*args, grid=grid, **options).asm["ptx"]
        after = ptx[re.search(r"atom[.]global.*max[.]s32", ptx).end():]
        steps = re.findall(r"st[.]shared|bar[.]sync|ld[.]shared|bra ", after)
        read_once.append(steps[:3] == ["st.shared", "bar.sync", "ld.shared"])
        assert "volatile" not in ptx and ("cp.async.bulk.tensor" in ptx) == by_tensor_maps

loss()
loss(class_weight=per_class, label_smoothing=0.1)
assert read_once == [True, True], read_once
"""


@pytest.mark.parametrize("hidden", [64, 63])  # with tensor maps, and by pointers
def test_the_guard_of_a_rescue_is_read_once_for_all_threads_of_a_program(hidden):
    """Triton does an atomic operation on a scalar in one thread, and all read its result in shared memory. A load would
    be one per thread, while other programs store.
    """
    run_fresh(ON_META + GUARD, "90", "256", str(hidden), "1000")


EVERY_KERNEL = """
from flce_ops.support.workspace import set_workspace

limit, found = int(sys.argv[5]), {}
if tokens < 1024:
    set_workspace(1 << 27)  # tiles for few rows

def look(kernel, grid, args, options):
    made = kernel.jit.warmup(*args, grid=grid, **options)
    found[kernel.__name__] = max(found.get(kernel.__name__, 0), made.metadata.shared)

loss()
loss(class_weight=per_class, label_smoothing=0.1)
rows()
rows(retain=tokens)
divergence()
logits()
sparse()
assert len(found) > 20, sorted(found)
print(json.dumps({name: shared for name, shared in found.items() if shared > limit}))
"""
KIB = 1 << 10


@pytest.mark.exhaustive
# bytes of shared memory that a block may have: A100, H100 and H200, B200, RTX 5090; an RTX 4090 has as few as that
@pytest.mark.parametrize(("card", "limit"), [(80, 163 * KIB), (90, 227 * KIB), (100, 227 * KIB), (120, 99 * KIB)])
@pytest.mark.parametrize("tokens, hidden", [("8192", "512"), ("8192", "640"), ("512", "896")])  # tiles of all shapes
def test_every_kernel_compiles_for_the_card_and_fits_its_shared_memory(card, limit, tokens, hidden):
    assert json.loads(run_fresh(ON_META + EVERY_KERNEL, str(card), tokens, hidden, "32003", str(limit))) == {}
