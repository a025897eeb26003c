"""The first call of a head compiles the kernels that any number of tokens launches, in parallel and once.

Runs without a GPU: Triton compiles for a GPU that is not there. Tests that only count compilations compile nothing.
"""

import gc
import json
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fresh_process import run_fresh

import flce_ops

pytest.importorskip("triton")

from flce_ops.triton import first_call

# A driver of an H200 that is not there; calls on the CPU that are caught where a GPU would run them.
WITHOUT_GPU = """
import json, os, sys
os.environ.pop("TRITON_INTERPRET", None)
from contextlib import nullcontext
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
import flce_ops
from flce_ops import meta
from flce_ops.ops import paths
from flce_ops.ops.paths import facts_of
from flce_ops.ops import OPERATORS
from flce_ops.support.path import choose
from flce_ops.triton import first_call, kernel

class H200:
    launcher_cls = lambda self, *args: None
    utils = SimpleNamespace(
        load_binary=lambda *args: (object(), object(), 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *args: 0

triton.runtime.driver.set_active(H200())
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda device: nullcontext()
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
device, calls = torch.device("cuda", 0), []

def catch(name):
    def run(*args, **kwargs):
        call = OPERATORS[name].arguments.bind(*args, **kwargs)
        path = paths.choice_of(name, facts_of(call)._replace(device="cuda")).path
        assert path.name == "triton", name
        calls.append((paths.function(path.kernel).__wrapped__, call))
        return meta.outputs(call)
    return run

library = torch.library.Library("flce", "IMPL")
for name in OPERATORS:
    library.impl(name, catch(name), "CPU")

def bf16(*shape, trained=True):
    return torch.empty(shape, dtype=torch.bfloat16).requires_grad_(trained)

def step(function, hidden, vocab, options, tokens=16):
    x, weight, target = bf16(tokens, hidden), bf16(vocab, hidden), torch.zeros(tokens, dtype=torch.int64)
    if options.get("linear_bias"):
        options = options | {"linear_bias": bf16(vocab)}
    operands = {
        "cross_entropy": lambda: (bf16(tokens, vocab), target),
        "linear_kl_div": lambda: (x, weight, bf16(tokens, hidden, trained=False), weight.detach()),
        "linear_policy_loss": lambda: (x, weight, target, torch.empty(tokens), torch.empty(tokens)),
    }.get(function, lambda: (x, weight, target))()
    found = getattr(flce_ops, function)(*operands, **options)
    results = found if isinstance(found, tuple) else (found,)
    wanted = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    torch.autograd.backward(wanted, [torch.empty_like(result) for result in wanted])
"""

