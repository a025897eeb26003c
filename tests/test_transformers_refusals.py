"""What patch refuses, and how it reads a forward. A model that it does not understand is left as it was."""

import copy
import inspect

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
from tiny_models import SIZES, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch import nn
from torch.nn import CrossEntropyLoss
from transformers import LlamaForCausalLM

from flce_ops.integrations.transformers import patch
from flce_ops.integrations.transformers.cross_entropy_call import CrossEntropy
from flce_ops.integrations.transformers.definition import NotUnderstood
from flce_ops.integrations.transformers.logit_steps import Head
from flce_ops.integrations.transformers.read_head import read_head
from flce_ops.integrations.transformers.transform_head import Inner, read_inner

# ---------------------------------------------------------------- models of Transformers


@pytest.mark.parametrize(
    "class_name,reason",
    [
        ("ProphetNetForCausalLM", "computes its loss by other means than one self.loss_function"),
        ("XLMWithLMHeadModel", "computes its loss by other means than one self.loss_function"),  # inside of its head
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
    assert str(refusal.value).endswith("leave it unpatched")  # what would be right for one of them is wrong for another
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
    # the repr of a bound method has the whole model in it
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


# ---------------------------------------------------------------- reading a forward


class Forwards:
    """Understood, with what is read; or not, with the reason's words."""

    def cap_in_one_line(self, hidden, labels=None):
        logits = self.head(hidden) * self.scale
        logits = self.config.cap * torch.tanh(logits / self.config.cap)
        loss = self.loss_function(logits, labels, self.vocab_size)
        return self.Output(loss=loss, logits=logits)

    def constants_and_casts(self, hidden, labels=None):
        logits = self.head(hidden).float()
        logits = 0.5 * logits / 3
        logits = logits.contiguous()
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return self.Output(loss=loss, logits=logits)

    def other_name(self, hidden, labels=None, return_dict=None):
        scores = self.decoder.norm(hidden)
        scores_of_words = self.embed_out(scores)
        loss = self.loss_function(scores_of_words, labels, self.vocab_size)
        if not return_dict:
            return (loss, scores_of_words)
        return self.Output(loss=loss, logits=scores_of_words)

    def cap_then_scale(self, hidden, labels=None):
        logits = self.head(hidden)
        logits = self.config.cap * torch.tanh(logits / self.config.cap) * self.scale
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def two_caps(self, hidden, labels=None):
        logits = self.head(hidden)
        logits = self.config.cap * torch.tanh(logits / self.config.other_cap)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def bias_on_logits(self, hidden, labels=None):
        logits = self.head(hidden) + self.bias
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def masked_in_place(self, hidden, labels=None):
        logits = self.head(hidden)
        logits[..., -1] = 0
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def changed_by_a_function(self, hidden, labels=None):
        logits = self.head(hidden)
        self.processor(logits)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def under_a_condition(self, hidden, labels=None):
        logits = self.head(hidden)
        if self.training:
            logits = logits * self.scale
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def cap_under_another_condition(self, hidden, labels=None):
        logits = self.head(hidden)
        if self.scale is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def changed_beside_the_loss(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            logits = logits * self.scale
            loss = self.loss_function(logits, labels, 7)
        return self.Output(loss=loss, logits=logits)

    def second_name(self, hidden, labels=None):
        logits = self.head(hidden)
        again = logits
        again[..., 0] = 0
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def part_of_the_logits(self, hidden, labels=None):
        logits = self.head(hidden)
        return self.Output(loss=self.loss_function(logits[:, 1:], labels, 7), logits=logits)

    def two_losses(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = self.loss_function(logits, labels, 7) + self.loss_function(logits, labels.flip(0), 7)
        return self.Output(loss=loss, logits=logits)

    def two_heads(self, hidden, labels=None):
        logits = self.head(hidden) / self.head(hidden)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def entropy_after_the_loss(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = self.loss_function(logits, labels, 7)
        loss = loss - logits.softmax(-1).log().mean()
        return self.Output(loss=loss, logits=logits)

    def weight_of_the_head(self, hidden, labels=None):
        logits = self.head(hidden.to(self.head.weight.dtype))
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def weights_data(self, hidden, labels=None):
        logits = self.head(hidden + self.head.weight.mean())
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def names_for_paths(self, hidden, labels=None):
        config = self.config.get_text_config()
        cap = getattr(config, "cap", None)
        logits = self.head(hidden)
        if (scale := self.get_decoder().config.scale) is not None:
            logits = scale * logits
        if cap is not None:
            logits = F.tanh(logits / cap) * cap
        output = self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)
        return output

    def name_assigned_twice(self, hidden, labels=None):
        cap = self.config.cap
        if self.training:
            cap = 3.0
        logits = self.head(hidden)
        logits = torch.tanh(logits / cap) * cap
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def name_changed_in_place(self, hidden, labels=None):
        scale = self.scale
        scale *= 2
        logits = self.head(hidden) * scale
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def name_that_is_an_argument(self, hidden, labels=None, scale=None):
        logits = self.head(hidden) * scale
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def path_with_another_default(self, hidden, labels=None):
        logits = self.head(hidden) * getattr(self.config, "scale", 2.0)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def tanh_of_another_module(self, hidden, labels=None):
        logits = self.head(hidden)
        logits = nn.tanh(logits / 3) * 3
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def bias_then_scale(self, hidden, labels=None):
        logits = self.scale * (self.bias.to(hidden.device) + self.head(hidden))
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def scale_then_bias(self, hidden, labels=None):
        logits = self.head(hidden) * self.scale + self.bias
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def bias_used_twice(self, hidden, labels=None):
        logits = self.head(hidden + self.bias.sum()) + self.bias
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def another_head_first(self, hidden, labels=None):
        logits = self.norm(hidden)
        logits = self.head(logits)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def term_above_zero(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = self.loss_function(logits, labels, 7)
        if self.config.z_loss > 0:
            loss = loss + self.config.z_loss * logits.logsumexp(-1).square().mean()
        return self.Output(loss=loss, logits=logits)

    def term_below_zero(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = self.loss_function(logits, labels, 7)
        if self.config.z_loss < 0:
            loss = loss + self.config.z_loss * logits.logsumexp(-1).square().mean()
        return self.Output(loss=loss, logits=logits)

    def term_otherwise(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = self.loss_function(logits, labels, 7)
        if self.config.z_loss > 0:
            pass
        else:
            loss = loss + logits.logsumexp(-1).square().mean()
        return self.Output(loss=loss, logits=logits)

    def used_with_return_dict(self, hidden, labels=None, return_dict=None):
        logits = self.head(hidden)
        loss = self.loss_function(logits, labels, 7)
        if not return_dict:
            return (loss, logits)
        else:
            loss = loss + logits.sum()
        return self.Output(loss=loss, logits=logits)

    def own_cross_entropy(self, hidden, labels=None):
        scores = self.head(hidden)
        criterion = nn.CrossEntropyLoss(ignore_index=-7)
        labels = labels.to(scores.device)
        loss = criterion(scores.view(-1, scores.size(-1)), labels.reshape(-1))
        return self.Output(loss=loss, logits=scores)

    def own_functional_cross_entropy(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.view(-1, self.config.vocab_size), labels.view(-1))
        return self.Output(loss=loss, logits=logits)

    def own_cross_entropy_with_smoothing(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, 7), labels.view(-1))
        return self.Output(loss=loss, logits=logits)

    def own_cross_entropy_of_one_or_the_other(self, hidden, labels=None):
        logits = self.head(hidden)
        criterion = CrossEntropyLoss()
        if self.training:
            criterion = CrossEntropyLoss(label_smoothing=0.1)
        return self.Output(loss=criterion(logits.view(-1, 7), labels.view(-1)), logits=logits)

    def own_cross_entropy_shifted(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = CrossEntropyLoss()(logits[:, :-1].view(-1, 7), labels[:, 1:].view(-1))
        return self.Output(loss=loss, logits=logits)

    def own_cross_entropy_of_other_rows(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = CrossEntropyLoss()(logits.view(-1, len(logits)), labels.view(-1))
        return self.Output(loss=loss, logits=logits)

    def two_cross_entropies(self, hidden, labels=None):
        logits = self.head(hidden)
        loss = CrossEntropyLoss()(logits.view(-1, 7), labels.view(-1))
        loss = loss + CrossEntropyLoss()(logits.view(-1, 7), labels.flip(0).view(-1))
        return self.Output(loss=loss, logits=logits)

    def changes_self(self, hidden, labels=None):
        self.seen = logits = self.head(hidden)
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)

    def passes_self(self, hidden, labels=None):
        logits = self.head(scale_of(self, hidden))
        return self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)


def scale_of(model, hidden):
    return hidden


UNDERSTOOD = {
    "cap_in_one_line": Head("head", (("*", ("scale",)),), ("config", "cap")),
    "constants_and_casts": Head("head", (("*", 0.5), ("/", 3.0))),
    "other_name": Head("embed_out"),
    "weight_of_the_head": Head("head"),
    "names_for_paths": Head(
        "head", (("*?", ("get_decoder()", "config", "scale")),), ("config", "get_text_config()", "cap?")
    ),
    "bias_on_logits": Head("head", bias="bias"),
    "bias_then_scale": Head("head", (("*", ("scale",)),), bias="bias"),
    "another_head_first": Head("head"),
    "term_above_zero": Head("head", unless=(("config", "z_loss"),)),
    "own_cross_entropy": Head("head", cross_entropy=CrossEntropy(ignore_index=-7)),
    "own_functional_cross_entropy": Head("head", cross_entropy=CrossEntropy()),
}


@pytest.mark.parametrize("name", [name for name, _ in inspect.getmembers(Forwards, inspect.isfunction)])
def test_a_forward_is_read_right_or_refused(name):
    forward = getattr(Forwards, name)
    if name in UNDERSTOOD:
        assert read_head(forward) == UNDERSTOOD[name]
    else:
        with pytest.raises(NotUnderstood):
            read_head(forward)


def test_a_forward_without_source_is_refused():
    namespace = {}
    exec("def forward(self, hidden, labels=None): pass", namespace)
    with pytest.raises(NotUnderstood, match="the source of its forward cannot be read"):
        read_head(namespace["forward"])


class Transforms:
    """Heads that end in a linear layer, and some that do not."""

    def in_steps(self, features, **kwargs):
        x = self.norm(F.gelu(self.dense(features)))
        x = self.decoder(x)
        scores = x
        return scores

    def in_one_line(self, features):
        return self.decoder(self.norm(features))

    def with_bias(self, features):
        x = self.decoder(features) + self.bias
        return x

    def scaled(self, features):
        return 2 * self.decoder(features)

    def changed_in_place(self, features):
        x = self.decoder(features)
        x += self.bias
        return x

    def changed_by_a_function(self, features):
        x = self.decoder(features)
        self.processor(x)
        return x

    def under_a_condition(self, features):
        x = self.decoder(features)
        if self.training:
            x = self.dropout(x)
        return x

    def returned_early(self, features):
        if self.training:
            return features
        return self.decoder(features)

    def twice(self, features):
        return self.decoder(self.decoder(features))

    def weight_too(self, features):
        return self.decoder(features * self.decoder.weight.mean())

    def of_two_inputs(self, features, embeddings):
        return self.decoder(features, embeddings)

    def tuple_of_scores(self, features):
        return (self.decoder(features),)

    def passes_self(self, features):
        return self.decoder(scale_of(self, features))


TRANSFORMS = {"in_steps": Inner("decoder"), "in_one_line": Inner("decoder"), "with_bias": Inner("decoder", "bias")}


@pytest.mark.parametrize("name", [name for name, _ in inspect.getmembers(Transforms, inspect.isfunction)])
def test_a_transform_is_read_right_or_refused(name):
    forward = getattr(Transforms, name)
    if name in TRANSFORMS:
        assert read_inner(forward) == TRANSFORMS[name]
    else:
        with pytest.raises(NotUnderstood):
            read_inner(forward)
