"""On AMD's GPUs, which torch calls "cuda" too, everything runs in ATen. These tests pretend that torch was built for
AMD.
"""

# N tokens, D hidden, V vocabulary

import sys
from types import SimpleNamespace

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, run, run_reference

import flce_ops
from flce_ops.ops import OPERATORS, kernel
from flce_ops.ops.paths import choice_of, path_of_loss


@pytest.fixture
def torch_for_amd(monkeypatch):
    """The package sees it, torch itself does not: torch would look for AMD's libraries.

    What was chosen for one maker's GPUs is forgotten before the other's: a process has one torch.
    """
    monkeypatch.setattr("flce_ops.support.torch", SimpleNamespace(version=SimpleNamespace(hip="7.0.51831")))
    forget_choices()
    yield
    forget_choices()


def forget_choices():
    for cached in (choice_of, path_of_loss):
        cached.cache_clear()


def rows(inputs):
    return torch.ones(inputs.input.shape[0])


# the kernels that are registered for CUDA
MASK = [True, True, False]
CALLS = {
    "forward": lambda kernel, inputs: kernel(*inputs.args),
    "backward": lambda kernel, inputs: kernel(
        rows(inputs), rows(inputs), None, *inputs.args, None, torch.zeros(13, 2), output_mask=MASK
    ),
    "with_grad": lambda kernel, inputs: kernel(*inputs.args, None, rows(inputs), output_mask=MASK),
}


@pytest.mark.parametrize("op", CALLS)
def test_no_kernel_for_half_operands_reaches_triton(op, torch_for_amd, monkeypatch):
    inputs = make_inputs((13, 11, 31), dtype=torch.bfloat16, requires_grad=False)
    monkeypatch.setitem(sys.modules, "flce_ops.triton", None)  # importing it raises an error
    monkeypatch.setitem(sys.modules, "flce_ops.triton.steps.with_grad", None)
    CALLS[op](kernel(OPERATORS[f"linear_cross_entropy_{op}"].arguments), inputs)
    path = flce_ops.last_path()
    assert path.op.endswith(op) and path.implementation == "aten", path


def test_a_capability_like_hoppers_gets_no_tiles_for_tensor_maps(torch_for_amd):
    """(9, 4) is an MI300 and (9, 0) an MI200; NVIDIA has other chips under these numbers."""
    device = pytest.importorskip("flce_ops.triton.gemm.tiles")
    device.chip_of_gpu.cache_clear()
    tensor = SimpleNamespace(device=torch.device("cuda"), shape=(64, 4096))
    with pytest.raises(NotImplementedError, match="made for NVIDIA's GPUs"):
        device.tiles_for(tensor)


def test_the_path_says_whose_gpu_it_is(torch_for_amd):
    from flce_ops.support import device_name

    assert device_name("cuda") == "AMD"
    assert device_name("cpu") == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_training_step_runs_in_aten_from_end_to_end(reduction, torch_for_amd, monkeypatch):
    inputs = make_inputs((252, 64, 509), device="cuda", dtype=torch.bfloat16, bias=True)
    exact = run_reference(inputs, reduction=reduction)
    monkeypatch.setitem(sys.modules, "flce_ops.triton", None)
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    path = flce_ops.last_path()
    assert path.implementation == "aten" and "AMD" in path.reason, path
    for name in exact:
        assert error(found[name], exact[name]) < 8e-3, name
