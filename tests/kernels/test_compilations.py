"""Triton compiles the kernels of a head once for every number of tokens, and compiles them before the first launch.

Runs without a GPU: the kernels are compiled for a GPU that is not there. Tests that only count compilations compile
nothing.
"""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from fresh_process import run_script

import flce_ops

pytest.importorskip("triton")

# counts cached kernels by Triton's own key
COUNT = """
import json, os, random, sys
os.environ.pop("TRITON_INTERPRET", None)
import torch, flce_ops
from flce_ops.triton.launch import ahead
from triton.runtime.jit import JITFunction

HEAVY = "sympy", "torch._dynamo", "torch._inductor"
heavy, trace = set(), ahead.trace

def trace_and_look(launch, call):
    before = set(sys.modules)
    trace(launch, call)
    heavy.update(set(HEAVY) & (set(sys.modules) - before))

ahead.trace = trace_and_look

compiled = []

def compile_nothing(self, key, signature, device, *rest, **options):
    compiled.append(self.__name__)
    self.device_caches[device][0][key] = compile_nothing
    return compile_nothing

JITFunction._do_compile = compile_nothing
function, hidden, vocab, workspace, options = json.loads(sys.argv[1])
random.seed(0)
some = ahead.TOKENS
others = [2048, 2047, 2046, 1000, 128, 100, 17, 1, 20000, *(random.randint(1, 20000) for _ in range(60)), 150001]
counts = []
with flce_ops.workspace(workspace):
    for ahead.TOKENS, ahead.ENOUGH_LAUNCHES in ((some, ahead.ENOUGH_LAUNCHES), (others, 1 << 30)):
        flce_ops.warmup(hidden, vocab, function=getattr(flce_ops, function), arch=90, **options)
        counts.append(len(compiled))
print(json.dumps([counts, len(set(compiled)), compiled[counts[0]:], list(heavy)]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="arch is that of the GPU")
@pytest.mark.parametrize(
    ("function", "hidden", "vocab", "workspace", "options"),
    [
        ("linear_cross_entropy", 512, 32000, None, {}),
        ("linear_cross_entropy", 4096, 128256, None, {"bias": True}),
        # V is odd; logits are recomputed
        pytest.param(
            *("linear_cross_entropy", 1024, 50257, 64 << 20, {"label_smoothing": 0.1}), marks=pytest.mark.exhaustive
        ),
        ("linear_cross_entropy", 512, 50257, None, {"gradient_threshold": 0.02}),
        ("linear_log_probs", 512, 32000, None, {"entropy": True}),
        ("linear_log_probs", 4096, 128256, None, {"entropy": True}),
        ("linear_policy_loss", 2048, 151936, None, {"clip_high": 0.3}),
        ("linear_kl_div", 1024, 32000, None, {"kind": "reverse"}),
        ("linear_cross_entropy", 516, 32000, None, {"return_metrics": ["entropy", "argmax"], "softcap": 30.0}),
        ("linear_cross_entropy", 512, 32000, None, {"reduction": "none", "z_loss": 1e-4}),
        ("cross_entropy", 1, 32000, None, {}),
    ],
)
def test_no_number_of_tokens_compiles_a_kernel_that_was_not_compiled_ahead(function, hidden, vocab, workspace, options):
    done = run_script(COUNT, json.dumps([function, hidden, vocab, workspace or flce_ops.get_workspace(), options]))
    assert done.returncode == 0, done.stderr
    (ahead, in_the_end), kernels, new, imported = json.loads(done.stdout)
    assert in_the_end == ahead, new
    assert not imported
    assert kernels <= ahead <= 2.1 * kernels  # few variants: the first chunk, the last one, and those of a rescue


GRIDS = """
import json, os, sys
os.environ.pop("TRITON_INTERPRET", None)
import torch
from triton.runtime.jit import JITFunction

grids, run = [], JITFunction.run

def look(self, *args, grid, **options):
    grids.append((self.__name__, list(grid)))
    return run(self, *args, grid=grid, **options)

JITFunction.run = look
JITFunction._do_compile = lambda self, key, signature, device, *rest, **options: None
import flce_ops
from flce_ops.triton.launch import ahead

