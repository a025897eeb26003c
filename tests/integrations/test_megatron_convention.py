"""Megatron's convention for main_grad, with its hook written as in Megatron."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, run_reference
from test_main_grad import D, N, V
from torch import nn

import flce_ops
from flce_ops.integrations import megatron


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_convention_of_megatron(tied, overlap):
    """Megatron's hook adds .grad unless the flag is set. If it overlaps communication, it needs a .grad."""
    inputs = make_inputs((N, D, V))
    weight = nn.Parameter(inputs.linear_weight.detach().clone())
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = tied
    seen = []

    def hook(*unused):
        assert not overlap or weight.grad is not None
        if weight.grad is not None and (not weight.grad_added_to_main_grad or weight.zero_out_wgrad):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None
        seen.append(weight.grad_added_to_main_grad)

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(hook)

    def hidden_of(weight, input):
        return torch.tanh(weight[inputs.target.clamp(min=0)] + input) if tied else input

    for _ in range(2):
        megatron.linear_cross_entropy(hidden_of(weight, inputs.input), weight, inputs.target).backward()
    plain = inputs.linear_weight.detach().clone().requires_grad_()
    flce_ops.linear_cross_entropy(hidden_of(plain, inputs.input), plain, inputs.target).backward()
    assert error(weight.main_grad, 2 * plain.grad) < 1e-6 and seen == [True, True]


def test_no_gradient_is_made_only_to_be_dropped(monkeypatch):
    """The buffer has it already. Zeros of the weight's size would be memory that nobody reads."""
    arrived, backward = [], megatron.AddedToMainGrad.backward

    def recorded(ctx, gradient):
        arrived.append(gradient)
        return backward(ctx, gradient)

    monkeypatch.setattr(megatron.AddedToMainGrad, "backward", staticmethod(recorded))
    inputs = make_inputs((N, D, V))
    inputs.linear_weight.main_grad = torch.zeros_like(inputs.linear_weight, requires_grad=False)
    megatron.linear_cross_entropy(*inputs.args).backward()
    assert arrived == [None]


def test_without_megatrons_flag_autograd_gets_no_gradient():
    inputs = make_inputs((N, D, V))
    weight = inputs.linear_weight
    for _ in range(2):
        with pytest.raises(AttributeError, match="expected linear_weight.main_grad, which Megatron's .* got none"):
            megatron.linear_cross_entropy(*inputs.args)
        weight.main_grad = None  # as Megatron's FSDP leaves it
    weight.main_grad = torch.zeros_like(weight, requires_grad=False)
    megatron.linear_cross_entropy(*inputs.args).backward()
    assert weight.grad is None and error(weight.main_grad, run_reference(inputs)["linear_weight"]) < 1e-6
    with torch.no_grad():
        megatron.linear_cross_entropy(inputs.input, weight.detach(), inputs.target)
