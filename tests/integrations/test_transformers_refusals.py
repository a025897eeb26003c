"""What patch refuses, and how it reads a forward. A model that patch does not understand stays as it was."""

import copy

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from flce_ops.integrations.transformers.cross_entropy_call import CrossEntropy
from flce_ops.integrations.transformers.logit_steps import Head
from flce_ops.integrations.transformers.read_head import read_head
from tiny_models import SIZES, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch import nn
from transformers import LlamaForCausalLM

from flce_ops.integrations.transformers import patch

# ---------------------------------------------------------------- models of Transformers


@pytest.mark.parametrize(
    "class_name,reason",
    [
        ("ProphetNetForCausalLM", "computes its loss by other means than one self.loss_function"),
        # the loss is inside its head
        ("XLMWithLMHeadModel", "computes its loss by other means than one self.loss_function"),
        ("GitForCausalLM", r"logits do not come from one call of a head: `shifted_logits = logits\[:, num_image_tok"),
        ("InklingForCausalLM", r"neither a scale nor a softcap: `logits = logits\[..., :unpadded_vocab_size\]"),
        ("xLSTMForCausalLM", "neither a scale nor a softcap: `if not self.training and "),
        ("ChameleonForConditionalGeneration", r"neither a scale nor a softcap: `logits\[:, :, image_tokens\] ="),
        ("DebertaV2ForMaskedLM", r"logits do not come from one call of a head: `prediction_scores = self.cls\(seq"),
        ("BertForPreTraining", "logits do not come from one call of a head: `prediction_scores, seq_relationship_"),
        ("EncoderDecoderModel", "logits do not come from one call of a head: `logits = decoder_outputs.logits`"),
        ("LlamaForSequenceClassification", "its forward passes on or changes self"),
        ("LlamaModel", "its forward takes no labels"),
    ],
)
def test_classes_with_a_head_of_their_own_are_refused_by_name(class_name, reason):
    model_class = getattr(transformers, class_name)
    forward = model_class.forward
    with pytest.raises(NotImplementedError, match=f"{class_name}: .*{reason}") as refusal:
        patch(model_class)
    # all get this advice: anything more specific would be right for one of these models and wrong for another
    assert str(refusal.value).endswith("leave it unpatched")
    assert model_class.forward is forward


TEXT_SOFTCAP = ("config", "get_text_config()", "final_logit_softcapping")


def test_every_language_model_named_in_the_guide_is_understood():
    expected = {
        "LlamaForCausalLM": Head("lm_head"),
        "Qwen2ForCausalLM": Head("lm_head"),
        "Qwen3ForCausalLM": Head("lm_head"),
        "Qwen3MoeForCausalLM": Head("lm_head"),
        "MistralForCausalLM": Head("lm_head"),
        "MixtralForCausalLM": Head("lm_head"),
        "Phi3ForCausalLM": Head("lm_head"),
        "Gemma2ForCausalLM": Head("lm_head", (), ("config", "final_logit_softcapping")),
        "Gemma3ForCausalLM": Head("lm_head", (), ("config", "final_logit_softcapping")),
        "GraniteForCausalLM": Head("lm_head", (("/", ("config", "logits_scaling")),)),
        "CohereForCausalLM": Head("lm_head", (("*", ("logit_scale",)),)),
        "Qwen2_5_VLForConditionalGeneration": Head("lm_head"),
        "Gemma3nForConditionalGeneration": Head("lm_head", (), TEXT_SOFTCAP),
        "Gemma4ForConditionalGeneration": Head("lm_head", (), TEXT_SOFTCAP),
        "PaliGemmaForConditionalGeneration": Head("lm_head", (), (*TEXT_SOFTCAP[:-1], "final_logit_softcapping?")),
        "RecurrentGemmaForCausalLM": Head("lm_head", (), ("config", "logits_soft_cap")),
        "T5GemmaForConditionalGeneration": Head("lm_head", (), ("get_decoder()", "config", "final_logit_softcapping")),
        "CohereCompassForConditionalGeneration": Head("lm_head", (("*?", ("logit_scale",)),)),
        "MambaForCausalLM": Head("lm_head"),
        "Mamba2ForCausalLM": Head("lm_head"),
        "BambaForCausalLM": Head("lm_head", unless=(("z_loss_coefficient",),)),
        "T5ForConditionalGeneration": Head("lm_head", cross_entropy=CrossEntropy()),
        "BartForConditionalGeneration": Head("lm_head", bias="final_logits_bias", cross_entropy=CrossEntropy()),
        "WhisperForConditionalGeneration": Head("proj_out", cross_entropy=CrossEntropy()),
        "BertForMaskedLM": Head("cls", cross_entropy=CrossEntropy()),
        "DistilBertForMaskedLM": Head("vocab_projector", cross_entropy=CrossEntropy(module="mlm_loss_fct")),
        "ModernBertForMaskedLM": Head("decoder"),
    }
    assert {name: read_head(getattr(transformers, name).forward) for name in expected} == expected


@pytest.mark.parametrize("model", [nn.Linear(2, 3), torch.compile(nn.Linear(2, 3)), nn.Linear])
def test_other_modules_are_refused(model):
    with pytest.raises(TypeError, match="expected a (class of )?Transformers model"):
        patch(model)