COUNT = (
    WITHOUT_GPU
    + """
import random
asked, grids = set(), []

def note(key, fn, compile, **_):
    assert compile["enable_fp_fusion"] is True
    asked.add((fn.name, str(key)))
    return True  # nothing is compiled

triton.knobs.runtime.jit_cache_hook = note
launch_kernel = kernel.Kernel.__getitem__

def note_grid(self, grid):
    grids.append((self.__name__, list(grid)))
    return launch_kernel(self, grid)

kernel.Kernel.__getitem__ = note_grid
random.seed(0)
numbers = [2048, 2047, 2046, 1000, 128, 100, 17, 1, 20000, *(random.randint(1, 20000) for _ in range(15)), 150001]
arguments = json.loads(sys.argv[1])
if arguments[2] <= 50257 and arguments[4] == "auto":
    numbers.append(2**21 + 5)  # a grid of so many rows
flce_ops.set_workspace(arguments.pop())
step(*arguments)
found = []
for launch, call in calls:
    asked.clear()
    grids.clear()
    first_call.compile_kernels(launch, call, device)
    ahead = set(asked)
    for tokens in numbers:
        launch(first_call.on_meta(call, tokens))
    too_large = [grid for grid in grids if max(grid[1][1:], default=0) > 65535]
    new = sorted(name for name, _ in asked - ahead)
    found.append([call.op, len(ahead), len({name for name, _ in ahead}), new, too_large])
print(json.dumps(found))
"""
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
@pytest.mark.parametrize(
    ("function", "hidden", "vocab", "options"),
    [
        ("linear_cross_entropy", 512, 32000, {}),
        ("linear_cross_entropy", 512, 32000, {"workspace": 16 << 20}),  # few rows a chunk
        ("linear_cross_entropy", 4096, 128256, {"linear_bias": True}),
        pytest.param("linear_cross_entropy", 1024, 50257, {"z_loss": 1e-4}, marks=pytest.mark.exhaustive),  # V is odd
        ("linear_cross_entropy", 512, 50257, {"gradient_threshold": 0.02, "gradient_mode": "drop"}),
        ("linear_log_probs", 512, 32000, {"entropy": True}),
        pytest.param("linear_log_probs", 4096, 128256, {"entropy": True}, marks=pytest.mark.exhaustive),
        ("linear_policy_loss", 2048, 151936, {"clip_high": 0.3}),
        ("linear_kl_div", 1024, 32000, {"kind": "reverse"}),
        ("linear_cross_entropy", 512, 32000, {"return_metrics": ["entropy", "argmax"], "softcap": 30.0}),
        ("linear_cross_entropy", 512, 32000, {"reduction": "none", "z_loss": 1e-4}),
        ("cross_entropy", 1, 32000, {}),
    ],
)
def test_no_number_of_tokens_needs_a_kernel_that_the_first_call_did_not_compile(function, hidden, vocab, options):
    """Nor has it a grid that grows in another dimension than the first: CUDA has room for 65,535 programs there."""
    workspace = options.get("workspace", "auto")
    options = {name: value for name, value in options.items() if name != "workspace"}
    found = json.loads(run_fresh(COUNT, json.dumps([function, hidden, vocab, options, workspace])))
    assert found
    for op, compiled, kernels, new, too_large in found:
        assert not new and not too_large, op
        assert 0 < kernels <= compiled <= 2 * kernels, op  # few variants: of first and last chunks, and of large logits


COMPILE = (
    WITHOUT_GPU
    + """
import pathlib, tempfile, threading
os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp()
threads, launched = set(), []
load = H200.utils.load_binary

def load_and_note(*args):
    threads.add(threading.get_ident())
    return load(*args)

H200.utils.load_binary = load_and_note
H200.launcher_cls = lambda self, *args: lambda *launch: launched.append(launch)
os.cpu_count = lambda: 2
step("cross_entropy", 1, 1000, {})
((launch, call),) = calls
first_call.compile_kernels(launch, call, device)
kernels = len(list(pathlib.Path(folder).rglob("*.cubin")))
before, loads = len(launched), len(threads)

def refuse(**_):
    raise AssertionError("compiled at its launch")

triton.knobs.runtime.jit_cache_hook = refuse
launch(first_call.on_meta(call, 16))
print(json.dumps([kernels, before, loads, threading.get_ident() in threads, len(launched)]))
"""
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_kernels_are_compiled_and_loaded_in_threads_and_then_launched():
    kernels, launched_before, threads, in_this_thread, launched = json.loads(run_fresh(COMPILE))
    assert kernels >= 3 and launched_before == 0 and threads > 1 and not in_this_thread and launched >= 3


FAIL_ONCE = (
    WITHOUT_GPU
    + """
import logging, tempfile
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
H200.launcher_cls = lambda self, *args: lambda *launch: None
said, failures = [], []
logging.getLogger("flce_ops").addHandler(SimpleNamespace(level=0, handle=lambda record: said.append(record.msg)))
step("cross_entropy", 1, 1000, {})
((launch, call),) = calls
compile = triton.compile
first = triton.compiler.compile

def full_disk(*args, **options):
    if not failures:
        failures.append(1)
        raise OSError("No space left on device")
    return first(*args, **options)

triton.compiler.compile = full_disk
first_call.compile_kernels(launch, call, device)
launch(first_call.on_meta(call, 16))
print(json.dumps([len(failures), sum("compiled again" in message for message in said)]))
"""
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_a_kernel_whose_compilation_failed_once_is_compiled_again_and_runs():
    assert json.loads(run_fresh(FAIL_ONCE)) == [1, 1]


class OnGpu:
    """A call whose operands say that they are on a GPU."""

    op, operands = "linear_cross_entropy_forward", (SimpleNamespace(device=torch.device("cuda", 0)),)

    def __init__(self, kind: str) -> None:
        self.kind = kind


@pytest.fixture
def compiled(monkeypatch):
    """Kinds of calls whose kernels were compiled."""
    found = []
    monkeypatch.setattr(first_call, "kind_of", lambda call: (call.kind,))
    monkeypatch.setattr(first_call, "_compiled", set())
    monkeypatch.setattr(first_call, "compile_kernels", lambda launch, call, device: found.append(call.kind))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_each_kind_of_call_compiles_once(compiled):
    run = first_call.compiled_first(lambda call: call.kind)
    assert [run(OnGpu(kind)) for kind in "aabab"] == list("aabab")
    assert compiled == ["a", "b"]


def test_nothing_is_compiled_while_a_graph_is_captured(compiled, monkeypatch):
    run = first_call.compiled_first(lambda call: call.kind)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert run(OnGpu("a")) == "a" and not compiled
    assert run(OnGpu("a")) == "a" and compiled == ["a"]


def test_a_call_goes_on_where_compiling_its_kernels_first_fails(compiled, monkeypatch, caplog):
    def fail(launch, call, device):
        raise OSError("no space left")

    monkeypatch.setattr(first_call, "compile_kernels", fail)
    assert first_call.compiled_first(lambda call: call.kind)(OnGpu("a")) == "a"
    assert "linear_cross_entropy_forward: its kernels are compiled one by one: OSError('no space left')" in caplog.text


def test_launches_launch_again_after_a_first_call_that_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(first_call, "on_meta", lambda call, tokens: 1 / 0)
    call = SimpleNamespace(operands=(torch.empty(3, 2),))
    with pytest.raises(ZeroDivisionError):
        first_call.compile_kernels(lambda call: None, call, torch.device("cuda", 0))
    assert not first_call.launches.only_compile


def test_a_first_call_keeps_none_of_its_tensors():
    """A reference cycle would keep the graph, and its nodes on the default stream: no CUDA graph captures beside it."""
    from flce_ops.meta.arguments import WithGrad

    operands = torch.randn(8, 16), torch.randn(31, 16), torch.zeros(8, dtype=torch.int64)
    kept = weakref.ref(operands[0])
    gc.collect()
    gc.disable()
    try:
        call = WithGrad.bind(*operands, None, None, None, output_mask=[True, True, False])
        made = first_call.on_meta(call, 3)
        assert made.operands.input.shape == (3, 16) and made.operands.input.is_meta
        del call, operands
        assert kept() is None
    finally:
        gc.enable()


def test_calls_of_one_head_differ_in_no_more_than_tokens():
    from flce_ops.meta.arguments import WithGrad

    def kind(tokens, hidden=16, **options):
        operands = torch.randn(tokens, hidden), torch.randn(31, hidden), torch.zeros(tokens, dtype=torch.int64)
        return first_call.kind_of(
            WithGrad.bind(*operands, None, None, None, output_mask=[True, True, False], **options)
        )

    assert kind(7) == kind(31) == kind(16)
    assert kind(7, label_smoothing=0.1) == kind(7, label_smoothing=0.2) != kind(7)
    different = [kind(7), kind(7, hidden=32), kind(7, softcap=torch.tensor(30.0)), kind(7, entropy=True)]
    with flce_ops.workspace(1 << 20):
        different.append(kind(7))
    assert len(set(different)) == len(different)


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
    first, in_the_end = map(int, run_fresh(IN_TURN, what).split())
    assert 0 < first == in_the_end
