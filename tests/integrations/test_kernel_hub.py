"""The package as Hugging Face's `kernels` loads it, beside the installed one in the same process."""

import functools
import importlib
import json
import sys
from types import ModuleType

import pytest
import torch
from fresh_process import run_fresh
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from release.kernel_hub import ROOT, VARIANT, write_build

kernels = pytest.importorskip("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel_hub")
    write_build(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder) -> ModuleType:
    return kernels.get_local_kernel(folder)


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden (N, D), weight (V, D), target (N,)"""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(101, 24, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(101, (37,), generator=generator)


def linear_cross_entropy(package, hidden, weight, target):
    return package.linear_cross_entropy(hidden, weight, target, softcap=20.0, z_loss=1e-3)


def log_probs(package, hidden, weight, target):
    found = package.linear_log_probs(hidden, weight, target, entropy=True)
    return (found.log_probs + found.entropy).sum()


def policy_loss(package, hidden, weight, target):
    old = package.linear_log_probs(hidden, weight, target).log_probs.detach() + 0.1
    return package.linear_policy_loss(hidden, weight, target, torch.ones_like(old), old).loss


def divergence(package, hidden, weight, target):
    return package.linear_kl_div(hidden, weight, hidden.detach().flip(0), weight.detach())


def head(package, hidden, weight, target):
    module = package.LinearCrossEntropyHead(24, 101)
    return torch.func.functional_call(module, {"weight": weight}, (hidden, target))


LOSSES = (linear_cross_entropy, log_probs, policy_loss, divergence, head)


def loss_and_gradients(loss, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    hidden, weight, target = problem(dtype)
    found = loss(hidden, weight, target)
    found.backward()
    return [found.detach(), hidden.grad, weight.grad]


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


# ---------------------------------------------------------------- the build


def test_the_build_is_the_package_and_what_kernels_reads(folder):
    variant = folder / "build" / VARIANT
    written = {str(path.relative_to(variant)) for path in variant.rglob("*") if path.is_file()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "flce_ops").rglob("*.py")}
    assert written == sources | {"metadata.json", "flce_ops/py.typed"}
    changed = {name for name in sources if (variant / name).read_bytes() != (ROOT / name).read_bytes()}
    assert changed == {"flce_ops/_ops.py"}
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_id_is_that_of_the_sources(folder, tmp_path):
    build_id = json.loads((folder / "build" / VARIANT / "metadata.json").read_text())["id"]
    assert write_build(tmp_path) == build_id
    changed = tmp_path / "build" / VARIANT / "flce_ops"
    assert write_build(tmp_path / "other", changed) != build_id


# ---------------------------------------------------------------- two packages in one process


def test_modules_and_operators_have_names_of_their_own(loaded):
    assert loaded.__name__ != "flce_ops" and sys.modules[loaded.__name__] is loaded
    assert loaded.__all__ == flce_ops.__all__ and loaded.linear_cross_entropy is not flce_ops.linear_cross_entropy
    for ours, theirs in zip(flce_ops.SAC_SAVE_OPS, loaded.SAC_SAVE_OPS):
        assert (ours.namespace, theirs.namespace) == ("flce", loaded.__name__)
        assert str(ours._schema).removeprefix("flce") == str(theirs._schema).removeprefix(loaded.__name__)


def test_the_loaded_package_imports_none_of_the_installed_one(folder):
    """In a process where the installed package cannot be imported."""
    script = f"""
import pathlib, sys
import kernels, torch
sys.modules["flce_ops"] = None  # an import of it raises
loaded = kernels.get_local_kernel(pathlib.Path({str(folder)!r}))
hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
loaded.linear_cross_entropy(hidden, weight, torch.arange(5)).backward()
print(loaded.last_path())
"""
    assert "linear_cross_entropy_with_grad" in run_fresh(script)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_and_gradients_are_the_installed_packages(loss, loaded):
    ours, theirs = (loss_and_gradients(functools.partial(loss, package)) for package in (flce_ops, loaded))
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("loss", [linear_cross_entropy, log_probs], ids=lambda loss: loss.__name__)
def test_both_compile_each_into_a_graph_of_its_own_operators(loss, loaded):
    targets = []

    def backend(graph, inputs):
        targets.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    for package, namespace in ((flce_ops, "flce"), (loaded, loaded.__name__)):
        compiled = torch.compile(functools.partial(loss, package), backend=backend, fullgraph=True)
        assert same_bits(loss_and_gradients(compiled), loss_and_gradients(functools.partial(loss, package)))
        assert {target.split(".")[0] for target in targets.pop() if "flce" in target} == {namespace}


def test_a_program_with_both_compiles(loaded):
    def both(hidden, weight, target):
        return flce_ops.linear_cross_entropy(hidden, weight, target) + log_probs(loaded, hidden, weight, target)

    compiled = loss_and_gradients(torch.compile(both, fullgraph=True, backend="aot_eager"))
    for ours, expected in zip(compiled, loss_and_gradients(both)):
        torch.testing.assert_close(ours, expected)
    keys = torch._inductor.config.unsafe_marked_cacheable_functions
    assert {"torch.ops.flce", f"torch.ops.{loaded.__name__}"} <= keys.keys()


def test_both_count_the_same_flops(loaded):
    counts = []
    for package in (flce_ops, loaded):
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(functools.partial(linear_cross_entropy, package))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the losses above run them")
def test_both_run_their_own_triton_kernels(loaded):
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    hidden, weight, target = (tensor.detach() for tensor in problem())
    found = []
    for package in (flce_ops, loaded):
        triton = importlib.import_module(f"{package.__name__}.triton")
        arguments = (hidden, weight, target, None, None, torch.full((37,), 1 / 37))
        found.append(triton.launch_with_grad(*arguments, output_mask=[True, True, False]))
    assert same_bits(*found)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(found[1][0], expected)


def test_both_patch_transformers(loaded):
    """What they register with torch's maps over outputs has names of its own."""
    transformers = pytest.importorskip("transformers")
    tokens, losses = torch.randint(50, (2, 9)), []
    for package in (flce_ops, loaded):
        patch = importlib.import_module(f"{package.__name__}.integrations.transformers").patch
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = patch(transformers.LlamaForCausalLM(config))
        losses.append(model(input_ids=tokens, labels=tokens).loss)
    assert torch.equal(*losses)
