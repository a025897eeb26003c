"""Devices, seeds and compiler caches of the whole suite."""

import os

import torch

if not torch.cuda.is_available():
    # before anything imports triton, as torch's compiler below does: tests/test_triton_interpreter.py
    os.environ["TRITON_INTERPRET"] = "1"

import inputs
import pytest
import torch._functorch.config
import torch._inductor.config

# A cached graph would outlive the formula that made it: AOTAutograd's key does not see a custom op's Python.
torch._inductor.config.force_disable_caches = True
torch._functorch.config.enable_autograd_cache = False

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_seed():
    """A new seed for every test; a failing test prints it, FLCE_TEST_SEED=<it> repeats the run."""
    seed = int(os.environ.get("FLCE_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    inputs.seed_inputs(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


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
