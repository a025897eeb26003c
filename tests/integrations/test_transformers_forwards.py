"""What a forward does to its logits is done to the loss, or refused at the first loss. Forwards of a small model."""

import copy
import inspect

import numpy
import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from tiny_models import check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch import nn
from torch.nn import CrossEntropyLoss
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput as Output

from flce_ops.integrations.transformers import patch, unpatch

V, D = 11, 7


class Config(PreTrainedConfig):
    model_type = "toy"
    cap, scale, z_loss, vocab_size = 2.0, 3.0, 0.0, V


class Toy(PreTrainedModel):
    config_class = Config

    def __init__(self, config=None):
        super().__init__(config or Config())
        self.embed = nn.Embedding(V, D)
        self.head = nn.Linear(D, V, bias=False)
        self.bias = nn.Parameter(torch.randn(V))
        self.learnt = nn.Parameter(torch.tensor(1.3))
        self.of_classes = nn.Parameter(torch.linspace(0.5, 2.0, V))
        self.scale, self.seen = 0.7, None
        self.post_init()
        nn.init.normal_(self.head.weight), nn.init.normal_(self.embed.weight)

    def _init_weights(self, module):
        pass

    def get_output_embeddings(self):
        return self.head


def shifted(logits, labels):
    return logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()


class Understood:
    """Forwards whose loss is the operator's."""

    def cap_in_one_line(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids)) * self.scale
        logits = self.config.cap * torch.tanh(logits / self.config.cap)
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def cap_in_steps(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        if self.config.cap is not None:
            logits = logits / self.config.cap
            logits = F.tanh(logits)
            logits = logits * self.config.cap
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def constants_and_casts(self, input_ids, labels=None):
        logits = 0.5 * self.head(self.embed(input_ids)).float() / 3
        logits = logits.contiguous().to(torch.float32).to(labels.device)
        return Output(loss=self.loss_function(logits=logits, labels=labels, vocab_size=V), logits=logits)

    def bias_then_scale(self, input_ids, labels=None):
        logits = self.scale * (self.bias.to(input_ids.device) + self.head(self.embed(input_ids)))
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def scale_then_bias(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids)) * self.scale + self.bias
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def scale_of_numpy_and_in_place(self, input_ids, labels=None):
        logits = self.learnt.exp() * self.head(self.embed(input_ids)) * numpy.float32(1.5)
        logits /= self.learnt
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def older_product(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        product = 3.0 * logits
        logits *= 2.0
        return Output(loss=self.loss_function(product, labels, V), logits=product)

    def cap_of_a_learnt_scale(self, input_ids, labels=None):
        logits = 3.0 * torch.tanh(self.head(self.embed(input_ids)) * self.learnt / 3.0)
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def learnt_scales(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids)) * self.learnt * self.of_classes
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    def shape_of_the_logits(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        assert logits.shape == (*input_ids.shape, V) and logits.size(1) == input_ids.size(1) == len(logits[0])
        assert logits.device == input_ids.device and logits.dtype == torch.float32 and logits.dim() == 3
        return Output(loss=self.loss_function(logits, labels, vocab_size=logits.shape[-1]), logits=logits)

    def size_of_the_head(self, input_ids, labels=None):
        hidden = self.embed(input_ids).to(self.head.weight.dtype)
        logits = self.head(hidden)
        return Output(loss=self.loss_function(logits, labels, vocab_size=self.head.out_features), logits=logits)

    def fewer_classes(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))[..., : V - 2]
        return Output(loss=self.loss_function(logits, labels.clamp(max=V - 3), logits.shape[-1]), logits=logits)

    def shift_of_its_own(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids)).float()
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss_fct = CrossEntropyLoss()
        loss = loss_fct(shift_logits.view(-1, self.config.vocab_size), shift_labels.view(-1))
        return Output(loss=loss, logits=logits)

    def shift_in_a_function(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        shift_logits, shift_labels = shifted(logits, labels)
        loss = F.cross_entropy(shift_logits.reshape(-1, shift_logits.size(-1)), shift_labels.reshape(-1))
        return Output(loss=loss, logits=logits)

    def tokens_by_a_mask(self, input_ids, labels=None):
        logits, kept = self.head(self.embed(input_ids)), input_ids[:, 1:] > 2
        loss = CrossEntropyLoss()(logits[..., :-1, :][kept].contiguous(), labels[..., 1:][kept])
        return Output(loss=loss, logits=logits)

    def tokens_by_numbers(self, input_ids, labels=None):
        logits, at = self.head(self.embed(input_ids)), torch.tensor([0, 2, 3])
        return Output(loss=F.cross_entropy(logits[:, at].view(-1, V), labels[:, at].reshape(-1)), logits=logits)

    def one_token(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        return Output(loss=F.cross_entropy(logits[:, -2], labels[:, -1]), logits=logits)

    def loss_of_each_token(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        weight = torch.linspace(1.0, 2.0, labels.numel())
        losses = F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction="none")
        return Output(loss=(losses * weight).sum() / weight.sum(), logits=logits)

    def class_weights_and_smoothing(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        criterion = CrossEntropyLoss(weight=self.of_classes.detach(), label_smoothing=0.1)
        return Output(loss=criterion(logits.view(-1, V), labels.view(-1)), logits=logits)

    def two_losses(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        loss = self.loss_function(logits, labels, V) + 0.5 * self.loss_function(logits, labels.flip(0), V)
        return Output(loss=loss, logits=logits)

    def two_names(self, input_ids, labels=None):
        scores = again = self.head(self.embed(input_ids))
        loss = self.loss_function(again, labels, V)
        return Output(loss=loss, logits=scores * 2)

    def helper_that_gets_self(self, input_ids, labels=None):
        logits = head_of(self)(self.embed(input_ids))
        self.seen = input_ids
        return Output(loss=loss_of(self, logits, labels), logits=logits)

    def term_that_is_off(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        loss = self.loss_function(logits, labels, V)
        if self.config.z_loss > 0:
            loss = loss + logits.logsumexp(-1).square().mean()
        return Output(loss=loss, logits=logits)

    def tuple_of_its_own(self, input_ids, labels=None, return_dict=None):
        logits = self.head(self.embed(input_ids))
        loss = self.loss_function(logits, labels, V)
        return (loss, logits) if return_dict is False else Output(loss=loss, logits=logits)


def head_of(model):
    return model.head


def loss_of(model, logits, labels):
    return model.loss_function(logits, labels, V)


class Refused:
    """Forwards that need their logits, with words of the refusal."""

    def cap_then_scale(self, logits, labels):
        return torch.tanh(logits / 2) * 2 * self.scale, "a scale after a softcap"

    def two_caps(self, logits, labels):
        return 2 * torch.tanh(logits / 3), "which is no softcap"

    def tanh_alone(self, logits, labels):
        return torch.tanh(logits), "a tanh that is not part of a softcap"

    def tanh_without_its_factor(self, logits, labels):
        return torch.tanh(logits / 3), "a tanh that is not part of a softcap"

    def zero(self, logits, labels):
        return logits * 0, "no finite number other than 0: 0"

    def not_finite(self, logits, labels):
        return logits / float("inf"), "no finite number other than 0: inf"

    def bias_of_tokens(self, logits, labels):
        return logits + self.embed(labels.clamp(min=0)).sum(-1, keepdim=True), "a sum with"

    def scale_of_tokens(self, logits, labels):
        return logits * self.embed(labels.clamp(min=0)).sum(-1, keepdim=True), "a factor of shape"

    def last_classes(self, logits, labels):
        return logits[..., 1:], "an index of classes"

    def one_class(self, logits, labels):
        return logits[..., 0], "an index of classes"

    def softmax(self, logits, labels):
        return logits.softmax(-1), "`softmax`"

    def function_of_torch(self, logits, labels):
        return torch.softmax(logits, -1), "`softmax`"

    def clamp(self, logits, labels):
        return logits.clamp(-1, 1), "`clamp`"

    def where(self, logits, labels):
        return torch.where(labels[..., None] > 1, logits, 0.0), "`where`"

    def power(self, logits, labels):
        return logits**2, None

    def difference(self, logits, labels):
        return logits - 1.0, "`__sub__`"

    def negative(self, logits, labels):
        return -logits, "`__neg__`"

    def comparison(self, logits, labels):
        return logits * (logits > 0), "`__gt__`"

    def tokens_joined(self, logits, labels):
        return torch.cat([logits[:, :4], logits[:, 4:]], 1), "`cat`"

    def sum_with_a_factor(self, logits, labels):
        return torch.add(logits, torch.ones(V), alpha=2), "`add`"

    def quotient_rounded(self, logits, labels):
        return torch.div(logits, 2, rounding_mode="floor"), "`div`"

    def alias_changed_in_place(self, logits, labels):
        alias = logits.view(logits.shape)
        logits *= 2.0
        return alias, "which were changed in place"

    def integers(self, logits, labels):
        return logits.to(torch.int64), "a cast to torch.int64"

    def masked_in_place(self, logits, labels):
        logits[..., -1] = 0
        return logits, None

    def scaled_in_place(self, logits, labels):
        return logits.mul_(2), "`mul_`"

    def transposed(self, logits, labels):
        return logits.transpose(1, 2), "`transpose`"

    def probabilities(self, logits, labels):
        probs = F.one_hot(labels.clamp(min=0), V).float()
        return F.cross_entropy(logits.view(-1, V), probs.view(-1, V)), "probabilities as targets"


def toy(forward):
    return type("Toy", (Toy,), {"forward": forward, "__module__": __name__})()


def batch():
    labels = torch.randint(V, (3, 5))
    labels[0, :2] = -100
    return {"input_ids": torch.randint(V, (3, 5)), "labels": labels}


def members(cls):
    return [name for name, _ in inspect.getmembers(cls, inspect.isfunction)]


@pytest.mark.parametrize("name", members(Understood))
def test_the_loss_is_that_of_the_models_own_code(name):
    model, inputs = toy(getattr(Understood, name)), batch()
    theirs = loss_and_gradients(model, **inputs)
    ours = loss_and_gradients(patch(model), **inputs)
    check_same(ours, theirs)
    assert not has_logits(model(**inputs))
    if name == "helper_that_gets_self":
        assert model.seen is inputs["input_ids"]


@pytest.mark.parametrize("name", members(Understood))
def test_logits_beside_the_loss_are_those_of_the_models_own_code(name):
    model, inputs = toy(getattr(Understood, name)).eval(), batch()
    expected = model(**inputs)
    found = patch(model, eval_logits=True)(**inputs)
    assert torch.equal(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", members(Refused))
def test_what_needs_the_logits_is_refused_at_the_first_loss(name):
    change, words = getattr(Refused, name), None

    def forward(self, input_ids, labels=None):
        nonlocal words
        logits, words = change(self, self.head(self.embed(input_ids)), labels)
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    model, inputs = toy(forward), batch()
    _, words = change(model, torch.ones(3, 5, V), inputs["labels"])  # the words, which come after what is refused
    with pytest.raises((NotImplementedError, TypeError), match=words and f"(?s){words}.*unpatched"):
        patch(model)(**inputs)
    assert not vars(model)["_flce_stand_in"].call  # a later call without labels is the model's own
    unpatch(model)


def test_a_loss_by_other_means_is_refused_not_computed_from_logits():
    def forward(self, input_ids, labels=None):
        logits = F.linear(self.embed(input_ids), self.head.weight)
        return Output(loss=self.loss_function(logits, labels, V), logits=logits)

    with pytest.raises(NotImplementedError, match="Toy: expected its loss to be a cross-entropy of what its output"):
        patch(toy(forward))(**batch())


def test_a_head_without_targets_returns_what_it_returned():
    def forward(self, input_ids, labels=None):
        return Output(logits=self.head(self.embed(input_ids)))

    model, inputs = toy(forward), batch()
    assert torch.equal(patch(model)(input_ids=inputs["input_ids"]).logits, model.head(model.embed(inputs["input_ids"])))


def test_a_model_without_an_output_embedding_is_refused():
    config = make_model().config
    config.num_labels = 2
    with pytest.raises(NotImplementedError, match="LlamaForSequenceClassification: expected an output embedding"):
        patch(LlamaForSequenceClassification(config))


# ---------------------------------------------------------------- models made of models


class Subclass(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * self.lm_head.weight.square().mean()
        return output


@pytest.mark.parametrize("of_class", [False, True])
def test_a_forward_that_calls_super(of_class):
    model, inputs = Subclass(make_model().config), make_batch()
    theirs = loss_and_gradients(model, **inputs)
    patch(Subclass if of_class else model)
    try:
        check_same(loss_and_gradients(model, **inputs), theirs)
        assert model.calls == 2 and not has_logits(model(**inputs))
    finally:
        unpatch(Subclass if of_class else model)
    assert has_logits(model(**inputs))


class Outer(PreTrainedModel):
    """A model for images and the like: the head is that of the language model inside."""

    config_class, _supports_sdpa = type(make_model().config), True

    def __init__(self, config):
        super().__init__(config)
        self.language_model = LlamaForCausalLM(config)
        self.post_init()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def forward(self, input_ids, attention_mask=None, labels=None, inner_loss=False):
        if inner_loss:
            found = self.language_model(input_ids, attention_mask=attention_mask, labels=labels)
            return Output(loss=found.loss, logits=found.logits, hidden_states=(found,))
        found = self.language_model(input_ids, attention_mask=attention_mask)
        loss = self.loss_function(logits=found[0], labels=labels, vocab_size=self.config.vocab_size)
        return Output(loss=loss, logits=found[0])


@pytest.mark.parametrize("inner_loss", [False, True])
def test_a_model_whose_head_is_inside_of_another_model(inner_loss):
    model, inputs = Outer(make_model().config), make_batch() | {"inner_loss": inner_loss}
    theirs = loss_and_gradients(model, **inputs)
    check_same(loss_and_gradients(patch(model), **inputs), theirs)
    assert not has_logits(model(**inputs))
    copied = copy.deepcopy(model)
    check_same(loss_and_gradients(copied, **inputs), theirs)
    assert copied.language_model is not model.language_model and not has_logits(copied(**inputs))
    unpatch(model)
    assert has_logits(model(**inputs)) and has_logits(model.language_model(inputs["input_ids"]))
    assert not any(name.startswith("_flce") for module in model.modules() for name in vars(module))
    patch(model.language_model)
    unpatch(patch(model))
    assert has_logits(model(**inputs)) == (not inner_loss)  # the inner model was patched by itself
    assert not has_logits(model.language_model(**make_batch()))


class ScaledHead(nn.Linear):
    """As Dory's: a learnt scale of each class."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.logit_scale = nn.Parameter(torch.linspace(0.5, 1.5, self.out_features))

    def forward(self, hidden):
        return super().forward(hidden) * (self.logit_scale.float() * 2.0)


class TransformHead(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.dense, self.decoder = nn.Linear(sizes[0], sizes[0]), nn.Linear(*sizes)
        self.bias = nn.Parameter(torch.randn(sizes[1]))

    def forward(self, hidden):
        return 0.5 * (self.decoder(F.gelu(self.dense(hidden))) + self.bias)


@pytest.mark.parametrize("kind", [ScaledHead, TransformHead])
def test_a_head_with_code_of_its_own(kind):
    model, inputs = toy(Understood.cap_in_one_line), batch()
    model.head = kind(D, V)
    model.get_output_embeddings = lambda: getattr(model.head, "decoder", model.head)
    theirs = loss_and_gradients(model, **inputs)
    check_same(loss_and_gradients(patch(model), **inputs), theirs)
    assert not has_logits(model(**inputs))