function, options = json.loads(sys.argv[1])
ahead.TOKENS, ahead.ENOUGH_LAUNCHES = (2**21 + 5,), 1 << 30
flce_ops.warmup(64, 150, function=getattr(flce_ops, function), arch=90, **options)
print(json.dumps([len(grids), [found for found in grids if max(found[1][1:], default=0) > 65535]]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="arch is that of the GPU")
@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("linear_cross_entropy", {}),
        ("linear_cross_entropy", {"reduction": "none", "bias": True, "label_smoothing": 0.1}),
        ("linear_log_probs", {"entropy": True}),
        ("linear_kl_div", {"kind": "reverse"}),
        ("cross_entropy", {}),
    ],
)
def test_only_the_first_dimension_of_a_grid_grows_with_the_tokens(function, options):
    """CUDA has room for 65,535 programs in the others."""
    done = run_script(GRIDS, json.dumps([function, options]))
    assert done.returncode == 0, done.stderr
    launches, too_large = json.loads(done.stdout)
    assert launches and not too_large


COMPILE = """
import logging, os, pathlib, sys, tempfile
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp()
if sys.argv[1:]:
    os.environ["TRITON_STORE_BINARY_ONLY"] = sys.argv[1]
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import flce_ops
count = flce_ops.warmup(1, 1000, function=flce_ops.cross_entropy, arch=90)
assert len(list(pathlib.Path(folder).rglob("*.cubin"))) == count > 1
assert flce_ops.last_path() is None
print(len(list(pathlib.Path(folder).rglob("*.ptx"))), count, os.environ.get("TRITON_STORE_BINARY_ONLY"))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="arch is that of the GPU")
@pytest.mark.parametrize("asked", [(), ("0",)])
def test_kernels_are_compiled_into_tritons_cache_for_a_gpu_that_is_not_there(asked):
    """The cache holds their PTX only if the user asks for it."""
    done = run_script(COMPILE, *asked)
    assert done.returncode == 0, done.stderr
    line, counts = done.stdout.splitlines()
    assert "kernels of cross_entropy, 1 x 1000 in torch.bfloat16 compiled" in line
    texts, kernels, asked_now = counts.split()
    assert texts == (kernels if asked else "0") and asked_now == (asked[0] if asked else "None")


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_without_a_gpu_the_architecture_is_asked_for():
    with pytest.raises(ValueError, match="expected arch, as no GPU is visible"):
        flce_ops.warmup(64, 1000)


FAILING = """
import os, sys, tempfile
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
import flce_ops, triton
compile = triton.compiler.compile

def compile_but_one(source, **options):
    if source.name == "sum_losses_kernel":
        raise RuntimeError("no ptxas")
    return compile(source, **options)

triton.compiler.compile = compile_but_one
try:
    flce_ops.warmup(1, 1000, function=flce_ops.cross_entropy, arch=90)
except RuntimeError as error:
    print(error, "|", error.__cause__)
triton.compiler.compile = compile
rows = flce_ops.triton.rows
for function in rows.sum_losses.sum_losses_kernel, rows.valid_tokens.compact_tokens_kernel:
    function.compile = compile
    print(sum(kernel is not None for kernel in function.device_caches[-90][0].values()))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="arch is that of the GPU")
def test_a_kernel_that_does_not_compile_is_named_and_forgotten():
    done = run_script(FAILING)
    assert done.returncode == 0, done.stderr
    said, failed, others = done.stdout.splitlines()
    assert "Triton could not compile sum_losses_kernel | no ptxas" in said
    assert failed == "0" and int(others) > 0


