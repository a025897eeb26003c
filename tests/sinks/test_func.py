"""torch.func: grad, vmap, vmap(grad), jacrev and hessians by reverse mode; forward mode is refused by name."""

# B batch, N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import SMALL, make_inputs
from reference_loss import error, reference_loss
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import flce_ops

OPTIONS = {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1}
TIGHT = 1e-12  # float64; matrix products in another order


def loss_of(function, inputs, **options):
    """The loss as a function of the tensors that are differentiated."""

    def loss(input, linear_weight, linear_bias):
        return function(input, linear_weight, inputs.target, linear_bias, weight=inputs.weight, **options)

    return loss, (inputs.input, inputs.linear_weight, inputs.linear_bias)


def example(device, shape=SMALL, **made):
    return make_inputs(shape, device=device, dtype=torch.float64, bias=True, requires_grad=False, **made)


def assert_close(ours, exact):
    for a, b in zip(ours, exact, strict=True):
        assert error(a, b) < TIGHT


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_vmap_over_an_empty_batch_is_refused_by_name(device, reduction):
    inputs = example(device)
    empty = torch.zeros(0, *SMALL[:2], dtype=torch.float64, device=device)
    with pytest.raises(NotImplementedError, match="vmap over an empty batch"):
        vmap(lambda x: flce_ops.linear_cross_entropy(x, *inputs.args[1:3], reduction=reduction))(empty)


def test_grad_of_half_inputs(device):
    inputs = make_inputs(device=device, dtype=torch.bfloat16, requires_grad=False)
    by_func = grad(flce_ops.linear_cross_entropy, argnums=(0, 1))(*inputs.args)
    inputs.input.requires_grad_()
    inputs.linear_weight.requires_grad_()
    by_autograd = torch.autograd.grad(flce_ops.linear_cross_entropy(*inputs.args), (inputs.input, inputs.linear_weight))
    for a, b in zip(by_func, by_autograd, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert error(a, b.double()) < 8e-3


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    "in_dims",
    [
        (0, None, 0),  # a batch of sequences
        (None, 0, None),  # an ensemble of heads
        (None, None, 0),  # only targets
        (0, 0, 0),
        (1, 1, 1),  # the batch dimension is in the middle
        (0, None, None),
    ],
    ids=str,
)
def test_vmap(device, in_dims, reduction):
    inputs = example(device, (13, 11, 31), token_weight=True)
    stack = [torch.stack([t, t.roll(1, 0), t.flip(0)]) for t in (inputs.input, inputs.linear_weight, inputs.target)]
    single = (inputs.input, inputs.linear_weight, inputs.target)
    args = [t if d is None else s.movedim(0, d) for t, s, d in zip(single, stack, in_dims, strict=True)]

    def call(function):
        return lambda *a: function(*a, inputs.linear_bias, token_weight=inputs.token_weight, reduction=reduction)

    found = vmap(call(flce_ops.linear_cross_entropy), in_dims=in_dims)(*args)
    expected = torch.stack(
        [
            call(reference_loss)(*(t if d is None else t.select(d, i) for t, d in zip(args, in_dims, strict=True)))
            for i in range(3)
        ]
    )
    assert error(found, expected) < TIGHT


def test_autograd_through_vmap(device):
    inputs = example(device, (20, 7, 31))
    inputs.target[::5] = 3
    results = []
    for function in (flce_ops.linear_cross_entropy, reference_loss):
        leaves = [inputs.input.clone().requires_grad_(), inputs.linear_weight.clone().requires_grad_()]

        def loss(input, target, function=function, leaves=leaves):
            return function(input, leaves[1], target)

        losses = vmap(loss)(leaves[0].view(4, 5, 7), inputs.target.view(4, 5))
        results.append((losses.detach(), *torch.autograd.grad(losses.square().sum(), leaves)))
    assert_close(*results)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_jacrev_of_jacrev(device, reduction):
    inputs = example(device, (3, 2, 5))
    ours, exact = (
        jacrev(jacrev(loss, argnums=(0, 1)), argnums=(0, 1))(*args)
        for loss, args in (
            loss_of(f, inputs, reduction=reduction, **OPTIONS) for f in (flce_ops.linear_cross_entropy, reference_loss)
        )
    )
    for ours_row, exact_row in zip(ours, exact, strict=True):
        assert_close(ours_row, exact_row)


def forward_mode(inputs, way):
    function, tangent = flce_ops.linear_cross_entropy, torch.ones_like(inputs.input)
    if way == "jvp":
        jvp(lambda x: function(x, *inputs.args[1:]), (inputs.input,), (tangent,))
    elif way == "jvp of the weight":
        ones = torch.ones_like(inputs.linear_weight)
        jvp(lambda w: function(inputs.input, w, *inputs.args[2:], reduction="none"), (inputs.linear_weight,), (ones,))
    elif way == "jacfwd":
        jacfwd(lambda x: function(x, *inputs.args[1:], reduction="none"))(inputs.input)
    elif way == "hessian":
        hessian(lambda x: function(x, *inputs.args[1:]))(inputs.input)
    elif way == "make_dual":
        with forward_ad.dual_level():
            function(forward_ad.make_dual(inputs.input, tangent), *inputs.args[1:])
    elif way == "make_dual of a leaf":
        with forward_ad.dual_level():
            leaf = inputs.input.clone().requires_grad_()
            function(forward_ad.make_dual(leaf, tangent), *inputs.args[1:])
    elif way == "make_dual under no_grad":
        with forward_ad.dual_level(), torch.no_grad():
            function(forward_ad.make_dual(inputs.input, tangent), *inputs.args[1:])


@pytest.mark.parametrize(
    "way",
    ["jvp", "jvp of the weight", "jacfwd", "hessian", "make_dual", "make_dual of a leaf", "make_dual under no_grad"],
)
def test_forward_mode_is_refused_by_name(device, way):
    """Without a refusal, the derivative would silently be zero."""
    with pytest.raises(NotImplementedError, match="linear_cross_entropy.*forward-mode"):
        forward_mode(example(device), way)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_tangents_of_token_weights_are_the_losses_own(device, reduction):
    """Token weights multiply the losses in ordinary ATen, so no operator is differentiated."""
    inputs = example(device, token_weight=True)
    tangent = torch.randn_like(inputs.token_weight)

    def loss(token_weight):
        return flce_ops.linear_cross_entropy(*inputs.args, token_weight=token_weight, reduction=reduction)

    _, found = jvp(loss, (inputs.token_weight.detach(),), (tangent,))
    losses = flce_ops.linear_cross_entropy(*inputs.args, reduction="none") * tangent
    assert_close([found], [losses if reduction == "none" else losses.sum()])
