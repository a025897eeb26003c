"""What patch refuses, and how it reads a forward. A model that it does not understand is left as it was."""

import inspect

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tiny_models import SIZES, has_logits, make_batch, make_model
from torch import nn
from transformers import LlamaForCausalLM

from flce_ops.integrations.transformers import patch
from flce_ops.integrations.transformers.read_head import Head, NotUnderstood, read_head

# ---------------------------------------------------------------- models of Transformers


@pytest.mark.parametrize(
    "class_name,reason",
    [
        ("T5ForConditionalGeneration", "computes its loss by other means than one self.loss_function"),
        ("BambaForCausalLM", "uses its logits beside the loss: `z_loss = logits.logsumexp"),
        ("ChameleonForConditionalGeneration", r"neither a scale nor a softcap: `logits\[:, :, image_tokens\] ="),
        ("BertForMaskedLM", "computes its loss by other means"),
        ("LlamaForSequenceClassification", "its forward passes on or changes self"),
        ("LlamaModel", "its forward takes no labels"),
    ],
)
def test_classes_with_a_head_of_their_own_are_refused_by_name(class_name, reason):
    model_class = getattr(transformers, class_name)
    forward = model_class.forward
    with pytest.raises(NotImplementedError, match=f"{class_name}: .*{reason}"):
        patch(model_class)
    assert model_class.forward is forward


def test_every_causal_language_model_named_in_the_guide_is_understood():
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
    }
    assert {name: read_head(getattr(transformers, name).forward) for name in expected} == expected


@pytest.mark.parametrize("model", [nn.Linear(2, 3), torch.compile(nn.Linear(2, 3)), nn.Linear])
def test_other_modules_are_refused(model):
    with pytest.raises(TypeError, match="expected a (class of )?Transformers model"):
        patch(model)


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
