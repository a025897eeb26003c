"""Which tensors need gradients, their memory layouts, and the shape of the tokens."""

# B batch, T sequence, N tokens = B T, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, reference_loss, run, run_reference

import flce_ops

DTYPES = [torch.float64, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-13, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    "wanted",
    [
        ("input",),  # a frozen head under LoRA
        ("linear_weight",),  # a probe on frozen features
        ("linear_bias",),
        ("input", "linear_bias"),
        ("linear_weight", "linear_bias"),
        ("token_weight",),
    ],
    ids="-".join,
)
def test_any_subset_may_need_a_gradient(device, wanted, reduction, dtype, poisoned_memory):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, token_weight=True)
    every = run_reference(inputs, reduction=reduction)
    for name, leaf in inputs.leaves.items():
        leaf.requires_grad_(name in wanted)
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    assert set(found) == {"loss", *wanted}
    for name, tensor in found.items():
        assert error(tensor, every[name]) < TOLERANCE[dtype], name
    flce_ops.linear_cross_entropy(*inputs.args, token_weight=inputs.token_weight, reduction="sum").backward()
    for name in ("input", "linear_weight", "linear_bias", "token_weight"):
        assert (getattr(inputs, name).grad is not None) == (name in wanted)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_gradient_wanted_leaves_no_graph(device, reduction):
    inputs = make_inputs(device=device, requires_grad=False)
    assert not flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction).requires_grad
    inputs = make_inputs(device=device)
    with torch.no_grad():
        assert not flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction).requires_grad
    with torch.inference_mode():
        loss = flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction)
    assert loss.is_inference()
    assert error(loss, reference_loss(*inputs.clone(torch.float64).args, reduction=reduction)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_without_gradients_is_that_with_gradients(device, reduction, dtype):
    """Evaluation and training use different operators, but give the same dtype and number."""
    inputs = make_inputs(device=device, dtype=dtype, token_weight=True)
    training = flce_ops.linear_cross_entropy(*inputs.args, **inputs.options, reduction=reduction)
    with torch.no_grad():
        evaluation = flce_ops.linear_cross_entropy(*inputs.args, **inputs.options, reduction=reduction)
    assert evaluation.dtype == training.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert error(evaluation, training.double()) < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_inference_tensors_are_accepted(device, reduction):
    with torch.inference_mode():
        inputs = make_inputs(device=device, requires_grad=False)
    loss = flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction)
    assert (
        error(loss, reference_loss(*[t if t is None else t.clone() for t in inputs.args], reduction=reduction)) < 1e-6
    )