class OnGpu:
    """A Triton path whose launches run in the interpreter, on tensors that pretend to be on a GPU."""

    def __init__(self, monkeypatch) -> None:
        from flce_ops.triton.launch import ahead, replay

        from flce_ops.ops import paths, registration
        from flce_ops.support.path import Choice
        from flce_ops.support.vendor import H200

        self.compiled, self.capturing, self.cached = [], False, None
        facts = paths.CallFacts("cuda", torch.float32)

        def choice_of(name, call):
            return Choice(name, paths.KERNELS[name], paths.KERNELS[name][0], facts)

        def compile_side_by_side(chip, what, trace, device):
            self.compiled.append(what)
            return self.compile(trace)

        class Done:
            get_file = staticmethod(lambda name: self.cached)
            put = staticmethod(lambda *_, **__: setattr(self, "marked", True))

        self.marked, self.compile = False, lambda trace: (1, [])
        monkeypatch.setattr(paths, "choice_of", choice_of)
        monkeypatch.setattr(replay, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(replay, "captured", lambda step, tensors: None)
        monkeypatch.setattr(replay, "_known", {})
        monkeypatch.setattr(ahead, "_heads", set())
        monkeypatch.setattr(ahead, "chip_of", lambda device: H200)
        monkeypatch.setattr(ahead, "compile_side_by_side", compile_side_by_side)
        monkeypatch.setattr("triton.runtime.cache.get_cache_manager", lambda key: Done)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.loss_and_gradients = registration.kernel("linear_cross_entropy_with_grad")

    def reset(self) -> None:
        from flce_ops.triton.launch import ahead, replay

        ahead._heads.clear()
        replay._known.clear()

    def step(self, tokens: int, hidden: int = 16) -> list[torch.Tensor]:
        torch.manual_seed(0)
        input, weight = torch.randn(tokens, hidden), torch.randn(33, hidden)
        target = torch.randint(33, (tokens,))
        return self.loss_and_gradients(input, weight, target, None, None, None, output_mask=[True, True, False])[:4]


@pytest.fixture
def gpu(monkeypatch):
    return OnGpu(monkeypatch)


def test_a_head_is_compiled_ahead_once_at_its_first_call(gpu):
    for tokens in (7, 7, 7, 1, 16, 130):
        gpu.step(tokens)
    assert gpu.compiled == ["linear_cross_entropy_with_grad"] and gpu.marked
    gpu.step(7, hidden=32)
    assert len(gpu.compiled) == 2


def test_a_head_whose_kernels_another_process_compiled_is_not_compiled_ahead(gpu, tmp_path, monkeypatch):
    """The hashes of their sources, which Triton's keys contain, come from that process, too."""
    from flce_ops.triton.launch import ahead

    known = []
    monkeypatch.setattr(ahead, "know_hashes", known.append)
    gpu.cached = tmp_path / "mark"
    gpu.cached.write_text('{"a kernel": "its hash"}')
    gpu.step(7)
    assert not gpu.compiled and not gpu.marked and known == [{"a kernel": "its hash"}]


def test_a_forward_whose_gradient_is_wanted_compiles_the_kernels_of_its_backward_too(gpu, monkeypatch):
    from flce_ops.triton.launch import ahead

    from flce_ops.support.vendor import H200, Compiling, compiling

    traced = []

    def trace(launch, call):
        traced.append(call.op)
        compiling.get().heads[ahead.head_of(call)] = 1

    def compile_traced(trace_all):
        compiling.set(Compiling(H200))
        trace_all()
        return len(traced), []

    def step(hidden):
        input, weight = (torch.randn(7, hidden).bfloat16().requires_grad_(), torch.randn(33, hidden).bfloat16())
        target_logit, lse, *_ = torch.ops.flce.linear_cross_entropy_forward(input, weight, torch.randint(33, (7,)))
        if lse.requires_grad:
            (lse - target_logit).sum().backward()

    monkeypatch.setattr(ahead, "trace", trace)
    gpu.compile = lambda trace_all: copy_context().run(compile_traced, trace_all)
    step(16)
    step(16)
    assert gpu.compiled == ["linear_cross_entropy_forward"]
    assert traced == ["linear_cross_entropy_forward", "linear_cross_entropy_backward"]
    with torch.no_grad():
        step(32)
    assert traced[2:] == ["linear_cross_entropy_forward"]


def test_a_derivative_that_is_not_implemented_is_not_a_failure(gpu, caplog, monkeypatch):
    from flce_ops.triton.launch import ahead

    from flce_ops.support.vendor import H200, Compiling, compiling

    def compile_traced(trace):
        compiling.set(Compiling(H200))
        trace()
        return 1, []

    monkeypatch.setattr(ahead, "trace", lambda launch, call: None)
    gpu.compile = lambda trace: copy_context().run(compile_traced, trace)
    input, weight = torch.randn(7, 16, requires_grad=True), torch.randn(33, 16)
    _, lse, _, expected, *_ = torch.ops.flce.linear_cross_entropy_forward(
        input, weight, torch.randint(33, (7,)), expected_log_prob=True
    )
    torch.autograd.grad((lse + expected).sum(), input, create_graph=True)
    assert "linear_cross_entropy_backward" in gpu.compiled and not caplog.records


def test_a_head_of_which_a_kernel_does_not_compile_is_not_marked_as_compiled(gpu, caplog):
    gpu.compile = lambda trace: (0, [("rows_kernel", ValueError("too large"))])
    gpu.step(7)
    assert gpu.compiled and not gpu.marked
    assert "rows_kernel is not compiled ahead: ValueError: too large" in caplog.text


def test_arithmetic_without_data_has_the_shapes_and_dtypes_of_torch():
    from flce_ops.triton.launch.ahead import WithoutData

    one, row = torch.empty(3, 4, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    half = torch.empty(3, 4, dtype=torch.float16, device="meta")
    calls = [
        lambda: row == 2,
        lambda: row != 2,
        lambda: row < row,
        lambda: ~(row == 2),
        lambda: torch.where(row == 2, one, 0.0),
        lambda: half * 2.0,
        lambda: one.amax(0),
        lambda: one.exp(),
    ]
    for call in calls:
        expected = call()
        with WithoutData():
            found = call()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.fixture
def traced():
    """Kernels that a trace asks for, by name. Each stands for a JITFunction, whose `compiled` are the names in turn."""
    compiled = []

    class Jitted:
        ASTSource = type("ASTSource", (), {"make_ir": lambda self: None})

        def __init__(self, name: str) -> None:
            self.__name__, self.device_caches = name, {0: ({},)}

        def compile(self) -> object:
            compiled.append(self.__name__)
            self.device_caches[0][0]["key"] = self
            return self

    return Jitted, compiled


def test_kernels_are_compiled_after_two_numbers_of_tokens_are_traced_the_longest_first(traced, monkeypatch):
    from flce_ops.triton.launch import ahead

    from flce_ops.support.vendor import H200, compiling

    jitted, compiled = traced
    kernels = [jitted(name) for name in ("compact_tokens_kernel", "weight_gradient_kernel", "overflow_rows_kernel")]
    later, stand_ins, tokens = jitted("target_rows_kernel"), [], []

    def trace():
        tokens.append(compiling.get().tokens)
        for kernel in [later] if len(tokens) > 1 else kernels:
            stand_ins.append(ahead.compile_later(kernel, "key", 0, kernel.compile))
            if len(tokens) == 1:
                assert not compiled and kernel.device_caches[0][0]["key"] is stand_ins[-1]

    monkeypatch.setattr(ahead, "THREADS", 1)
    assert ahead.compile_side_by_side(H200, "test", trace) == (4, [])
    assert compiled == [*(kernel.__name__ for kernel in reversed(kernels)), "target_rows_kernel"]
    for kernel, stand_in in zip([*kernels, later], stand_ins):
        assert stand_in.result() is kernel is kernel.device_caches[0][0]["key"]
    first, others = tokens
    assert first + others == ahead.TOKENS and max(first) > 16384 and min(first) == 1 and len(first) < 4


def test_a_kernel_that_does_not_compile_ahead_leaves_the_others_alone(traced):
    """Its launch compiles it again and raises the error, if it comes to that."""
    from flce_ops.triton.launch import ahead

    from flce_ops.support.vendor import H200, compiling

    jitted, compiled = traced
    kernels = [jitted(name) for name in ("logits_gemm_kernel", "sum_losses_kernel", "target_rows_kernel")]
    error = ValueError("too large")

    def compile_none():
        raise error

    def trace():  # the first time it asks for them
        for kernel in [] if compiling.get().kernels else kernels:
            ahead.compile_later(kernel, "key", 0, compile_none if kernel is kernels[0] else kernel.compile)

    found = ahead.compile_side_by_side(H200, "test", trace)
    assert found == (2, [("logits_gemm_kernel", error)]) and len(compiled) == 2
    assert [kernel.device_caches[0][0] for kernel in kernels] == [{}, *({"key": kernel} for kernel in kernels[1:])]


def test_a_kernel_that_waits_when_tracing_fails_is_forgotten(traced):
    """Another thread that has met the kernel meanwhile gets the error instead of waiting for ever."""
    from flce_ops.triton.launch import ahead

    from flce_ops.support.vendor import H200

    jitted, compiled = traced
    kernel = jitted("sum_losses_kernel")
    stand_ins = []

    def trace():
        stand_ins.append(ahead.compile_later(kernel, "key", 0, kernel.compile))
        raise OSError("in the middle")

    with pytest.raises(OSError, match="in the middle"):
        ahead.compile_side_by_side(H200, "test", trace)
    assert kernel.device_caches[0][0] == {} and not compiled
    with pytest.raises(RuntimeError, match="has ended"):
        stand_ins[0].result()


def test_one_kernel_at_a_time_makes_its_ir():
    from flce_ops.triton.launch.ahead import in_turn

    class Source:
        running = 0

        def make_ir(self) -> None:
            Source.running += 1
            assert Source.running == 1
            time.sleep(0.01)
            Source.running -= 1

    one = in_turn(Source)
    assert in_turn(one) is one and issubclass(one, Source)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: one().make_ir(), range(4)))


