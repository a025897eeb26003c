"""The Triton kernels of several classes a token, on the CPU through Triton's interpreter, against float64 in ATen."""

# N tokens, K classes of each, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from inputs import scalars
from marks import IN_INTERPRETER
from reference_loss import error, with_lse
from test_soft_targets import make_call
from test_triton_interpreter import RAGGED, TOLERANCE, double

from flce_ops import aten
from flce_ops.triton import launch_backward, launch_forward, launch_with_grad

pytestmark = IN_INTERPRETER

MASK = [True, True, True]
OPTIONS = [{}, {"weight": True, "label_smoothing": 0.1}, {"softcap": 4.0, "logit_scale": 0.7, "z_loss": 1e-2}]


def operands(call):
    return [call[name] for name in ("input", "linear_weight", "target", "linear_bias")]


def split(options):
    """Splits make_call's options from those that the operators take."""
    made = {name: value for name, value in options.items() if value is True}
    return made, scalars({name: value for name, value in options.items() if value is not True})


def with_grad_and_truth(call, options, **more):
    args, q = [*operands(call), call.get("weight")], call["target_weight"]
    options = {**options, **more, "output_mask": MASK}
    found = launch_with_grad(*args, None, None, **options, target_weight=q)
    return found, aten.with_grad(*double(*args), None, None, **options, target_weight=q.double())


@pytest.mark.parametrize(("topk", "options"), [(1, {}), (70, {}), *((5, options) for options in OPTIONS)], ids=str)
def test_one_pass(topk, options, poisoned_memory):
    made, options = split(options)
    call = make_call(dtype=torch.float32, shape=RAGGED, topk=topk, **made)
    found, truth = with_grad_and_truth(call, options)
    for ours, exact in zip(found[:5], truth[:5], strict=True):
        assert error(ours, exact) <= TOLERANCE[torch.float32]


def test_equal_classes_are_one_class_to_the_bit():
    """Several equal classes act as one class with the sum of their weights: sums of halves and quarters are exact."""
    call = make_call(dtype=torch.float32, shape=RAGGED, topk=8)
    call["target_weight"] = torch.full_like(call["target_weight"], 0.25)
    target = call["target"].clone()
    target[:, 4:] = target[:, :4]
    twice = call | {"target": target}
    target = target.clone()
    target[:, 4:] = -100
    once = call | {"target": target, "target_weight": 2.0 * call["target_weight"]}
    for one, other in zip(*(with_grad_and_truth(c, {})[0][2:5] for c in (twice, once)), strict=True):
        assert torch.equal(one, other)


def test_no_loss_is_below_zero_where_one_of_the_targets_is_nearly_sure():
    """Its logit and the row's sum come from products of another order: the sum is at least the target's share."""
    call = make_call(dtype=torch.float32, shape=(64, 35, 131), topk=3)
    call["target"][:, 0] = torch.arange(64)
    call["target_weight"] = torch.tensor([1.0, 0.0, 0.0]).expand(64, 3).contiguous()
    call["linear_weight"] = 35**0.5 * F.normalize(torch.randn(131, 35))  # no class outweighs the target
    call["input"] = 3 * call["linear_weight"][:64]
    found, truth = with_grad_and_truth(call, {})
    assert truth[1].max() < 0.1
    assert found[1].min() >= 0.0


def test_rescued_rows():
    """All classes of some tokens are over 41 nats below the largest logit."""
    call = make_call(dtype=torch.float32, shape=RAGGED, topk=3)
    call["linear_bias"][7] = 200.0
    call["target"][call["target"] == 7] = 8
    found, truth = with_grad_and_truth(call, {})
    for ours, exact in zip(found[:5], truth[:5], strict=True):
        assert error(ours, exact) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"softcap": 4.0, "logit_scale": 0.7}], ids=str)
def test_forward_and_backward(options, dtype, poisoned_memory):
    made, options = split(options)
    call = make_call(dtype=dtype, shape=RAGGED, **made)
    args = [*operands(call), call.get("weight")]
    retain = 0 if options or dtype == torch.float32 else RAGGED[0]
    wanted = {"logit_sum": True, "expected_log_prob": True, **options}
    found = launch_forward(*args, **wanted, retain=retain)
    truth = aten.forward(*double(*args), **wanted)
    for ours, exact in zip(with_lse(found)[:4], with_lse(truth)[:4], strict=True):
        assert ours.shape == exact.shape and error(ours, exact) <= TOLERANCE[torch.float32]
    cotangents = [-torch.rand(RAGGED[0], 5) - 0.1, *torch.rand(2, RAGGED[0]) + 0.1]
    of_expected = torch.rand(RAGGED[0]) + 0.1

    def gradients(backward, rows, args, cotangents, of_expected, **more):
        return backward(
            *cotangents,
            *args,
            rows[1],
            output_mask=MASK,
            grad_expected_log_prob=of_expected,
            expected_log_prob=rows[3],
            **options,
            **more,
        )

    ours = gradients(launch_backward, found, args, cotangents, of_expected, retained=found[8] if retain else None)
    exact = gradients(aten.backward, truth, double(*args), double(*cotangents), of_expected.double())
    for one, other in zip(ours, exact, strict=True):
        assert error(one, other) <= TOLERANCE[dtype]


def test_topk_targets_of_a_shard():
    """The shard has the classes from 40. Other targets have logit 0; rows without a target here need a reference."""
    call = make_call(dtype=torch.float32, shape=RAGGED)
    args = operands(call)
    args[2] = torch.where(call["target"] == -100, -100, call["target"] + 40)
    args[2][2] = 3  # token 2 has no class in this shard
    shard = {"vocab_start": 40, "vocab_size": 40 + RAGGED[2]}
    found, truth = launch_forward(*args, **shard), aten.forward(*double(*args), **shard)
    for ours, exact in zip(with_lse(found)[:2], with_lse(truth)[:2], strict=True):
        assert error(ours, exact) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("wrong", [RAGGED[2], -1])
def test_a_class_out_of_range(wrong):
    call = make_call(dtype=torch.float32, shape=RAGGED)
    call["target"][3, 2] = wrong
    for ignore_index in (-100, RAGGED[2] + 1):
        with pytest.raises(IndexError, match=f"got {wrong} at flat position {3 * 5 + 2}"):
            target = torch.where(call["target"] == -100, ignore_index, call["target"])
            args = (*operands(call)[:2], target, None, None, None, None)
            launch_with_grad(
                *args, ignore_index=ignore_index, output_mask=MASK, target_weight=call["target_weight"].nan_to_num()
            )
