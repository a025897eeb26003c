"""AOTInductor packages call the registered operator: the process that loads one imports flce_ops."""

# N tokens, D hidden, V vocabulary

import functools
import subprocess
import sys

import pytest
import torch
from fresh_process import run_script
from inputs import make_inputs
from reference_loss import error
from test_export import exported
from torch._inductor import aoti_compile_and_package, aoti_load_package

import flce_ops

N, D, V = 12, 11, 31
QUICK_TO_COMPILE = {"aot_inductor.compile_wrapper_opt_level": "O0"}

RUN = """
import sys
sys.modules["flce_ops"] = None
import torch
args, expected = torch.load(sys.argv[2])
found = torch._inductor.aoti_load_package(sys.argv[1])(*args)
assert torch.allclose(found, expected, rtol=1e-5), (found, expected)
"""


ANY_PACKAGE = """
import torch
layer, x = torch.nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda")
package = torch._inductor.aoti_compile_and_package(torch.export.export(layer, (x,)))
torch._inductor.aoti_load_package(package)(x)
"""


@functools.cache
def any_cuda_package_loads() -> bool:
    return subprocess.run([sys.executable, "-c", ANY_PACKAGE], capture_output=True, timeout=600).returncode == 0


@pytest.fixture
def packages_load(request):
    if request.node.callspec.params["device"] == "cuda" and not any_cuda_package_loads():
        pytest.skip("an AOTInductor package of nn.Linear does not load here either")


def run_without_flce_ops(package, args, expected) -> subprocess.CompletedProcess:
    file = package.with_suffix(".pt")
    torch.save((args, expected), file)
    return run_script(RUN, str(package), str(file))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("packages_load")
def test_a_package_calls_the_operator_and_needs_it(device, tmp_path):
    program = exported(make_inputs((N, D, V), device=device, bias=True, requires_grad=False), reduction="none")
    package = tmp_path / "loss.pt2"
    aoti_compile_and_package(program, package_path=str(package), inductor_configs=QUICK_TO_COMPILE)
    inputs = make_inputs((77, D, V), device=device, bias=True, requires_grad=False)
    expected = flce_ops.linear_cross_entropy(*inputs.args, reduction="none")
    with flce_ops.workspace(2**10):  # the kernel reads the workspace when it runs
        assert error(aoti_load_package(str(package))(*inputs.args), expected) < 1e-6
    assert flce_ops.last_path().op == "linear_cross_entropy_forward"
    done = run_without_flce_ops(package, inputs.args, expected)
    assert done.returncode != 0
    assert "Could not find schema for flce::linear_cross_entropy_forward" in done.stderr
