"""Metrics that the Triton kernels compute beside a loss, on the CPU through Triton's interpreter."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs, scalars
from marks import IN_INTERPRETER
from reference_loss import with_lse
from test_triton_interpreter import EVEN, RAGGED, double, operands

import flce_ops
from flce_ops import aten
from flce_ops.triton import launch_forward, launch_with_grad

pytestmark = IN_INTERPRETER

OF_ROWS = ("lse", "entropy", "log_sum_sq_probs", "mean_logit")
ASKED = dict.fromkeys(OF_ROWS, True)
MASK = {"output_mask": [True, True, False]}
OPTIONS = [
    {},
    {"bias": True, "logit_scale": 0.7},
    {"bias": True, "softcap": 4.0, "logit_scale": 0.7, "z_loss": 1e-2},
    {"class_weight": True, "label_smoothing": 0.1},
]


def numbers_of(options):
    return scalars({k: v for k, v in options.items() if k not in ("bias", "class_weight")})


def assert_statistics(found, truth, plain):
    """Compares with float64, relative to the error of plain ATen on the same operands. All lists are in the order of
    OF_ROWS.
    """
    size = truth[0].abs().max().clamp(min=1.0)
    for name, ours, exact, theirs in zip(OF_ROWS, found, truth, plain, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == exact.shape
        worst = (ours - exact).abs().max()
        assert worst <= 2 * (theirs - exact).abs().max() + 1e-6 * size, (name, worst)


@pytest.mark.parametrize("shape, dtype", [(RAGGED, torch.float16), (EVEN, torch.float32)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_pass_gives_them_and_changes_nothing_else(shape, dtype, options, poisoned_memory):
    args, numbers = operands(shape, dtype, options), numbers_of(options)
    without = launch_with_grad(*args, None, **MASK, **numbers)
    found = launch_with_grad(*args, None, **MASK, **numbers, **ASKED)
    for one, other in zip(without[:5], found[:5], strict=True):
        assert torch.equal(one, other)
    truth = aten.with_grad(*double(*args), None, **MASK, **numbers, **ASKED)
    # for half operands the interpreter's float32 products are more accurate than a CPU's rounded ones
    plain = aten.with_grad(*(t.float() if t is not None and t.is_floating_point() else t for t in args), None,
                           **MASK, **numbers, **ASKED)  # fmt: skip
    assert_statistics(found[6:-2], truth[6:-2], plain[6:-2])
    ignored = args[2] == -100
    assert all(not values[ignored].any() for values in found[6:-2])


def test_each_alone_is_what_it_is_with_the_others():
    args, numbers = operands((37, 24, 70), torch.float32, {"bias": True}), numbers_of(OPTIONS[2])
    everything = launch_with_grad(*args, None, **MASK, **numbers, **ASKED)
    for name in OF_ROWS:
        alone = launch_with_grad(*args, None, **MASK, **numbers, **{name: True})
        for k, (one, other) in enumerate(zip(alone, everything, strict=True)):
            asked = k < 5 or k == 6 + OF_ROWS.index(name)
            assert torch.equal(one, other) if asked else one.numel() == 0, (name, k)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_gives_them(options, poisoned_memory):
    args, numbers = operands(RAGGED, torch.float32, options), numbers_of(options)
    logits = {name: numbers[name] for name in ("softcap", "logit_scale") if name in numbers}
    asked = {"log_sum_sq_probs": True, "mean_logit": True, "logit_sum": True, "expected_log_prob": True}
    found, truth = launch_forward(*args, **logits, **asked), aten.forward(*double(*args), **logits, **asked)
    plain = aten.forward(*args, **logits, **asked)
    of_rows = [[with_lse(rows)[k] for k in (1, 3, 6, 7)] for rows in (found, truth, plain)]
    assert_statistics(*of_rows)
    shard = {"vocab_start": 40, "vocab_size": 500}
    found, truth = (
        launch_forward(*args, **logits, **asked, **shard),
        aten.forward(*double(*args), **logits, **asked, **shard),
    )
    torch.testing.assert_close(found[7], truth[7].float(), rtol=1e-5, atol=1e-6)


# in nats: below the threshold of a rescue, where squares reach 2^87, and above it
@pytest.mark.parametrize("far", [25.0, 60.0, 500.0])
def test_logits_far_above_the_targets(far, poisoned_memory):
    made = make_inputs((37, 35, 300), bias=True, requires_grad=False)
    made.target[made.target != -100] = 7
    made.linear_bias[200:203] += far
    made.linear_bias[7] -= 2.0
    found = launch_with_grad(*made.args, None, None, **MASK, **ASKED)
    truth = aten.with_grad(*double(*made.args), None, None, **MASK, **ASKED)
    plain = aten.with_grad(*made.args, None, None, **MASK, **ASKED)
    assert ((truth[1] > 40) == (far > 40))[made.target != -100].float().mean() > 0.9
    assert_statistics(found[6:-2], truth[6:-2], plain[6:-2])


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=["plain", "softcap"])
def test_statistics_of_several_chunks(options):
    args, numbers = operands((140, 24, 131), torch.float32, {"bias": True}), scalars(options)
    with flce_ops.workspace(1):
        found = launch_with_grad(*args, None, **MASK, **numbers, argmax=True, **ASKED)
        assert flce_ops.last_path().chunks == 2
    truth = aten.with_grad(*double(*args), None, **MASK, **numbers, argmax=True, **ASKED)
    assert torch.equal(found[5], truth[5])
    for ours, exact in zip(found[6:-2], truth[6:-2], strict=True):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=1e-5)
