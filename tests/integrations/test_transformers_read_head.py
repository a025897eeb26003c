"""What a forward does to its logits is read correctly from its source, or refused."""

import inspect

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from flce_ops.integrations.transformers.cross_entropy_call import CrossEntropy
from flce_ops.integrations.transformers.definition import NotUnderstood
from flce_ops.integrations.transformers.logit_steps import Head
from flce_ops.integrations.transformers.read_head import read_head
from torch import nn
from torch.nn import CrossEntropyLoss


class Forwards:
    """Forwards that are understood, with what is read from them; and others, with the words of the refusal."""

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

    def output_with_a_name(self, hidden, labels=None):
        logits = self.head(hidden)
        output = self.Output(loss=self.loss_function(logits, labels, 7), logits=logits)
        return output

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
    "output_with_a_name": Head("head"),
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


def test_a_forward_that_is_a_coroutine_is_refused():
    async def forward(self, hidden, labels=None):
        return self.head(hidden)

    with pytest.raises(NotUnderstood, match="its forward is not a plain function"):
        read_head(forward)
