"""What patch refuses, and what a refused model does. A model that patch does not understand keeps its own forward."""

import copy

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tiny_models import SIZES, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch import nn
from transformers import LlamaForCausalLM

from flce_ops.integrations.transformers import patch

# ---------------------------------------------------------------- models of Transformers


@pytest.mark.parametrize("class_name", ["LlamaModel", "Qwen2_5OmniTalkerForConditionalGeneration"])
def test_a_class_without_labels_is_refused_by_name(class_name):
    model_class = getattr(transformers, class_name)
    forward = model_class.forward
    with pytest.raises(NotImplementedError, match=f"{class_name}: its forward takes no labels; leave the model unp"):
        patch(model_class)
    assert model_class.forward is forward


REFUSED = {
    "ProphetNetForCausalLM": ({"num_decoder_layers": 1, "num_decoder_attention_heads": 2}, "`transpose`"),
    "XLMWithLMHeadModel": ({"emb_dim": 24, "n_heads": 2, "n_layers": 1}, "to call its head with hidden states alone"),
    "MobileBertForMaskedLM": (
        {"embedding_size": 8, "intra_bottleneck_size": 24, "num_hidden_layers": 1},
        "got transformers.models.mobilebert.modeling_mobilebert.MobileBertLMPredictionHead, whose result is not",
    ),
}


@pytest.mark.parametrize("class_name", REFUSED)
def test_a_model_that_needs_its_logits_is_refused_by_name(class_name):
    sizes, words = REFUSED[class_name]
    model_class = getattr(transformers, class_name)
    model, batch = (
        model_class(model_class.config_class(**{"vocab_size": 101, "hidden_size": 24, **sizes})),
        make_batch(),
    )
    with pytest.raises(NotImplementedError, match=f"{words}.*leave the model unpatched"):
        patch(model)(**batch)
    del batch["labels"]
    assert has_logits(model(**batch))


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


def test_a_loss_function_that_needs_logits_is_refused_not_ignored():
    model = patch(make_model())
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM: its forward uses its logits .*: `square`; leave"):
        model(**make_batch())


def test_another_loss_function_that_is_a_cross_entropy_is_computed():
    def smoothed(logits, labels, vocab_size, **kwargs):
        logits, labels = logits[..., :-1, :].float().reshape(-1, vocab_size), labels[..., 1:].reshape(-1)
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum") / 7

    model, batch = make_model(), make_batch()
    model.loss_function = smoothed
    theirs = loss_and_gradients(model, **batch)
    check_same(loss_and_gradients(patch(model), **batch), theirs)
    assert not has_logits(model(**batch))


def test_a_refusal_is_short():
    # the repr of a bound method contains the whole model
    model = make_model()
    model.forward = model.model.forward
    with pytest.raises(NotImplementedError) as refused:
        patch(model)
    assert "of its own, LlamaModel.forward (" in str(refused.value) and len(str(refused.value)) < 500


def test_a_term_of_the_loss_that_needs_the_logits_is_refused_where_it_is_on():
    config, batch = transformers.BambaConfig(**BAMBA, z_loss_coefficient=0.0), make_batch()
    model = transformers.BambaForCausalLM(config)
    check_same(loss_and_gradients(patch(copy.deepcopy(model)), **batch), loss_and_gradients(model, **batch))
    patch(model).z_loss_coefficient = 0.1
    with pytest.raises(NotImplementedError, match="BambaForCausalLM: its forward uses its logits for .* `logsumexp`"):
        model(**batch)


BAMBA = {**SIZES, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 1, "mamba_d_state": 4, "use_cache": False}
BAMBA |= {"num_hidden_layers": 1, "attn_layer_indices": [0]}


def test_a_cross_entropy_module_keeps_its_options():
    model, batch = make_model("DistilBERT, loss that is a module"), make_batch()
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 7)
    weight = torch.linspace(0.5, 2.0, 101)
    model.mlm_loss_fct = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, ignore_index=7)
    theirs = loss_and_gradients(model, **batch)
    check_same(loss_and_gradients(patch(model), **batch), theirs)
    assert not has_logits(model(**batch))
    model.mlm_loss_fct = nn.CrossEntropyLoss()
    model.mlm_loss_fct.forward = lambda logits, labels: logits.square().mean()
    with pytest.raises(NotImplementedError, match="`square`"):
        model(**batch)


class Squared(nn.Linear):
    def forward(self, input):
        return super().forward(input) ** 2


class Quantized(nn.Linear):
    def forward(self, input):
        return input @ self.weight.T.round()


@pytest.mark.parametrize("kind", [Squared, Quantized])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_that_is_more_than_a_linear_layer_is_refused(when, kind):
    model = make_model()
    if when == "after":
        patch(model)
    model.lm_head = kind(24, 101, bias=False)
    with pytest.raises((NotImplementedError, TypeError)) as refused:
        patch(model)(**make_batch())
    if kind is Quantized:
        assert "expected the output embedding to be an nn.Linear" in str(refused.value)


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
    with pytest.raises(ValueError, match=r"expected the head to have the 101 classes .* shape \(3, 11, 104\)"):
        model(**make_batch())


def test_targets_dropped_by_a_wrapper_of_the_head_are_an_error():
    model = patch(make_model())
    model.lm_head.register_forward_pre_hook(lambda module, args, kwargs: (args, {}), with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"expected its head to return a loss of shape \(\), got \(3, 11, 101\)"):
        model(**make_batch())


def test_a_scale_that_is_no_number_is_refused():
    model = patch(make_model("Cohere"))
    model.logit_scale = 0.0
    with pytest.raises(NotImplementedError, match="a scale that is no finite number other than 0: 0.0"):
        model(**make_batch())


# ---------------------------------------------------------------- operations on logits in hand-written code
