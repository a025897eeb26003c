"""acc_policy="accurate" of torch.nn.LinearCrossEntropyOptions: on a CPU, float32 copies of 16-bit operands."""

# N tokens, D hidden, V vocabulary

import warnings

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs
from reference_loss import error, reference_loss
from test_compile import compiled
from torch import nn

import flce_ops

if not hasattr(nn, "LinearCrossEntropyOptions"):
    pytest.skip("torch 2.13 has the options", allow_module_level=True)

SHAPE = (61, 37, 131)
HALF = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a gradient that is rounded once
ACCURATE = nn.LinearCrossEntropyOptions(acc_policy="accurate")
LEAVES = ("input", "linear_weight", "linear_bias")


def loss_and_gradients(function, inputs, **options):
    loss = function(*inputs.args, **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), [getattr(inputs, name) for name in LEAVES])


WAYS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0, "logit_scale": 1.3, "z_loss": 1e-2},
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_losses_have_float32s_error_and_gradients_are_rounded_once(way, dtype):
    inputs = make_inputs(SHAPE, dtype=dtype, bias=True)
    found = loss_and_gradients(flce_ops.linear_cross_entropy, inputs, options=ACCURATE, **WAYS[way])
    exact = loss_and_gradients(reference_loss, inputs.clone(torch.float64), **WAYS[way])
    assert found[0].dtype == torch.float32 and error(found[0], exact[0]) < 1e-6
    for ours, right in zip(found[1:], exact[1:], strict=True):
        assert ours.dtype == dtype and error(ours, right) < ROUNDING[dtype] / 2


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_errors_are_at_most_those_of_torchs_accurate(dtype):
    """Of the losses, which torch rounds to the operands' dtype, and of the gradients; without it they are larger."""
    inputs = make_inputs(SHAPE, dtype=dtype, bias=True, ignored=0.0)
    exact = loss_and_gradients(reference_loss, inputs.clone(torch.float64))
    ours = loss_and_gradients(flce_ops.linear_cross_entropy, inputs, options=ACCURATE)
    usual = loss_and_gradients(flce_ops.linear_cross_entropy, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = loss_and_gradients(
            lambda x, w, t, b: F.linear_cross_entropy(x, w, t, linear_bias=b, options=ACCURATE), inputs
        )
    for mine, plain, torchs, right in zip(ours, usual, theirs, exact, strict=True):
        assert error(mine, right) <= 1.1 * error(torchs.double(), right)
        assert error(mine, right) < error(plain, right)


def test_the_module_metrics_and_a_compiled_graph_get_it():
    inputs = make_inputs(SHAPE, dtype=torch.bfloat16)
    loss = flce_ops.linear_cross_entropy(*inputs.args, options=ACCURATE)
    assert not torch.equal(loss, flce_ops.linear_cross_entropy(*inputs.args))
    module = flce_ops.LinearCrossEntropyLoss(SHAPE[1], SHAPE[2], bias=False, dtype=torch.bfloat16, options=ACCURATE)
    module.linear.weight = nn.Parameter(inputs.linear_weight.detach())
    assert torch.equal(module(inputs.input, inputs.target), loss)
    with_metrics = flce_ops.linear_cross_entropy(*inputs.args, options=ACCURATE, return_metrics=True)[0]
    assert error(with_metrics, loss.double()) < 1e-6
    function, counter = compiled(flce_ops.linear_cross_entropy)
    assert error(function(*inputs.args, options=ACCURATE), loss.double()) < 1e-6 and counter.count == 1


def test_autocast_does_not_round_what_accurate_keeps():
    inputs = make_inputs(SHAPE)
    halved = [None if of is None else of.bfloat16() if of.is_floating_point() else of for of in inputs.args]
    with torch.autocast("cpu", torch.bfloat16):
        loss = flce_ops.linear_cross_entropy(*inputs.args, options=ACCURATE)
    assert torch.equal(loss, flce_ops.linear_cross_entropy(*halved, options=ACCURATE))


def test_float32_operands_are_what_they_are_without_it():
    args = make_inputs(SHAPE).args
    assert torch.equal(flce_ops.linear_cross_entropy(*args, options=ACCURATE), flce_ops.linear_cross_entropy(*args))


def test_main_grad_and_mixed_dtypes_are_refused():
    x, w, t, _ = make_inputs(SHAPE, dtype=torch.bfloat16).args
    with pytest.raises(NotImplementedError, match="acc_policy='accurate'.*main_grad"):
        flce_ops.linear_cross_entropy(x, w, t, options=ACCURATE, main_grad=torch.zeros(w.shape))
    with pytest.raises(TypeError, match="dtype"):
        flce_ops.linear_cross_entropy(x, w.half(), t, options=ACCURATE)
