"""The tests' reference: the loss by its definition equals F.cross_entropy(F.linear(...)) in float64."""

import pytest
import torch
import torch.nn.functional as F
from inputs import SMALL, make_inputs
from reference_loss import error, plain_loss, reference_loss, run


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_reference_is_cross_entropy_of_linear(reduction, weight, label_smoothing):
    inputs = make_inputs(SMALL, dtype=torch.float64, bias=True, weight=weight)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}

    def core(input, linear_weight, target, linear_bias, **kwargs):
        return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **kwargs)

    expected, found = run(core, inputs, **options), run(reference_loss, inputs, **options)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_plain_torch_in_float64_is_the_reference(reduction):
    inputs = make_inputs(
        SMALL, dtype=torch.float64, bias=True, weight=True, token_weight=True, normalizer=reduction == "sum"
    )
    options = {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.7, "z_loss": 1e-2, "reduction": reduction}
    expected, found = run(reference_loss, inputs, **options), run(plain_loss, inputs, **options)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-13, name
