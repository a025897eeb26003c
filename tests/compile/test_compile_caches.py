"""An upgraded package never runs a graph of the previous version; an unchanged one compiles nothing twice."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

import flce_ops
from flce_ops.support import compile_cache
from flce_ops.support.workspace import get_retained

PACKAGE = Path(flce_ops.__file__).parent

# For each key (None: the package's own) the loss and the cache's answer. The caches use the user's directory, because
# the C++ compiler's abilities are remembered there. A tag of this run separates its entries.
STEPS = """
import json, sys, torch
from torch._dynamo.utils import counters
import flce_ops
from flce_ops.support import compile_cache

root, keys = json.loads(sys.argv[1])
assert flce_ops.__file__.startswith(root), flce_ops.__file__
own = compile_cache.code_key()
found = {"key": own, "tag": torch.compiler.config.cache_key_tag, "steps": []}
for key in keys:
    compile_cache.code_key = lambda: key or own
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    inputs = torch.randn(12, 8), torch.randn(31, 8), torch.randint(31, (12,))
    loss = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True)(*inputs)
    hits, misses = (counters["aot_autograd"]["autograd_cache_" + which] for which in ("hit", "miss"))
    found["steps"].append([loss.item(), hits, misses])
print(json.dumps(found))
"""


def run_steps(root: Path, tag: str, *keys: str | None) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(root), "TORCH_COMPILE_CACHE_KEY_TAG": tag}
    command = [sys.executable, "-W", "ignore", "-c", STEPS, json.dumps([str(root), keys])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def copy_of_the_package(root: Path) -> Path:
    shutil.copytree(PACKAGE, root / "flce_ops", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.exhaustive
def test_an_upgraded_package_runs_its_own_code(tmp_path):
    """Two copies of the package share a directory of caches. They differ in one line of what AOTAutograd traces."""
    tag = f"flce_ops-test-{uuid.uuid4()}"
    root = copy_of_the_package(tmp_path)
    old = run_steps(root, tag, None)
    loss, hits, misses = old["steps"][0]
    assert (hits, misses, old["tag"]) == (0, 1, tag)

    source = root / "flce_ops" / "math" / "token_weights_and_denominator.py"
    line = "return valid.sum(dtype=dtype)"
    assert source.read_text().count(line) == 1
    source.write_text(source.read_text().replace(line, "return 2 * valid.sum(dtype=dtype)"))

    new = run_steps(root, tag, old["key"], None)
    stale, own = new["steps"]
    assert stale == [loss, 1, 0], "torch keys operators by their code: flce_ops/support/compile_cache.py is not needed"
    assert new["key"] != old["key"]
    assert own == [pytest.approx(loss / 2), 0, 1]


def test_key_is_the_version_and_the_sources(tmp_path, monkeypatch):
    compile_cache.code_key.cache_clear()
    key = compile_cache.code_key()
    assert key.startswith(flce_ops.__version__ + "+")

    def key_of(root):
        compile_cache.code_key.cache_clear()
        monkeypatch.setattr(compile_cache, "__file__", str(root / "flce_ops" / "support" / "compile_cache.py"))
        return compile_cache.code_key()

    root = copy_of_the_package(tmp_path)
    try:
        assert key_of(root) == key, "the key depends on where the package lies"
        with open(root / "flce_ops" / "math" / "options.py", "a") as file:
            file.write("# a change\n")
        assert key_of(root) != key
    finally:
        compile_cache.code_key.cache_clear()


def plain_loss():
    flce_ops.linear_cross_entropy(torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.int64))


def inner_operator():
    torch.ops.flce.linear_cross_entropy_forward(torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.int64))


def distillation():
    flce_ops.linear_kl_div(torch.randn(4, 3), torch.randn(5, 3), torch.randn(4, 2), torch.randn(5, 2))


@pytest.mark.parametrize("function", [plain_loss, inner_operator, distillation])
def test_tracing_an_operator_adds_the_package_to_what_the_user_has_set(function):
    config = torch._inductor.config
    mine = {"mine": "1"}
    with config.patch(unsafe_marked_cacheable_functions=mine), torch.compiler.config.patch(cache_key_tag="mine"):
        torch.compile(function, backend="eager")()
        key = f"{compile_cache.code_key()}, {get_retained()} bytes retained"
        assert config.unsafe_marked_cacheable_functions == {"mine": "1", "torch.ops.flce": key}
        assert mine == {"mine": "1"}
        assert torch.compiler.config.cache_key_tag == "mine"
