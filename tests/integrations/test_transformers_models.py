"""Loss and all gradients of patched models equal those of the same models unpatched, in float32."""

import pytest

pytest.importorskip("transformers")

import torch
from tiny_models import MODELS, check_same, loss_and_gradients, make_batch, make_model

import flce_ops
from flce_ops.integrations.transformers import patch


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_unpatched_models(name):
    model, batch = make_model(name), make_batch()
    theirs = loss_and_gradients(model, **batch)
    ours = loss_and_gradients(patch(model), **batch)
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    check_same(ours, theirs)
    assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in theirs[1].values())


@pytest.mark.parametrize("name", MODELS)
def test_logits_without_labels_are_bitwise_the_unpatched_models(name):
    model, batch = make_model(name).eval(), make_batch()
    labels = batch.pop("labels")
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = labels.clamp(min=0)
    theirs = model(**batch)
    ours = patch(model)(**batch)
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours.logits, theirs.logits)
    assert ours.loss is None


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Cohere"])  # a softcap, a divisor, a factor
def test_scale_or_cap_of_the_logits_changes_the_loss(name):
    # otherwise the test of equality above would pass for a patch that forgets it
    plain = {
        "Gemma2": {"final_logit_softcapping": None},
        "Granite": {"logits_scaling": 1.0},
        "Cohere": {"logit_scale": 1.0},
    }
    model, batch = make_model(name), make_batch()
    without = make_model(name, **plain[name])
    without.load_state_dict(model.state_dict())
    assert abs(model(**batch).loss - without(**batch).loss) > 0.05
