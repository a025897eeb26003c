"""Devices, seeds, threads and compiler caches of the whole suite. Its folders mirror the axes of the package:

    sources/        where logits come from: a head and its operands in every kind, dtype and layout, a low-rank pair,
                    given logits
    objectives/     what is made of a row: losses, log-probabilities, divergences, policies, metrics, and the product of
                    all options
    sinks/          where gradients go: grad_output, main_grad, sparse ones, second derivatives, saved logits, chunks
                    and memory
    layouts/        who holds what: tokens and classes over ranks, plans of DTensors, the trainings of parallel models
    kernels/        Triton's kernels in the interpreter, how they are launched and compiled, and what needs a GPU
    compile/        what torch makes of the operators: graphs, exports, caches, opcheck, FLOP counts, torch's private
                    names
    integrations/   other libraries: Transformers, PEFT, TRL, torchtitan, Megatron, Lightning, and the documents'
                    recipes
    package/        the repository itself: layers, maps, promises, documents, packaging, paths, the planner, benchmarks,
                    the fuzzer

fuzz/ is the fuzzer, mutation/ plants faults and asks which tests fail, digest.py compares the results of two commits.
What several folders use lies beside them.
"""

import gc
import os
import zlib

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Before torch and numpy read it: two workers on two cores compute on one each, and so do the processes they start.
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, os.cpu_count() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    )
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", os.environ["OMP_NUM_THREADS"])
    if "FLCE_CARDS" in os.environ:  # each worker has one card to itself and to the workers that share it
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(worker % int(os.environ["FLCE_CARDS"])))

import torch

if not torch.cuda.is_available():
    # before anything imports triton, as torch's compiler below does: tests/kernels/test_triton_interpreter.py
    os.environ["TRITON_INTERPRET"] = "1"

import inputs
import interpreter
import process_pool
import pytest
import torch._functorch.config
import torch._inductor.config

# A cached graph would outlive the Function that made it: AOTAutograd's key does not see a custom op's Python. What g++
# can do and compiled headers are remembered, 10 s a graph: force_disable_caches would make them anew.
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False

if not torch.cuda.is_available():
    interpreter.remember_what_is_patched()

# A new one for every run. In the environment: xdist's workers and the tests' own processes have it from there.
SEED = int(os.environ.setdefault("FLCE_TEST_SEED", str(int.from_bytes(os.urandom(4), "little"))))

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_seed():
    """Every test starts from the run's seed, whatever ran before it."""
    inputs.seed_inputs(SEED)
    torch.manual_seed(SEED)


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="make test: no exhaustive test, and a third of the cases of SAMPLED"
    )


SAMPLED = ("kernels", "layouts")  # whose cases take seconds each: in the interpreter, in several processes


def pytest_collection_modifyitems(config, items):
    """Of each test of SAMPLED the first case and every third by its name: neighbours differ in one argument.

    By a name, not by a number, which would meet the same value of an argument of three.
    """
    if not config.getoption("quick"):
        return
    kept, left_out, seen = [], [], set()
    for item in items:
        first = (item.path, item.originalname) not in seen
        seen.add((item.path, item.originalname))
        sampled = item.path.parent.name in SAMPLED and not first and zlib.crc32(item.name.encode()) % 3
        out = sampled or item.get_closest_marker("exhaustive") is not None
        (left_out if out else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_report_header():
    return f"FLCE_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    """Under -q, too, which leaves out the header; FLCE_TEST_SEED=<it> repeats the run."""
    terminalreporter.write_line(f"inputs: FLCE_TEST_SEED={SEED}")


def pytest_collection_finish():
    """The collector leaves out what was imported so far: a gc.collect() of all of torch takes a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    process_pool.finish_pools()


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def only_what_is_launched_is_compiled(request, monkeypatch):
    """The first call of a head compiles its kernels for every number of tokens, of which a test launches a few."""
    if torch.cuda.is_available() and request.module.__name__ != "test_compilations":
        monkeypatch.setattr("flce_ops.triton.launch.replay.compile_first", lambda: None)


@pytest.fixture(scope="module")
def quick_collections():
    """Each row starts with a gc.collect(), which costs a quarter of a second where earlier tests have left a heap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def poisoned_memory():
    """Every torch.empty is filled with nan (integers with their maximum): what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"FLCE_TEST_SEED={inputs.current_seed()} pytest '{item.nodeid}'"))
    return report
