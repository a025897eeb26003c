"""Import in a fresh process: which modules it imports, how many calls it makes, and that it works without Triton."""

import json
import os
import subprocess
import sys

import pytest
from fresh_process import ROOT, run_fresh, run_script

TRAIN = """
import torch
x = torch.randn(20, 8, requires_grad=True)
w = torch.randn(31, 8, requires_grad=True)
t = torch.randint(31, (20,))
loss = flce_ops.linear_cross_entropy(x, w, t)
loss.backward()
expected = torch.nn.functional.cross_entropy(x @ w.T, t)
assert torch.allclose(loss, expected, rtol=1e-6)
assert torch.allclose(w.grad, torch.autograd.grad(expected, w)[0], rtol=1e-4, atol=1e-6)
assert torch.ops.flce.linear_cross_entropy(x, w, t).item() == loss.item()
"""


def test_import_brings_in_neither_dtensor_nor_the_compiler_nor_triton_beyond_what_torchs_flop_counter_does():
    script = (
        # the FLOP formulas are registered in this module, which imports triton if it is installed
        "import sys, json, torch, torch.utils.flop_counter\n"
        "before = set(sys.modules)\n"
        "import flce_ops\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    brought = json.loads(run_fresh(script))
    for package in "triton torch.distributed.tensor torch._dynamo torch._inductor flce_ops.triton numpy".split():
        assert not [name for name in brought if name == package or name.startswith(package + ".")], package


def test_a_training_step_on_the_cpu_imports_no_kernels_and_no_exporter():
    unused = "{'flce_ops.triton', 'torch.onnx'}"
    run_fresh("import sys, flce_ops\n" + TRAIN + f"assert not {unused} & set(sys.modules)")


def test_works_where_triton_is_not_installed():
    block = "import sys\nsys.modules['triton'] = None\nimport flce_ops\n"
    run_fresh(block + TRAIN)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = sys.modules["triton"] = None
import flce_ops
"""
REST = """
from flce_ops.plan import main
main("--tokens 300 --hidden 64 --vocab 1000 --tflops 50".split())
class Head(torch.nn.Module):
    def forward(self, x, w, t):
        return flce_ops.linear_cross_entropy(x, w, t)
half = x.detach().bfloat16(), w.detach().bfloat16(), t
exported = torch.export.export(Head(), half)
torch.testing.assert_close(exported.module()(*half), Head()(*half), rtol=1e-2, atol=0)
print(flce_ops.last_path())
torch.library.opcheck(torch.ops.flce.linear_cross_entropy, (x, w, t))
"""


def test_works_without_numpy_and_triton_and_does_not_speak_of_them():
    """Runs in its own process, because torch reports a missing NumPy when it is imported."""
    script = WITHOUT_NUMPY + TRAIN + REST
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # torch 2.11 built with CUDA says this itself when torch.utils.flop_counter is imported
    said = [line for line in done.stderr.splitlines() if "flop counting will not work" not in line]
    assert not any("NumPy" in line or "triton" in line for line in said), done.stderr


OLDER = """
import sys, types
library, version = sys.argv[1:]
if library == "torch":
    import torch
    torch.__version__ = version
    import flce_ops
else:
    sys.modules["triton"] = types.ModuleType("triton")
    sys.modules["triton"].__version__ = version
    import flce_ops
    import flce_ops.triton
"""


@pytest.mark.parametrize(
    "library, version, oldest",
    [("torch", "2.10.1+cu128", "2.11"), ("torch", "1.13.0", "2.11"), ("triton", "3.5.1", "3.6")],
)
def test_an_older_torch_or_triton_is_refused_by_name(library, version, oldest):
    done = run_script(OLDER, library, version)
    assert done.returncode == 1
    assert f"ImportError: flce_ops: expected {library} {oldest} or later, got {version}; pip install -U" in done.stderr


def test_works_where_torch_distributed_is_not_available():
    block = "import sys\nsys.modules['torch.distributed.tensor'] = None\nimport flce_ops\n"
    run_fresh(block + TRAIN)


def test_import_makes_few_calls():
    """At most 50,000 Python calls beyond torch's own. `python -m benchmarks.first_call` measures the seconds."""
    script = (
        "import sys, torch, torch.utils.flop_counter\n"
        "calls = 0\n"
        "def count(frame, event, argument):\n"
        "    global calls\n"
        "    calls += event == 'call'\n"
        "sys.setprofile(count)\n"
        "import flce_ops\n"
        "sys.setprofile(None)\n"
        "print(calls)\n"
    )
    assert int(run_fresh(script)) < 50_000


def test_import_is_silent():
    assert run_fresh("import warnings; warnings.simplefilter('error'); import torch; import flce_ops") == ""


def test_compiled_training_step_in_a_fresh_process():
    uncached = "import torch, torch._functorch.config\ntorch._functorch.config.enable_autograd_cache = False\n"
    script = (
        uncached
        + "import flce_ops\n"
        + TRAIN.replace(
            "flce_ops.linear_cross_entropy(x, w, t)\nloss",
            "torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend='aot_eager')(x, w, t)\nloss",
        ).replace("== loss.item()", "- loss.item() < 1e-5")
    )
    assert "torch.compile" in script
    run_fresh(script)


@pytest.mark.parametrize("package", ["flce_ops", "flce_ops.integrations.transformers", "flce_ops.integrations.trl"])
def test_dir_has_the_public_names_alone(package):
    """What a prompt completes: public names only, without the modules that the package imports."""
    module = pytest.importorskip(package)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))


TWO_STEPS = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
import flce_ops
from flce_ops.triton import launch_with_grad
x, w, target = torch.randn(20, 32), torch.randn(65, 32), torch.randint(65, (20,))
for _ in range(2):
    leaf = w.clone().requires_grad_()
    flce_ops.linear_cross_entropy(x, leaf, target).backward()
    launch_with_grad(x, w, target, None, None, None, output_mask=[True, True, False])
print(json.dumps([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]))
"""


def test_two_steps_import_no_compiler():
    """Importing torch._dynamo takes 3.5 seconds. The second step of every process once had to wait for it."""
    pytest.importorskip("triton")
    assert json.loads(run_fresh(TWO_STEPS)) == []


REPLACED = """
import inspect, os, sys
os.environ["TRITON_INTERPRET"] = "0"
import torch, torch.utils.flop_counter, triton, triton.compiler, triton.language, triton.runtime

def code():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "triton"):
            continue
        for key, value in list(vars(module).items()):
            if inspect.isroutine(value) or inspect.isclass(value):
                found[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                found |= {(name, key, own): of for own, of in vars(value).items() if inspect.isroutine(of)}
    return found

before = code()
import flce_ops, flce_ops.triton, flce_ops.modules, flce_ops.plan
leaf = torch.randn(65, 32, requires_grad=True)
flce_ops.linear_cross_entropy(torch.randn(20, 32), leaf, torch.randint(65, (20,))).backward()
after = code()
assert len(before) > 10000 and any("JITFunction" in key for key in before)
print([key for key, value in before.items() if after.get(key) is not value])
"""


def test_no_function_and_no_class_of_torch_or_triton_is_replaced():
    """For every other user of the process they are what they were."""
    pytest.importorskip("triton")
    assert run_fresh(REPLACED) == "[]\n"
