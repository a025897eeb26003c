"""Heads that end in a linear layer: their transform is read correctly from its source, or refused."""

import inspect

import pytest

pytest.importorskip("transformers")

import torch.nn.functional as F
from flce_ops.integrations.transformers.definition import NotUnderstood
from flce_ops.integrations.transformers.transform_head import Inner, read_inner
from test_transformers_read_head import scale_of


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

    def with_a_number(self, features):
        return self.decoder(features) + 1.0

    def with_a_bias_of_another_module(self, features):
        return self.decoder(features) + self.norm.bias

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