def strided(tensor, layout):
    """The same values in another memory layout."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "column_slice":  # rows have gaps between them, and are not aligned to 16 bytes
        wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 3), float("nan"))
        wide[:, 1:-2] = tensor
        return wide[:, 1:-2]
    if layout == "row_step":
        tall = tensor.new_full((2 * tensor.shape[0], tensor.shape[1]), float("nan"))
        tall[::2] = tensor
        return tall[::2]
    if layout == "column_step":
        wide = tensor.new_full((tensor.shape[0], 2 * tensor.shape[1]), float("nan"))
        wide[:, ::2] = tensor
        return wide[:, ::2]
    if layout == "both_steps":  # no unit stride in either direction; columns are closer than rows
        return strided(strided(tensor.t(), "column_step").t(), "column_step")
    if layout == "offset":  # contiguous, but not aligned to 16 bytes
        return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)
    if layout == "step":
        return torch.stack([tensor, tensor.neg()], 1)[:, 0]
    if layout == "expanded":
        assert tensor.eq(tensor[:1]).all()
        return tensor[:1].expand_as(tensor)
    return tensor


LAYOUTS = ["contiguous", "transposed", "column_slice", "row_step", "column_step"]
MATRIX_LAYOUTS = [*LAYOUTS[1:], "both_steps", "offset", "expanded"]
VECTOR_LAYOUTS = ["step", "offset", "expanded"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("input_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
def test_memory_layout_does_not_matter(device, input_layout, weight_layout, reduction, dtype, poisoned_memory):
    inputs = make_inputs((300, 24, 61), device=device, dtype=dtype, bias=True)
    expected = run_reference(inputs, reduction=reduction)
    inputs = inputs.clone()
    changed = (
        strided(inputs.input.detach(), input_layout).requires_grad_(),
        strided(inputs.linear_weight.detach(), weight_layout).requires_grad_(),
        torch.stack([inputs.target, inputs.target + 1], 1)[:, 0],
        torch.stack([inputs.linear_bias, inputs.linear_bias + 1], 1).detach()[:, 0].requires_grad_(),
    )
    with flce_ops.workspace(4096):  # chunks of a strided tensor, too
        loss = flce_ops.linear_cross_entropy(*changed, reduction=reduction)
        grads = torch.autograd.grad(loss.sum(), [changed[0], changed[1], changed[3]])
    assert error(loss, expected["loss"]) < TOLERANCE[dtype]
    for name, grad in zip(("input", "linear_weight", "linear_bias"), grads, strict=True):
        assert error(grad, expected[name]) < TOLERANCE[dtype], name


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_expanded_inputs(device, reduction):
    """Stride 0: one hidden state for all tokens, one bias for all classes, one target, one token weight."""
    inputs = make_inputs((20, 8, 31), device=device, dtype=torch.float64, bias=True, token_weight=True)
    leaves = [t[:1].detach().requires_grad_() for t in (inputs.input, inputs.linear_bias, inputs.token_weight)]
    input, bias, token_weight = leaves
    target = torch.tensor([5], device=device)

    def grads_of(function):
        loss = function(
            input.expand(20, 8),
            inputs.linear_weight,
            target.expand(20),
            bias.expand(31),
            token_weight=token_weight.expand(20),
            reduction=reduction,
        )
        return torch.autograd.grad(loss.sum(), [*leaves, inputs.linear_weight])

    for ours, expected in zip(grads_of(flce_ops.linear_cross_entropy), grads_of(reference_loss), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).norm() <= 1e-13 * (1 + expected.norm())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tokens", [(4, 7), (2, 3, 5), (1, 1), (0, 3), ()], ids=str)
def test_tokens_may_have_any_shape(device, tokens, reduction):
    """As F.cross_entropy takes logits (V,), a single token needs no dimension: input (D,), target ()."""
    count = torch.Size(tokens).numel()
    inputs = make_inputs((count, 11, 31), device=device, dtype=torch.float64, bias=True, token_weight=True)
    shaped = inputs.clone()
    shaped.input = shaped.input.detach().view(*tokens, 11).requires_grad_()
    shaped.target = shaped.target.view(tokens)
    shaped.token_weight = shaped.token_weight.detach().view(tokens).requires_grad_()
    expected = run(reference_loss, shaped, reduction=reduction)
    found = run(flce_ops.linear_cross_entropy, shaped, reduction=reduction)
    assert found["loss"].shape == (tokens if reduction == "none" else ())
    for name in expected:
        assert found[name].shape == expected[name].shape
        if not (name == "loss" and count == 0):
            assert error(found[name], expected[name]) < 1e-11, name  # one token may be sure of its class


def test_transposed_batch_of_tokens(device):
    """(T, B, D) hidden states viewed as (B, T, D): flattening must not reorder the tokens."""
    inputs = make_inputs((28, 11, 31), device=device, dtype=torch.float64)
    input = inputs.input.detach().view(7, 4, 11).transpose(0, 1).requires_grad_()
    target = inputs.target.view(7, 4).t()
    found = flce_ops.linear_cross_entropy(input, inputs.linear_weight, target, reduction="none")
    expected = reference_loss(input, inputs.linear_weight, target, reduction="none")
    assert error(found, expected) < 1e-13
    (ours,), (exact,) = (torch.autograd.grad(loss.sum(), input) for loss in (found, expected))
    assert error(ours, exact) < 1e-13


def test_parameters_and_buffers_are_not_written(device):
    inputs = make_inputs(device=device, bias=True, weight=True, token_weight=True)
    before = inputs.clone()
    run(flce_ops.linear_cross_entropy, inputs, label_smoothing=0.1)
    inputs_now = [*inputs.args, *inputs.options.values()]
    for now, then in zip(inputs_now, [*before.args, *before.options.values()], strict=True):
        assert torch.equal(now, then)
