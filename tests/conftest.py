"""Devices, seeds, threads and compiler caches of the whole suite. The folders follow the axes of the package:

    sources/        where logits come from: a head and its operands in every kind, dtype and layout, given logits
    objectives/     what is computed from a row: losses, log-probabilities, divergences, policies, metrics, and the
                    product of all options
    sinks/          where gradients go: grad_output, main_grad, sparse gradients, second derivatives, saved logits,
                    chunks and memory
    layouts/        which rank has what: sharded tokens and classes, plans of DTensors, training of parallel models
    kernels/        Triton's kernels in the interpreter, how they are launched and compiled, and what needs a GPU
    compile/        the operators in torch's compilers: graphs, exports, caches, opcheck, FLOP counts, torch's private
                    names
    integrations/   other libraries: Transformers, PEFT, TRL, torchtitan, Megatron, Lightning, and the documents'
                    recipes
    package/        the repository itself: layers, signatures, pages, packaging, paths, the planner, the fuzzer

fuzz/ is the fuzzer. What several folders use lies beside the folders.
"""

import gc
import os
import zlib

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Must be set before torch and numpy read it. Two workers on two cores use one core each, and so do their processes.
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, os.cpu_count() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    )
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", os.environ["OMP_NUM_THREADS"])
    if "FLCE_CARDS" in os.environ:  # each worker uses one card, which other workers may share
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(worker % int(os.environ["FLCE_CARDS"])))

import torch

if not torch.cuda.is_available():
    # Must be set before anything imports triton, as torch's compiler below does:
    # tests/kernels/test_triton_interpreter.py.
    os.environ["TRITON_INTERPRET"] = "1"

import inputs
import interpreter
import process_pool
import pytest
import torch._functorch.config
import torch._inductor.config

# A cached graph would outlive the Function that made it, because AOTAutograd's key does not include the Python code of
# a custom op. Tests of the C++ compiler and compiled headers stay cached, which saves 10 s for each graph;
# force_disable_caches would repeat them.
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False

if not torch.cuda.is_available():
    interpreter.remember_what_is_patched()
    interpreter.demand_boolean_masks()

# Every run draws the same inputs: whether a change passes does not depend on the draw. `make nightly` sets another seed
# each night. The seed is in the environment, so that xdist's workers and the tests' own processes use the same one.
SEED = int(os.environ.setdefault("FLCE_TEST_SEED", "20261121"))

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_seed():
    """Every test starts from the run's seed, whatever ran before."""
    inputs.seed_inputs(SEED)
    torch.manual_seed(SEED)


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="make test: no exhaustive test, and a part of the cases of others"
    )


# Of so many cases of a test about one runs. Those of kernels/ and layouts/ take seconds each, in the interpreter or in
# several processes; those of package/ are files, pages and commands, which have no neighbours.
SHARE, SHARES = 6, {"kernels": 12, "layouts": 12, "package": 1}


def pytest_collection_modifyitems(config, items):
    """Of each test: the first case, and one in SHARE by its name.

    Neighbours differ in one argument.
    By a name, not by a number, which would meet the same value of an argument of three. CI runs every case.
    """
    if not config.getoption("quick"):
        return
    kept, left_out, seen = [], [], set()
    for item in items:
        test = (item.path, item.originalname)
        sampled = test in seen and zlib.crc32(item.name.encode()) % SHARES.get(item.path.parent.name, SHARE)
        if sampled or item.get_closest_marker("exhaustive") is not None:
            left_out.append(item)
        else:
            seen.add(test)
            kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_report_header():
    return f"FLCE_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    """Printed with -q, too, which omits the header. FLCE_TEST_SEED=<seed> repeats the run."""
    terminalreporter.write_line(f"inputs: FLCE_TEST_SEED={SEED}")


def pytest_collection_finish():
    """Excludes imported objects from garbage collection: collecting all of torch takes a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    process_pool.finish_pools()


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def memory_for_other_workers():
    """torch keeps freed memory, which the other processes on the card may need."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def several_chunks_of_few_rows(request, monkeypatch):
    """With the package's own 512 rows the interpreter would need thousands of tokens for several chunks."""
    if request.module.__name__ != "test_workspace":
        monkeypatch.setattr("flce_ops.support.workspace.LEAST_ROWS", 128)


@pytest.fixture
def fewest_chunks(monkeypatch):
    """A step has the fewest chunks that its workspace allows, not up to two more."""
    from flce_ops.triton.steps import chunks

    monkeypatch.setattr(chunks, "CHUNKS_MORE", 0)
    chunks.best_chunking.cache_clear()
    yield
    chunks.best_chunking.cache_clear()


@pytest.fixture
def poisoned_memory(request, monkeypatch):
    """Fills every torch.empty with nan (integers with their maximum), so that memory which a kernel does not write is
    noticed. In the interpreter, kernels may use the memory of their arguments only; `make test` leaves this check out,
    which takes a tenth of their time.
    """
    quick = request.config.getoption("quick")
    if not quick and not torch.cuda.is_available():
        interpreter.check_addresses(monkeypatch)
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