def test_tritons_digest_of_itself_is_kept_as_long_as_its_files_stay(tmp_path, monkeypatch):
    from flce_ops.triton.launch import once
    from triton.runtime import cache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    file, digests = tmp_path / "triton" / "runtime" / "cache.py", []
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(cache, "__file__", str(file))

    def digest() -> str:
        digests.append(file.read_text())
        return digests[-1]

    def key_of_a_new_process(text: str) -> str:
        file.write_text(text)
        monkeypatch.setattr(cache, "triton_key", digest)
        once.know_triton()
        return cache.triton_key()

    assert key_of_a_new_process("1") == "1" and cache.triton_key is digest
    times = file.stat()
    digests.clear()
    file.write_text("1")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    monkeypatch.setattr(cache, "triton_key", digest)
    once.know_triton()
    assert cache.triton_key() == "1" and not digests  # read from the cache
    assert key_of_a_new_process("22") == "22" and digests


def test_triton_reads_its_digest_where_it_is_replaced():
    from triton.runtime import cache

    assert "triton_key" in cache.get_cache_key.__code__.co_names and cache.get_cache_key.__globals__ is vars(cache)


def test_nothing_is_compiled_ahead_while_a_graph_is_captured(gpu):
    gpu.capturing = True
    gpu.step(7)
    assert not gpu.compiled
    gpu.capturing = False
    gpu.step(8)
    assert len(gpu.compiled) == 1


