"""return_metrics by name: by-products of the rows of logits; loss and gradients stay the same."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import RAGGED, make_inputs
from reference_loss import dense_logits, error, run
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.entry.bodies import NAMES, OF_LOG_PROBS

flce = torch.ops.flce
OF_ROWS = ("lse", "entropy", "log_sum_sq_probs", "mean_logit")
DTYPES = [torch.float64, torch.bfloat16]  # float32 is in the tests of large logits and of several chunks
LOGITS = ("softcap", "logit_scale", "temperature")
# name: (arguments of make_inputs, options of the loss)
ARGUMENTS = {
    "plain": ({}, {}),
    "scaled": ({"bias": True}, {"logit_scale": 0.7, "temperature": 0.5, "z_loss": 0.01}),
    "capped": ({"bias": True, "token_weight": True}, {"softcap": 5.0, "logit_scale": 1.4, "temperature": 0.7}),
    "smoothed": ({"weight": True}, {"label_smoothing": 0.1}),
    "smoothed and capped": ({"bias": True, "weight": True}, {"label_smoothing": 0.1, "softcap": 5.0}),
    "ignore_index": ({"ignore_index": 3}, {}),  # a real class
}


def dense(inputs, **options):
    """In float32 or float64, from logits in the operands' dtype; 0 for ignored tokens."""
    z = dense_logits(*inputs.args[:2], inputs.linear_bias, **{k: v for k, v in options.items() if k in LOGITS}).detach()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    log_p = z.log_softmax(-1)
    found = {
        "lse": z.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logit": z.mean(-1),
        "z_loss": options.get("z_loss", 0.0) * z.logsumexp(-1).square(),
    }
    valid = inputs.target != inputs.ignore_index
    return {name: torch.where(valid, values, 0.0) for name, values in found.items()}


def ours(*args, names=NAMES, **options):
    loss, ours.last = flce_ops.linear_cross_entropy(*args, return_metrics=names, **options)
    return loss


def assert_no_worse_than_dense(found, inputs, **options):
    exact, plain = dense(inputs.clone(torch.float64), **options), dense(inputs, **options)
    for name in set(found) & set(exact):
        eps = torch.finfo(found[name].dtype).eps
        assert found[name].shape == inputs.target.shape and not found[name].requires_grad
        assert not found[name][inputs.target == inputs.ignore_index].any(), name
        largest = exact["lse"].abs().max().clamp(min=1.0)  # an entropy is a difference of two numbers of this size
        worst = (plain[name] - exact[name]).abs().max()
        # maxima of a few numbers: 2.03 of plain torch's was seen; in float64 the plain formula is the exact one: 4.6
        # eps was seen
        assert (found[name] - exact[name]).abs().max() <= 3 * worst + 8 * eps * largest, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_statistics_are_the_dense_ones_and_the_loss_is_what_it_was(device, name, reduction, dtype, poisoned_memory):
    made, options = ARGUMENTS[name]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    cotangent = torch.randn(RAGGED[0], device=device) if reduction == "none" else None
    expected = run(flce_ops.linear_cross_entropy, inputs, cotangent, reduction=reduction, **options)
    found = run(ours, inputs, cotangent, reduction=reduction, **options)
    for key in expected:  # with one more matrix, a block holds fewer rows
        assert error(found[key], expected[key]) <= 4 * torch.finfo(dtype).eps, key
    assert tuple(ours.last) == NAMES
    assert_no_worse_than_dense(ours.last, inputs, **options)
    _, of_argmax = flce_ops.linear_cross_entropy(
        *inputs.args, reduction=reduction, return_metrics=True, **inputs.options
    )
    valid = inputs.target != inputs.ignore_index
    assert torch.equal(ours.last["is_top1"], valid & (ours.last["argmax"] == inputs.target))
    if not {"softcap", "logit_scale", "temperature"} & set(options):
        assert torch.equal(ours.last["argmax"], of_argmax.argmax)
        assert torch.equal(ours.last["token_accuracy"], of_argmax.token_accuracy)


