"""Operands computed from one another, as with tied embeddings: no path between them is counted twice."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, reference_loss

import flce_ops

N, D, V = 20, 8, 31
TIGHT = 1e-12


def tied_embedding(w, target):
    return {"input": torch.tanh(w[target.clamp(min=0)]), "linear_weight": w}


def weights_of_tokens_from_the_head(w, target):
    input = torch.sin(w[torch.arange(N) % V])
    return {"input": input, "linear_weight": w, "token_weight": (w.sum(1)[target] * input.sum(1)).sigmoid()}


def head_made_in_the_trunk(w, target):
    made = w * w.sigmoid()
    return {"input": torch.tanh(made[target] @ made.T @ made), "linear_weight": made}


def bias_from_the_head(w, target):
    return {"input": w[target].cos(), "linear_weight": w, "linear_bias": w.sum(1).sin()}


def normalizer_from_token_weights(w, target):
    token_weight = w[target].sum(1).exp()
    return {"input": w[target], "linear_weight": w, "token_weight": token_weight, "normalizer": token_weight.sum()}


def one_tensor_as_input_and_weight(w, target):
    return {"input": w, "linear_weight": w}


MADE = [
    tied_embedding,
    weights_of_tokens_from_the_head,
    head_made_in_the_trunk,
    bias_from_the_head,
    normalizer_from_token_weights,
    one_tensor_as_input_and_weight,
]
OPTIONS = {"softcap": 5.0, "z_loss": 0.01, "label_smoothing": 0.1}


def derivatives(function, made, w, target, **options):
    """The gradient by w, the same gradient with a graph, and the gradient of a projection of that."""
    w = w.detach().clone().requires_grad_()
    arguments = made(w, target)
    if made is one_tensor_as_input_and_weight:
        target = torch.arange(V, device=w.device).flip(0)
    if options["reduction"] == "none":
        arguments.pop("normalizer", None)
    input, linear_weight = arguments.pop("input"), arguments.pop("linear_weight")
    loss = function(input, linear_weight, target, arguments.pop("linear_bias", None), **arguments, **options)
    loss = (loss**2).sum() if options["reduction"] == "none" else loss
    (first,) = torch.autograd.grad(loss, w, retain_graph=True)
    (with_graph,) = torch.autograd.grad(loss, w, create_graph=True)
    (second,) = torch.autograd.grad((with_graph * torch.linspace(-1, 1, D).to(w)).sum(), w)
    return first, with_graph, second


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "everything"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("made", MADE)
def test_first_and_second_derivatives_are_the_dense_formulas(device, made, reduction, options):
    inputs = make_inputs((N, D, V), device=device, dtype=torch.float64, ignored=0.0, requires_grad=False)
    arguments = (made, inputs.linear_weight, inputs.target)
    found = derivatives(flce_ops.linear_cross_entropy, *arguments, reduction=reduction, **options)
    exact = derivatives(reference_loss, *arguments, reduction=reduction, **options)
    for name, ours, right in zip(("first", "with a graph", "second"), found, exact, strict=True):
        assert error(ours, right) < TIGHT, name


def test_log_probs_of_a_tied_head(device):
    inputs = make_inputs((N, D, V), device=device, dtype=torch.float64, ignored=0.0, requires_grad=False)

    def log_prob(function):
        w = inputs.linear_weight.clone().requires_grad_()
        total = function(torch.tanh(w[inputs.target]), w).sum()
        (first,) = torch.autograd.grad(total, w, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), w)

    found = log_prob(lambda h, w: flce_ops.linear_log_probs(h, w, inputs.target).log_probs)
    exact = log_prob(lambda h, w: (h @ w.T).log_softmax(1).gather(1, inputs.target[:, None]))
    for ours, right in zip(found, exact, strict=True):
        assert error(ours, right) < TIGHT


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("changed", ["input", "linear_weight"])
@pytest.mark.parametrize("heads", [0, 2], ids=["one head", "a head for each position"])
def test_an_operand_changed_in_place_before_backward_is_an_error_by_that_name(heads, changed, reduction):
    """torch's own error speaks of the views that the positions' heads are."""
    inputs = make_inputs((6, 4, 9))
    operands = {"input": inputs.input * 1.0, "linear_weight": inputs.linear_weight * 1.0}
    weight, target = operands["linear_weight"], inputs.target
    if heads:
        operands["linear_weight"] = weight[:, None].expand(-1, heads, -1).clone()
        target = target[:, None].expand(-1, heads)
    loss = flce_ops.linear_cross_entropy(**operands, target=target, reduction=reduction).sum()
    operands[changed].mul_(2.0)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified by an inplace operation"):
        loss.backward()
