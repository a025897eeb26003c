"""return_metrics=True: loss and gradients stay the same; argmax and token accuracy come from the same pass."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import RAGGED, make_inputs
from reference_loss import dense_logits, run
from torch.library import opcheck

import flce_ops

flce = torch.ops.flce
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERYTHING = {"bias": True, "weight": True, "token_weight": True}
# name: (arguments of make_inputs, options of the loss)
ARGUMENTS = {
    "plain": ({}, {}),
    "label_smoothing": ({"weight": True}, {"label_smoothing": 0.1}),
    "softcap": ({"bias": True}, {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01}),
    "smoothed_softcap": (EVERYTHING, {"softcap": 5.0, "label_smoothing": 0.1}),
    "ignore_index": ({"ignore_index": 3}, {}),  # a real class
    "int32_target": ({"target_dtype": torch.int32}, {}),
}


def with_metrics(*args, **options):
    loss, metrics = flce_ops.linear_cross_entropy(*args, return_metrics=True, **options)
    with_metrics.last = metrics
    return loss


def apart_and_argmax(inputs, options):
    """The argmax of dense float64 logits, -1 for ignored tokens; and where it is certain despite the rounding of the
    operands' dtype.
    """
    logits = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    exact = inputs.clone(torch.float64)
    z = dense_logits(exact.input, exact.linear_weight, exact.linear_bias, **logits).detach()
    two = z.topk(2, -1).values
    return two[..., 0] - two[..., 1] > 4 * torch.finfo(inputs.input.dtype).eps * z.abs().amax(-1), z.argmax(-1).where(
        inputs.target != inputs.ignore_index, -1
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_metrics_are_the_dense_ones_and_the_loss_is_what_it_was(device, name, reduction, dtype, poisoned_memory):
    made, options = ARGUMENTS[name]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    cotangent = torch.randn(RAGGED[0], device=device) if reduction == "none" else None
    expected = run(flce_ops.linear_cross_entropy, inputs, cotangent, reduction=reduction, **options)
    found = run(with_metrics, inputs, cotangent, reduction=reduction, **options)
    for key in expected:
        assert torch.equal(found[key], expected[key]), key
    metrics = with_metrics.last
    apart, argmax = apart_and_argmax(inputs, options)
    assert metrics.argmax.dtype == torch.int64 and metrics.argmax.shape == inputs.target.shape
    assert torch.equal(metrics.argmax[apart], argmax[apart])
    assert apart.float().mean() > 0.2
    valid = inputs.target != inputs.ignore_index
    right = (metrics.argmax == inputs.target)[valid]
    assert metrics.token_accuracy.dtype == torch.float32 and metrics.token_accuracy.shape == ()
    torch.testing.assert_close(metrics.token_accuracy, right.double().mean().float())
    assert not any(metric.requires_grad for metric in metrics)
    assert 0 < metrics.token_accuracy < 1


@pytest.mark.parametrize("tokens", [0, 5])
def test_accuracy_is_nan_without_a_valid_token(device, tokens):
    inputs = make_inputs((tokens, 11, 31), device=device)
    inputs.target.fill_(-100)
    for reduction in ("mean", "sum", "none"):
        with_metrics(*inputs.args, reduction=reduction)
        assert with_metrics.last.token_accuracy.isnan()
        assert with_metrics.last.argmax.shape == (tokens,)


@pytest.mark.parametrize("buffer", [False, True], ids=["one pass", "main_grad"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_losses_and_metrics_do_not_depend_on_the_default_dtype(default, reduction, buffer, device):
    inputs, before = make_inputs(device=device), torch.get_default_dtype()

    def results():
        main_grad = torch.zeros_like(inputs.linear_weight, requires_grad=False) if buffer else None
        loss = flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction, z_loss=1e-3, main_grad=main_grad)
        (of_input,) = torch.autograd.grad(loss.sum(), inputs.input)
        with_metrics(*inputs.args, reduction=reduction)
        return loss.detach(), of_input, *with_metrics.last

    expected = results()
    torch.set_default_dtype(default)
    try:
        found = results()
    finally:
        torch.set_default_dtype(before)
    for number, right in zip(found, expected, strict=True):
        assert number.dtype == right.dtype and torch.equal(number, right)


def test_shapes_of_a_batch_and_the_modules(device):
    inputs = make_inputs((24, 11, 31), device=device, bias=True)
    args = inputs.input.view(2, 12, 11), inputs.linear_weight, inputs.target.view(2, 12), inputs.linear_bias
    loss, metrics = flce_ops.linear_cross_entropy(*args, return_metrics=True)
    assert metrics.argmax.shape == (2, 12)
    head = flce_ops.LinearCrossEntropyHead(11, 31, bias=True, device=device, logit_scale=0.5)
    owner = flce_ops.LinearCrossEntropyLoss(11, 31, bias=True, device=device, logit_scale=0.5)
    for module, linear in ((head, head), (owner, owner.linear)):
        with torch.no_grad():
            linear.weight.copy_(args[1]), linear.bias.copy_(args[3])
        found, of_module = module(args[0], args[2], return_metrics=True)
        assert torch.equal(found, module(args[0], args[2]))
        assert isinstance(of_module, flce_ops.LinearCrossEntropyMetrics)
        assert torch.equal(of_module.argmax, metrics.argmax)  # a positive scale keeps the order of the logits
        assert torch.equal(of_module.token_accuracy, metrics.token_accuracy)
    valid = args[2] != -100
    assert torch.equal(head(args[0]).argmax(-1).where(valid, -1), metrics.argmax)


# ---------------------------------------------------------------- cost


def test_without_metrics_nothing_of_them_is_computed(device):
    inputs = make_inputs((12, 11, 31), device=device)
    with torch.profiler.profile() as profile:
        flce_ops.linear_cross_entropy(*inputs.args).backward()
    assert not {event.name for event in profile.events()} & {"aten::argmax", "aten::max"}
    found = flce.linear_cross_entropy_with_grad(
        *inputs.args, None, torch.ones(12, device=device), output_mask=[True, True, False]
    )
    assert [statistic.shape for statistic in found[6:]] == [(0,)] * 6


# ---------------------------------------------------------------- composition


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_entry_through_opcheck(device, reduction, dtype):
    inputs = make_inputs((12, 11, 31), device=device, dtype=dtype, **EVERYTHING)
    options = {"reduction": reduction, "label_smoothing": 0.1, **inputs.options}
    opcheck(flce.linear_cross_entropy_metrics.default, inputs.args, options)
