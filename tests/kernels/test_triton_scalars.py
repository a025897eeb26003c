"""The gradient of logit_scale in the Triton kernels, on the CPU through Triton's interpreter, against float64.

The kernels sum input . grad_input before grad_input is rounded, so an error is judged beside the sum of the rows' terms
without their signs.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs, scalars
from marks import IN_INTERPRETER
from reference_divergence import make_pair
from test_kl_div_operator import inner_args
from test_triton_interpreter import double, logit_options

from flce_ops import aten
from flce_ops.aten import kl_div as aten_kl_div
from flce_ops.triton import launch_backward, launch_with_grad
from flce_ops.triton.logits import kl_div

pytestmark = IN_INTERPRETER

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-4}
SHAPE = (37, 35, 131)  # partial tiles on every side
OPTIONS = [{"logit_scale": 0.7}, {"logit_scale": 0.7, "softcap": 0.5}, {"logit_scale": -1.2, "softcap": 4.0}]
MASKS = [[True, True, True], [False, True, False], [False, False, False]]  # which other gradients are wanted


def judge(found, exact, terms, dtype):
    """Compares the gradients of the scale, the last of four, and those that the call returns beside it."""
    assert found[3].shape == () and found[3].dtype == torch.float32
    assert (found[3] - exact[3]).abs() <= TOLERANCE[dtype] * terms
    for ours, right in zip(found[:3], exact[:3], strict=True):
        assert ours.shape == right.shape


def size_of_terms(x, gradients, scale):
    """sum_i |input_i . grad_input_i / scale|, of the exact gradients."""
    return (x.double() * gradients[0]).sum(1).abs().sum() / abs(scale)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_pass(options, mask, poisoned_memory):
    made = make_inputs(SHAPE, dtype=torch.float32, bias=True, requires_grad=False)
    if options["logit_scale"] > 0.0:  # a class that is switched off
        made.linear_bias[5] = -torch.inf
        made.target[made.target == 5] = 6
    args, number = (*made.args, None, torch.rand(SHAPE[0])), logit_options(options)
    found = launch_with_grad(*args, output_mask=mask, scale_gradient=True, **number)
    exact = aten.with_grad(*double(*args), output_mask=mask, scale_gradient=True, **number)
    all_gradients = aten.with_grad(*double(*args), output_mask=[True] * 3, **number)[2:]
    judge(
        (*found[2:5], found[-1]),
        (*exact[2:5], exact[-1]),
        size_of_terms(made.input, all_gradients, options["logit_scale"]),
        torch.float32,
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward(options, dtype, mask, poisoned_memory):
    made = make_inputs(SHAPE, dtype=dtype, bias=True, requires_grad=False)
    args, number = (*made.args, None), logit_options(options)
    pair = aten.forward(*double(*args), **number)[1]
    cotangents = [-torch.rand(SHAPE[0]), torch.rand(SHAPE[0]), None]
    asked = {"scale_gradient": True, **number}
    found = launch_backward(*cotangents, *args, pair.float(), output_mask=mask, **asked)
    exact = aten.backward(*double(*cotangents), *double(*args), pair, output_mask=mask, **asked)
    of_all = aten.backward(*double(*cotangents), *double(*args), pair, output_mask=[True] * 3, **number)
    judge(found, exact, size_of_terms(made.input, of_all, options["logit_scale"]), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("kind", ["forward", "reverse", "nla"])
def test_divergences(kind, softcap, dtype, poisoned_memory):
    made = make_pair((37, 35, 24, 131), dtype=dtype, requires_grad=False, bias=True)
    options = {"kind": kind, "logit_scale": 0.7, "teacher_logit_scale": 1.2}
    options = scalars(options if softcap is None else options | {"softcap": softcap}, "cpu")
    args, row_scale = inner_args(made), torch.rand(37)
    asked = {"output_mask": [True] * 3, "scale_gradient": True, **options}
    found = kl_div.launch_kl_div_with_grad(*args, row_scale, **asked)
    exact = aten_kl_div.with_grad(*double(*args), row_scale.double(), **asked)
    terms = size_of_terms(args[0], exact[2:], 0.7)
    judge(found[2:], exact[2:], terms, dtype)
    rows = kl_div.launch_kl_div_forward(*args, **options)
    of_rows = aten_kl_div.forward(*double(*args), **options)
    known = {"divergence": rows[0]} if kind == "nla" else {}
    again = kl_div.launch_kl_div_backward(row_scale, *args, *rows[1:], **asked, **known)
    known = {"divergence": of_rows[0]} if kind == "nla" else {}
    exact = aten_kl_div.backward(row_scale.double(), *double(*args), *of_rows[1:], **asked, **known)
    judge(again, exact, terms, dtype)
