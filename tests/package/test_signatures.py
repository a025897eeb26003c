"""Names, defaults and state dicts are torch's, so that the functions and modules stand in for torch's own."""

import inspect

import pytest
import torch.nn.functional as F
from torch import nn

import flce_ops

torch_has_one = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has the function")


@torch_has_one
def test_names_and_defaults_are_torchs_but_for_what_the_api_page_names():
    """docs/api.md names the exceptions: ignore_index is -100 here, None there; linear_bias may be positional."""
    ours, theirs = (
        inspect.signature(function).parameters for function in (flce_ops.linear_cross_entropy, F.linear_cross_entropy)
    )
    assert theirs.keys() <= ours.keys()
    common = [name for name in theirs if name in ours]
    assert [name for name in common if ours[name].default != theirs[name].default] == ["ignore_index"]
    assert (ours["ignore_index"].default, theirs["ignore_index"].default) == (-100, None)
    assert [name for name in common if ours[name].kind != theirs[name].kind] == ["linear_bias"]
    assert theirs["linear_bias"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours)[:3] == list(theirs)[:3] == ["input", "linear_weight", "target"]


def test_the_head_is_constructed_as_linear_but_without_a_bias():
    """README, A module: parameters and state dict are nn.Linear's; there is no bias unless asked for."""
    ours, theirs = (inspect.signature(made).parameters for made in (flce_ops.LinearCrossEntropyHead, nn.Linear))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [name for name in theirs if ours[name].default != theirs[name].default] == ["bias"]
    assert issubclass(flce_ops.LinearCrossEntropyHead, nn.Linear)
    for bias in (False, True):
        head, linear = flce_ops.LinearCrossEntropyHead(5, 7, bias=bias), nn.Linear(5, 7, bias=bias)
        shapes = [{name: value.shape for name, value in module.state_dict().items()} for module in (head, linear)]
        assert shapes[0] == shapes[1]
    assert list(flce_ops.LinearCrossEntropyHead(5, 7).state_dict()) == ["weight"]
