"""Factors of a loss, frozen operands, checkpoints, torch.func and autocast: of every function and kind of target."""

# N tokens, D hidden, V vocabulary

import functools

import pytest
import torch
from inputs import make_inputs
from reference_divergence import KINDS
from reference_loss import error
from test_checkpoint import WAYS
from test_compile import LOSSES_OF_TOKENS, kl_div, tensors_of, value_and_gradients
from torch.utils.checkpoint import checkpoint

import flce_ops

FUNCTIONS = LOSSES_OF_TOKENS | {kind: functools.partial(kl_div, kind=kind) for kind in KINDS}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def operands(device, dtype=torch.float64):
    inputs = make_inputs((24, 11, 31), device=device, dtype=dtype)
    return inputs.input, inputs.linear_weight, inputs.target


@every_function
def test_a_factor_is_applied_once_by_every_backward_of_a_retained_graph(device, function):
    """A factor other than 1 first: if gradients were rescaled in place, the next backward would be wrong."""
    *leaves, target = operands(device, torch.float32)
    loss = sum(value.sum() for value in tensors_of(function(*leaves, target)) if value.requires_grad)
    retained = [
        torch.autograd.grad(loss, leaves, torch.full_like(loss, factor), retain_graph=True)
        for factor in (65536.0, 1.0, 65536.0)
    ]
    last = torch.autograd.grad(loss, leaves)
    for first, second, third, fourth in zip(*retained, last, strict=True):
        assert torch.equal(first, third) and torch.equal(second, fourth)
        assert error(first, 65536.0 * second) <= 8e-7


@every_function
@pytest.mark.parametrize("frozen", [0, 1], ids=["input", "linear_weight"])
def test_a_frozen_operand_changes_no_other_gradient(device, frozen, function):
    args = list(operands(device, torch.float32))
    gradients = value_and_gradients(function, *args)[-2:]
    args[frozen] = args[frozen].detach()
    loss = sum(value.sum() for value in tensors_of(function(*args)) if value.requires_grad)
    (found,) = torch.autograd.grad(loss, args[1 - frozen])
    assert torch.equal(found, gradients[1 - frozen])


def left_to_backward(function):
    """`function` under gradients_in_backward()."""

    def run(*args):
        with flce_ops.gradients_in_backward():
            return function(*args)

    return run


def checkpointed(function):
    return lambda *args: checkpoint(lambda *args: tuple(tensors_of(function(*args))), *args, use_reentrant=False)


def compiled(function):
    return torch.compile(lambda *args: tuple(tensors_of(function(*args))), backend="aot_eager", fullgraph=True)


@every_function
@pytest.mark.parametrize("way", [lambda function: function, left_to_backward, checkpointed, compiled])
def test_gradients_asked_for_one_by_one_are_those_of_one_backward(device, function, way):
    """A zero-bubble pipeline asks for the input's first, and retains the graph."""
    *leaves, target = operands(device, torch.float32)
    # AOTAutograd takes saved tensors for buffers of one backward, and then refuses to retain its graph
    with torch._functorch.config.patch(donated_buffer=False):
        loss, plain = (
            sum(value.sum() for value in tensors_of(of(*leaves, target)) if value.requires_grad)
            for of in (way(function), function)
        )
        both = torch.autograd.grad(loss, leaves, retain_graph=True)
        alone = [torch.autograd.grad(loss, leaf, retain_graph=leaf is leaves[0])[0] for leaf in leaves]
        for first, second, exact in zip(both, alone, torch.autograd.grad(plain, leaves), strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, exact, rtol=1e-5, atol=1e-6)


@every_function
@pytest.mark.parametrize("way", ["reentrant", "non_reentrant", "selective_by_list"])
def test_a_checkpointed_region_gives_the_same(device, way, function):
    def region(*args):
        return checkpoint(lambda *args: tuple(tensors_of(function(*args))), *args, **WAYS[way])

    args = operands(device)
    for found, expected in zip(value_and_gradients(region, *args), value_and_gradients(function, *args), strict=True):
        torch.testing.assert_close(found, expected)


@every_function
def test_vmap_and_its_gradients_are_those_of_each_batch(device, function):
    hidden, weight, target = operands(device)
    batches = hidden.view(4, 6, 11).detach(), target.view(4, 6)

    def loss(hidden, weight, target):
        return sum(value.sum() for value in tensors_of(function(hidden, weight, target)) if value.requires_grad)

    one_by_one = [value_and_gradients(function, x.requires_grad_(), weight, y) for x, y in zip(*batches, strict=True)]
    fixed, over = weight.detach(), {"in_dims": (0, None, 0)}
    values = torch.func.vmap(lambda *args: tensors_of(function(*args)), **over)(batches[0].detach(), fixed, batches[1])
    gradients = torch.func.vmap(torch.func.grad(loss, (0, 1)), **over)(batches[0].detach(), fixed, batches[1])
    for found, *expected in zip([*values, *gradients], *one_by_one, strict=True):
        torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("weighted", "policy", "policy none")])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_the_call_in_half_whether_or_not_backward_is_inside(device, half, name):
    args = operands(device, torch.float32)
    of_half = [tensor.detach().to(half).requires_grad_() for tensor in args[:2]]
    expected = value_and_gradients(FUNCTIONS[name], *of_half, args[2])

    def autocast(*args):
        with torch.autocast(device, half):
            return FUNCTIONS[name](*args)

    outside = value_and_gradients(autocast, *args)
    with torch.autocast(device, half):
        inside = value_and_gradients(FUNCTIONS[name], *args)
    for found in (outside, inside):
        assert all(gradient.dtype == torch.float32 for gradient in found[-2:])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other.to(one.dtype))