def test_of_a_wrapped_model_the_attribute_that_holds_it_is_named():
    model = torch.compile(make_model(), backend="eager")
    with pytest.raises(TypeError, match="got OptimizedModule; patch its ._orig_mod, before or after it is wrapped"):
        patch(model)
    patch(model._orig_mod)
    assert not has_logits(model._orig_mod(**make_batch()))


# ---------------------------------------------------------------- instances


def test_another_loss_function_is_refused():
    model = make_model()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    with pytest.raises(NotImplementedError, match="expected model.loss_function to be Transformers' ForCausalLMLoss"):
        patch(model)
    assert has_logits(model(**make_batch()))


def test_a_loss_function_set_after_patch_is_refused_not_ignored():
    model = patch(make_model())
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    with pytest.raises(NotImplementedError, match="expected model.loss_function"):
        model(**make_batch())


def test_a_refusal_is_short():
    # the repr of a bound method contains the whole model
    model = make_model()
    model.loss_function = model.get_decoder
    with pytest.raises(NotImplementedError) as refused:
        patch(model)
    assert "ForMaskedLMLoss, got " in str(refused.value) and len(str(refused.value)) < 500
    assert ".get_decoder (" in str(refused.value) and "modeling_utils.py:" in str(refused.value)
    model = make_model()
    model.forward = model.model.forward
    with pytest.raises(NotImplementedError) as refused:
        patch(model)
    assert "of its own, LlamaModel.forward (" in str(refused.value) and len(str(refused.value)) < 500


def test_a_term_of_the_loss_that_needs_the_logits_is_refused_where_it_is_on():
    config, batch = transformers.BambaConfig(**BAMBA, z_loss_coefficient=0.1), make_batch()
    model = transformers.BambaForCausalLM(config)
    with pytest.raises(NotImplementedError, match="BambaForCausalLM: self.z_loss_coefficient is 0.1, and above 0"):
        patch(model)
    model.z_loss_coefficient = 0.0
    check_same(loss_and_gradients(patch(copy.deepcopy(model)), **batch), loss_and_gradients(model, **batch))
    patch(model).z_loss_coefficient = 0.1
    with pytest.raises(NotImplementedError, match="self.z_loss_coefficient is 0.1"):
        model(**batch)


BAMBA = {**SIZES, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 1, "mamba_d_state": 4, "use_cache": False}
BAMBA |= {"num_hidden_layers": 1, "attn_layer_indices": [0]}


def test_a_cross_entropy_with_weights_of_its_own_is_refused():
    model = make_model("DistilBERT, loss that is a module")
    model.mlm_loss_fct = nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(NotImplementedError, match="expected self.mlm_loss_fct to be nn.CrossEntropyLoss"):
        patch(model)
    model.mlm_loss_fct = nn.CrossEntropyLoss()
    model.mlm_loss_fct.forward = lambda logits, labels: logits.square().mean()
    with pytest.raises(NotImplementedError, match="got one with a forward of its own"):
        patch(model)
    model.mlm_loss_fct = nn.CrossEntropyLoss(ignore_index=7)
    batch = make_batch()
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 7)
    expected = model(**batch).loss
    torch.testing.assert_close(patch(model)(**batch).loss, expected, rtol=1e-5, atol=0)


def test_a_transform_that_does_more_than_end_in_a_linear_layer_is_refused():
    config = transformers.MobileBertConfig(vocab_size=11, hidden_size=16, embedding_size=8, num_hidden_layers=1)
    with pytest.raises(NotImplementedError, match="MobileBertLMPredictionHead, .*it does something else"):
        patch(transformers.MobileBertForMaskedLM(config))


class ScaledLinear(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_that_is_more_than_a_linear_layer_is_refused(when):
    model = make_model()
    if when == "after":
        patch(model)
    model.lm_head = ScaledLinear(24, 101, bias=False)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM: expected its output embedding to be"):
        patch(model) if when == "before" else model(**make_batch())


def test_a_head_with_a_forward_of_its_own_is_refused():
    model = make_model()
    model.lm_head.forward = lambda input: 2 * nn.Linear.forward(model.lm_head, input)
    with pytest.raises(NotImplementedError, match="this Linear has a forward of its own"):
        patch(model)


def test_a_model_with_a_forward_of_its_own_is_refused():
    model = make_model()
    model.forward = lambda **kwargs: LlamaForCausalLM.forward(model, **kwargs)
    with pytest.raises(NotImplementedError, match="this LlamaForCausalLM has a forward of its own"):
        patch(model)


def test_a_head_of_another_size_than_the_vocabulary_is_refused():
    model = patch(make_model())
    model.lm_head = nn.Linear(24, SIZES["vocab_size"] + 3)
    with pytest.raises(ValueError, match=r"expected the head to have the 101 classes .* shape \(104, 24\)"):
        model(**make_batch())


def test_targets_dropped_by_a_wrapper_of_the_head_are_an_error():
    model = patch(make_model())
    model.lm_head.register_forward_pre_hook(lambda module, args, kwargs: (args, {}), with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"expected lm_head to return a loss of shape \(\), got \(3, 11, 101\)"):
        model(**make_batch())


def test_a_scale_that_is_no_number_is_refused():
    model = patch(make_model("Cohere"))
    model.logit_scale = nn.Parameter(torch.ones(()))
    with pytest.raises(NotImplementedError, match="expected self.logit_scale, .* to be a finite number"):
        model(**make_batch())
