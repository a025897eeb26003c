"""LinearCrossEntropyLoss has the arguments, numbers, parameters and state dicts of torch's module of that name."""

# N tokens, D hidden, V vocabulary

import inspect

import pytest
import torch
from test_modules import D, V
from torch import nn

from flce_ops import LinearCrossEntropyLoss

pytestmark = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has no LinearCrossEntropyLoss")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("out_features", [(), (2, 3)])
def test_strict_state_dicts_are_exchanged_with_torchs(out_features, weighted, bias):
    def pair(weight):
        return [
            module(D, V, bias=bias, weight=weight.clone() if weighted else None, out_features=out_features)
            for module in (LinearCrossEntropyLoss, nn.LinearCrossEntropyLoss)
        ]

    for giver, taker in (pair(torch.rand(V)), reversed(pair(torch.rand(V)))):
        taker.load_state_dict(giver.state_dict(), strict=True)
        assert list(taker.state_dict()) == list(giver.state_dict())
        for name, tensor in giver.state_dict().items():
            assert torch.equal(taker.state_dict()[name], tensor)


def test_the_constructor_takes_what_torchs_does_in_the_same_way():
    ours, theirs = (
        inspect.signature(module).parameters for module in (LinearCrossEntropyLoss, nn.LinearCrossEntropyLoss)
    )
    assert theirs.keys() <= ours.keys()
    of_sparse = {"gradient_threshold", "gradient_mode", "gradient_sparse"}
    assert ours.keys() - theirs.keys() == {"softcap", "logit_scale", "z_loss", *of_sparse}
    common = ours.keys() & theirs.keys()
    assert {name for name in common if ours[name].kind != theirs[name].kind} == set()
    assert {name for name in common if ours[name].default != theirs[name].default} == {"ignore_index"}
    assert (ours["ignore_index"].default, theirs["ignore_index"].default) == (-100, None)  # both mean the same
    positional = [name for name in theirs if theirs[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [name for name in ours if ours[name].kind is not inspect.Parameter.KEYWORD_ONLY] == positional


def test_parameters_start_as_torchs_do():
    torch.manual_seed(0)
    ours = LinearCrossEntropyLoss(D, V, bias=True)
    torch.manual_seed(0)
    theirs = nn.LinearCrossEntropyLoss(D, V, bias=True)
    assert torch.equal(ours.linear.weight, theirs.linear.weight)
    assert torch.equal(ours.linear.bias, theirs.linear.bias)


# the wrong argument, arguments, error, words