@pytest.mark.parametrize("name", NAMES)
def test_each_alone_is_what_it_is_with_the_others(device, name):
    inputs = make_inputs((24, 11, 31), device=device, bias=True)
    for reduction in ("mean", "none"):
        ours(*inputs.args, reduction=reduction, z_loss=0.1)
        expected = ours.last[name]
        ours(*inputs.args, reduction=reduction, z_loss=0.1, names=[name])
        assert list(ours.last) == [name]
        torch.testing.assert_close(ours.last[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("far", [0.0, 60.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_far_above_the_targets(device, dtype, far):
    """Squares of exponentials relative to a row's reference overflow at half the distance."""
    inputs = make_inputs((40, 16, 300), device=device, dtype=dtype, bias=True)
    inputs.target[inputs.target != -100] = 7
    inputs.linear_bias.data[200:203] += far
    for reduction in ("mean", "none"):
        ours(*inputs.args, reduction=reduction, names=OF_ROWS)
        assert_no_worse_than_dense(ours.last, inputs)
        assert all(values.isfinite().all() for values in ours.last.values())


def test_classes_that_are_switched_off(device):
    inputs = make_inputs((24, 11, 31), device=device, dtype=torch.float64, bias=True)
    inputs.linear_bias.data[20:] = -torch.inf
    inputs.target.clamp_(max=19)
    names = ("lse", "entropy", "log_sum_sq_probs")
    exact = dense(inputs)
    for reduction in ("mean", "none"):
        ours(*inputs.args, reduction=reduction, names=names)
        assert all(error(ours.last[name], exact[name]) < 1e-13 for name in names)


def test_several_chunks_and_ignored_rows_of_nan(device):
    inputs = make_inputs((600, 33, 509), device=device)
    inputs.input.data[inputs.target == -100] = torch.nan
    clean = inputs.clone()
    clean.input.data.nan_to_num_(0.0)
    for reduction in ("mean", "none"):
        with flce_ops.workspace(1):
            ours(*inputs.args, reduction=reduction, names=OF_ROWS)
        assert flce_ops.last_path().chunks > 2
        assert_no_worse_than_dense(ours.last, clean)


def test_log_probs(device):
    inputs = make_inputs(device=device, bias=True)
    found, metrics = flce_ops.linear_log_probs(*inputs.args, softcap=5.0, return_metrics=OF_LOG_PROBS)
    assert_no_worse_than_dense(metrics, inputs, softcap=5.0)
    assert tuple(metrics) == OF_LOG_PROBS and found.entropy is None
    assert torch.equal(found.log_probs, flce_ops.linear_log_probs(*inputs.args, softcap=5.0).log_probs)
    batch = inputs.input.view(2, -1, RAGGED[1]), inputs.linear_weight, inputs.target.view(2, -1)
    _, metrics = flce_ops.linear_log_probs(*batch, return_metrics=["mean_logit"])
    assert list(metrics) == ["mean_logit"] and metrics["mean_logit"].shape == batch[2].shape


def test_positions_and_modules(device):
    inputs = make_inputs((24, 11, 31), device=device)
    owner = flce_ops.LinearCrossEntropyLoss(11, 31, out_features=(2,), device=device)
    target = torch.stack([inputs.target, inputs.target.roll(1)], -1)
    loss, found = owner(inputs.input, target, return_metrics=("entropy", "is_top1"))
    heads = owner.linear.weight.unflatten(0, (31, 2))
    for k in range(2):
        _, alone = flce_ops.linear_cross_entropy(
            inputs.input, heads[:, k], target[:, k], return_metrics=("entropy", "is_top1")
        )
        torch.testing.assert_close(found["entropy"][:, k], alone["entropy"])
        assert torch.equal(found["is_top1"][:, k], alone["is_top1"])
    loss.backward()


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("reduction, wanted, passes", [("mean", True, 3), ("none", True, 3), ("mean", False, 1)])
def test_statistics_cost_no_pass(device, reduction, wanted, passes):
    inputs = make_inputs((24, 16, 61), device=device, requires_grad=wanted)
    with FlopCounterMode(display=False) as counter:
        loss = ours(*inputs.args, reduction=reduction)
        if wanted:
            loss.sum().backward()
    assert counter.get_total_flops() == passes * 2 * 24 * 16 * 61


# ---------------------------------------------------------------- composition


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_operators_through_opcheck(device, reduction):
    inputs = make_inputs((12, 11, 31), device=device, bias=True)
    asked = {"argmax": True, "lse": True, "entropy": True, "log_sum_sq_probs": True, "mean_logit": True}
    opcheck(flce.linear_cross_entropy_metrics.default, inputs.args, {"reduction": reduction, **asked})
    if reduction == "mean":
        mask = {"output_mask": [True] * 3}
        opcheck(flce.linear_cross_entropy_with_grad.default, (*inputs.args, None, None), {**mask, **asked})
    else:
        asked = {"log_sum_sq_probs": True, "mean_logit": True}
        opcheck(flce.linear_cross_entropy_forward.default, inputs.args, asked)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "names, error_type, says",
    [
        ("entropy", TypeError, "sequence of names, got 'entropy'"),
        (["perplexity"], ValueError, "some of token_accuracy, .*entropy.* got 'perplexity'"),
        (3, TypeError, "got 3"),
    ],
)
def test_other_names_are_refused(names, error_type, says):
    args = make_inputs((6, 5, 7)).args
    with pytest.raises(error_type, match=f"linear_cross_entropy: expected return_metrics.*{says}"):
        flce_ops.linear_cross_entropy(*args, return_metrics=names)


def test_where_names_are_refused():
    inputs = make_inputs((6, 5, 7))
    with pytest.raises(TypeError, match="cross_entropy: expected return_metrics to be True or False"):
        flce_ops.cross_entropy(torch.randn(6, 7), inputs.target, return_metrics=["lse"])
    with pytest.raises(NotImplementedError, match="return_metrics"):
        flce_ops.linear_cross_entropy(inputs.input, inputs.linear_weight, torch.rand(6, 7), return_metrics=["lse"])
    for names in (True, ["lse"]):
        with pytest.raises((TypeError, ValueError), match="linear_log_probs: expected return_metrics"):
            flce_ops.linear_log_probs(*inputs.args, return_metrics=names)
