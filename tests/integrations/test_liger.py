"""Liger-Kernel's kernels beside the patched loss, and the refusal where both replace the loss.

The refusals are tested with a stand-in of Liger's forward, and with Liger itself where it is installed.
"""

import copy
from types import MethodType

import pytest
import torch
from test_transformers_training import make_rows, run_trainer
from tiny_models import has_logits, make_batch, make_model

from flce_ops.integrations.transformers import patch, unpatch

REFUSAL = r"Liger-Kernel has replaced its loss \(liger_kernel\..*fused_linear_cross_entropy=False.*then patch"


def lce_forward(self, input_ids=None, labels=None, **kwargs):
    raise AssertionError("the stand-in computes nothing")


lce_forward.__module__ = "liger_kernel.transformers.model.qwen3"


@pytest.fixture
def liger(monkeypatch):
    """apply_liger_kernel_to_qwen3, whose replacements of Transformers' names end with the test."""
    transformers = pytest.importorskip("liger_kernel.transformers")
    from transformers.models.qwen3 import modeling_qwen3

    for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP"):
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))
    monkeypatch.setattr(modeling_qwen3.Qwen3ForCausalLM, "forward", modeling_qwen3.Qwen3ForCausalLM.forward)
    return transformers.apply_liger_kernel_to_qwen3


def test_a_model_whose_loss_is_ligers_is_refused():
    model = make_model("Qwen3")
    model.forward = MethodType(lce_forward, model)
    with pytest.raises(NotImplementedError, match=f"Qwen3ForCausalLM: {REFUSAL}"):
        patch(model)
    del model.forward
    assert not has_logits(patch(model)(**make_batch()))


def test_a_class_whose_loss_is_ligers_is_refused_and_its_instances(monkeypatch):
    model = make_model("Qwen3")
    monkeypatch.setattr(type(model), "forward", lce_forward)
    for patched in (model, type(model)):
        with pytest.raises(NotImplementedError, match=f"Qwen3ForCausalLM: {REFUSAL}"):
            patch(patched)


def test_trainer_refuses_a_patched_model_whose_loss_is_ligers_now(tmp_path):
    model = patch(make_model("Qwen3"))
    model.forward = MethodType(lce_forward, model)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        run_trainer(model, make_rows(), tmp_path)
    unpatch(model)
    with pytest.raises(AssertionError, match="computes nothing"):  # Liger's own loss is left alone
        run_trainer(model, make_rows(), tmp_path)


def test_ligers_loss_is_refused_before_and_after_patch(liger, tmp_path):
    first, second = make_model("Qwen3"), patch(make_model("Qwen3"))
    liger(model=first, rope=False, rms_norm=False, swiglu=False)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        patch(first)
    liger(model=second, rope=False, rms_norm=False, swiglu=False)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        run_trainer(second, make_rows(), tmp_path)


def test_ligers_kernels_take_the_patched_loss(liger):
    """Its SwiGLU and RMSNorm are Triton kernels: on a CPU they are put in place, and only the loss runs."""
    model = make_model("Qwen3")
    batch = make_batch()
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
    exact = copy.deepcopy(model)(**batch).loss
    liger(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    assert "Liger" in repr(model.model.norm)
    patch(model)
    model.model.forward = lambda **_: hidden
    output = model(**batch)
    assert not has_logits(output)
    torch.testing.assert_close(output.loss, exact, rtol=1e-5, atol=0)
