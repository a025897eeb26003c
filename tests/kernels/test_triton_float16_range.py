"""float16 gradients of losses without a loss scale: Triton in the interpreter, against float64.

Nearly all entries of these logit gradients are below float16's smallest number, 6e-8. The results that are float32, the
gradient of a learnt scale and a main_grad, show what the kernels lose; those in float16 may have their own rounding
besides.
"""

# N tokens, D hidden, V vocabulary

import math

import pytest
import torch
from inputs import scalars
from marks import IN_INTERPRETER
from reference_divergence import make_pair
from reference_loss import error
from test_kl_div_operator import inner_args
from test_triton_interpreter import double
from test_triton_saved_logits import case

import flce_ops
from flce_ops import aten
from flce_ops.aten import kl_div as aten_kl_div
from flce_ops.triton import launch_backward, launch_backward_in_place
from flce_ops.triton.logits import kl_div
from flce_ops.triton.steps.gradients import SMALLEST_SCALE

pytestmark = IN_INTERPRETER

SHAPE = (140, 24, 150)
PAIR = (37, 35, 24, 131)  # N, D, hidden of the teacher, V
SMALL = 2.0**-20
OF_ALL = [True, True, True]
LOST = 5e-4  # of main_grad, and of what float16 holds


def judge(found, exact, input, scale=0.7):
    """The gradients of input, linear_weight and linear_bias, which may be absent, and of the scale."""
    for ours, right in zip(found[:3], exact[:3], strict=True):
        rounded = error(right.half(), right)
        assert not ours.numel() or error(ours, right) <= 1.05 * rounded + 2e-4
    terms = (input.double() * exact[0]).sum(1).abs().sum() / scale
    assert (found[3] - exact[3]).abs() <= 2e-4 * terms


def of_rows(wanted, options, scale=0.7, largest=SMALL):
    """An input with one large feature, as hidden states have, and cotangents whose sizes differ."""
    (*args, weight), (*cotangents, of_expected), _ = case(SHAPE, torch.float16, wanted)
    args[0].mul_(0.05)
    args[0][:, 3] = 25.0
    sizes = largest * torch.rand(SHAPE[0]) ** 4
    args, cotangents = (*args, weight), [None if grad is None else grad * sizes for grad in cotangents]
    options = scalars({"logit_scale": scale, **options})
    rows = aten.forward(*double(*args), expected_log_prob=True, **options)
    if of_expected is not None:
        options |= {"grad_expected_log_prob": of_expected * sizes, "expected_log_prob": rows[3]}
    exact = aten.backward(
        *double(*cotangents, *args), rows[1], output_mask=OF_ALL, scale_gradient=True,
        **dict(zip(options, double(*options.values()))),
    )  # fmt: skip
    options = {name: number.float() if number.dim() else number for name, number in options.items()}
    return (*cotangents, *args, rows[1].float()), options, exact


# a log-probability, the entropy's expected logit, both with label smoothing's sum
@pytest.mark.parametrize(("wanted", "options"), [("al", {}), ("s", {"softcap": 0.5}), ("alms", {})], ids=str)
def test_no_gradient_loses_entries(wanted, options, poisoned_memory):
    args, options, exact = of_rows(wanted, options)
    of_input = []
    for mask in (OF_ALL, [True, False, True], [False, False, False]):
        found = launch_backward(*args, output_mask=mask, scale_gradient=True, **options)
        judge(found, exact, args[3])
        of_input.append(found[0])
    assert torch.equal(*of_input[:2])  # also if the weight's gradient is wanted
    main_grad = torch.zeros(SHAPE[2], SHAPE[1])
    launch_backward_in_place(*args, main_grad=main_grad, output_mask=OF_ALL, **options)
    small = torch.arange(SHAPE[1]) != 3  # the features beside the large one
    assert error(main_grad[:, small], exact[1][:, small]) <= LOST