def test_a_call_goes_on_where_compiling_ahead_fails(gpu, caplog):
    expected = gpu.step(7)

    def fail(trace):
        raise OSError("no space left")

    def fail_for_one(trace):
        return 3, [("sum_losses_kernel", RuntimeError("no ptxas"))]

    for gpu.compile, said in (
        (fail, "OSError: no space left"),
        (fail_for_one, "sum_losses_kernel is not compiled ahead"),
    ):
        gpu.marked = False
        gpu.reset()
        caplog.clear()
        assert all(map(torch.equal, gpu.step(7), expected))
        (record,) = caplog.records
        assert record.levelname == "WARNING" and said in record.getMessage()
        assert "linear_cross_entropy_with_grad" in record.getMessage() and not gpu.marked


def test_calls_of_one_head_differ_in_no_more_than_tokens():
    """A head whose kernels are compiled is recognised, whatever the number of tokens."""
    from flce_ops.triton.launch.ahead import head_of

    from flce_ops.meta.arguments import WithGrad

    def head(tokens, hidden=16, **options):
        operands = torch.randn(tokens, hidden), torch.randn(31, hidden), torch.zeros(tokens, dtype=torch.int64)
        return head_of(WithGrad.bind(*operands, None, None, None, output_mask=[True, True, False], **options))

    assert head(7) == head(31) == head(16)
    assert head(7) != head(7, hidden=32)
    assert head(7) != head(7, softcap=torch.tensor(30.0))
