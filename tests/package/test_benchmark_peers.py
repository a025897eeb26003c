"""How other libraries are called, with fakes in their place. A missing library gives a row with a reason."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from toy_problem import CPU, TOY, dense_entropy, dense_losses, make_toy

from benchmarks import (
    providers,
    run,
)
from benchmarks.data import IGNORE_INDEX
from benchmarks.errors import errors_of, make_reference
from benchmarks.modes import MODES, step_of

pytestmark = pytest.mark.usefixtures("quick_collections")


def test_every_provider_without_a_step_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    settings = run.Settings(CPU, torch.bfloat16, rounds=1, ms=1, seed=0)
    here = run.Environment("cpu", "", "", "")
    rows = run.measure(TOY, MODES["fwd_bwd"], list(providers.FILES), settings, here, out_of_time=lambda: False)
    assert [row.provider for row in rows] == list(providers.FILES)
    assert all((row.ms is None) == bool(row.reason) for row in rows)
    reasons = {row.provider: row.reason for row in rows}
    assert {reasons[name] for name in ("liger_cutedsl", "liger_cutedsl_scaled", "liger_cutile")} == {
        "needs a Hopper GPU"
    }


def test_a_library_that_a_peer_needs_is_named(monkeypatch):
    from benchmarks.providers import liger

    monkeypatch.setitem(liger.NEEDS, "not_a_package.inside", "a-distribution")
    monkeypatch.setitem(liger.NEEDS, "not_a_module", "another")
    with pytest.raises(providers.Unavailable, match="^needs a-distribution and another$"):
        liger._need("not_a_package.inside", "torch", "not_a_module")


def install_fake(monkeypatch, name, **contents):
    """Installs a fake module, and its packages, so that `import name` finds it."""
    words = name.split(".")
    for i in range(1, len(words) + 1):
        monkeypatch.setitem(sys.modules, ".".join(words[:i]), ModuleType(".".join(words[:i])))
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def assert_right(step, problem, mode):
    errors = errors_of(step(), problem, make_reference(problem, mode))
    assert max(error for error in errors if error is not None) < 1e-5


LOSSES = {
    name: mode
    for name, mode in MODES.items()
    if name not in ("log_probs", "soft64") and not mode.options and not mode.kind
}


@pytest.mark.parametrize("mode", LOSSES.values(), ids=LOSSES)
def test_ligers_losses_are_averaged_over_valid_tokens(monkeypatch, mode):
    from benchmarks.providers import liger

    class Scaled:
        @staticmethod
        def apply(input, linear_weight, target, temperature, ignore_index):
            assert (temperature, ignore_index) == (1.0, IGNORE_INDEX)
            return dense_losses(input, linear_weight, target)

    monkeypatch.setattr(liger, "_need", lambda *modules: None)
    path = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    install_fake(monkeypatch, path, LigerFusedScaledCrossEntropySM90Function=Scaled)
    problem = make_toy(mode.name)
    assert_right(step_of(liger._cutedsl_scaled(problem, mode), problem, mode), problem, mode)


ONE_CLASS = {**LOSSES, "log_probs": MODES["log_probs"]}


@pytest.mark.parametrize("mode", ONE_CLASS.values(), ids=ONE_CLASS)
def test_trls_log_probabilities_of_the_valid_rows_are_put_back(monkeypatch, mode):
    class LogProbs:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs):
            assert (bias, temperature, chunk, softcap, scale) == (None, 1.0, 32768, None, 1.0)
            assert outputs == (("entropy",) if mode.name == "log_probs" else ())
            assert (targets >= 0).all()
            return -dense_losses(hidden, weight, targets), dense_entropy(hidden, weight), None, None, None

    install_fake(monkeypatch, "trl.trainer.utils", _CHUNKED_LOGPROB_CHUNK_SIZE=32768)
    install_fake(monkeypatch, "trl.kernels.chunked_logprob", ChunkedLogProbFunction=LogProbs)
    monkeypatch.setitem(sys.modules, "trl.trainer", ModuleType("trl.trainer"))
    problem = make_toy(mode.name)
    assert_right(providers.provide("trl", problem, mode), problem, mode)


@pytest.mark.parametrize("mode", [MODES["none"], MODES["log_probs"]], ids=["none", "log_probs"])
def test_verls_heads_take_ignored_tokens_without_a_cotangent(monkeypatch, mode):
    def heads(hidden, weight, targets, temperature, reduction):
        assert (temperature, reduction) == (1.0, "none")
        return -dense_losses(hidden, weight, targets), dense_entropy(hidden, weight)

    install_fake(monkeypatch, "verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=heads)
    problem = make_toy(mode.name)
    assert_right(providers.provide("verl", problem, mode), problem, mode)
    with pytest.raises(providers.Unavailable, match="per token"):
        providers.provide("verl", problem, MODES["fwd_bwd"])


def test_a_package_is_found_without_running_its_init(monkeypatch, tmp_path):
    from benchmarks.providers.verl import import_packages_without_their_init

    inner = tmp_path / "wants_ray" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("import not_a_package")
    (inner / "kernels.py").write_text("FOUND = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    import_packages_without_their_init("wants_ray", "wants_ray.inner")
    assert importlib.import_module("wants_ray.inner.kernels").FOUND