@pytest.mark.parametrize("scale", [1e-20, SMALLEST_SCALE])  # a learnt scale of 0 becomes 1e-20
def test_the_gradient_of_a_tiny_scale(scale):
    args, options, exact = of_rows("al", {}, scale)
    judge(launch_backward(*args, output_mask=OF_ALL, scale_gradient=True, **options), exact, args[3], scale)


def test_a_scale_below_the_smallest_has_a_gradient_of_nan():
    args, options, _ = of_rows("al", {}, 0.5 * SMALLEST_SCALE)
    assert launch_backward(*args, output_mask=OF_ALL, scale_gradient=True, **options)[3].isnan()


def test_a_scale_of_0_beside_large_cotangents():
    args, options, _ = of_rows("al", {}, 0.0, largest=2.0**30)
    found = launch_backward(*args, output_mask=OF_ALL, scale_gradient=True, **options)
    assert not any(gradient.any() for gradient in found[:2])


def test_sums_over_chunks_lose_none(poisoned_memory, fewest_chunks):
    """Of cotangents so large that float16 rounds the results by 2e-4."""
    args, options, exact = of_rows("al", {}, largest=16.0)
    with flce_ops.workspace(16 << 10):
        judge(launch_backward(*args, output_mask=OF_ALL, scale_gradient=True, **options), exact, args[3])
    assert flce_ops.last_path().chunks > 1


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_divergences_lose_none(kind, poisoned_memory):
    made = make_pair(PAIR, dtype=torch.float16, requires_grad=False, bias=True)
    options = scalars({"kind": kind, "logit_scale": 0.7, "teacher_logit_scale": 1.2})
    args, row_scale = inner_args(made), torch.rand(PAIR[0]) * SMALL
    asked = {"scale_gradient": True, **options}
    exact = aten_kl_div.with_grad(*double(*args), row_scale.double(), output_mask=OF_ALL, **asked)[2:]
    rows = kl_div.launch_kl_div_forward(*args, **options)
    for mask in (OF_ALL, [False, False, False]):
        known = kl_div.launch_kl_div_backward(row_scale, *args, *rows[1:], output_mask=mask, **asked)
        at_once = kl_div.launch_kl_div_with_grad(*args, row_scale, output_mask=mask, **asked)[2:]
        for found in (known, at_once):
            judge(found, exact, args[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e5m2], ids=str)
def test_weighted_class_probabilities_stay_below_the_largest_number(dtype, poisoned_memory):
    made, size = make_pair(PAIR, dtype=torch.float16, requires_grad=False, probs=True), 57344.0
    made["teacher_probs"] = torch.nn.functional.one_hot(torch.randint(PAIR[3], PAIR[:1]), PAIR[3]).mul(size).to(dtype)
    args, row_scale = inner_args(made), torch.rand(PAIR[0]) / PAIR[0]
    asked = {"kind": "cross_entropy", "output_mask": OF_ALL}
    exact = aten_kl_div.with_grad(*double(*args), row_scale.double(), **asked)[2:]
    found = kl_div.launch_kl_div_with_grad(*args, row_scale, **asked)[2:]
    assert error(found[0], exact[0]) <= 6.5e-4 and error(found[1], exact[1]) <= 4e-4


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_log_ratios_of_65504_nats_and_more_stay_below_the_largest_number(scale, poisoned_memory):
    """The teacher excludes the last half of the classes, one of which has half of the student's probability."""
    made = make_pair((37, 35, 24, 256), dtype=torch.float16, requires_grad=False, bias=True)
    made["input"].mul_(0.1)
    made["linear_bias"][:], made["linear_bias"][200] = 0.0, math.log(255.0)
    made["teacher_bias"][128:] = -65504.0
    args, row_scale = inner_args(made), torch.full((37,), 0.99 / 2048)
    asked = {"kind": "reverse", "output_mask": OF_ALL, **scalars({"teacher_logit_scale": scale})}
    exact = aten_kl_div.with_grad(*double(*args), row_scale.double(), **asked)[2:]
    found = kl_div.launch_kl_div_with_grad(*args, row_scale, **asked)[2:]
    for ours, right in zip(found[:3], exact[:3], strict=True):
        assert error(ours, right) <= 1e-3
