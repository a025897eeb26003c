"""Padding after the vocabulary: linear_kl_div(vocab_size=), and linear_weight[:V] for the other functions."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary, without the padding

import inputs
import pytest
import torch
from recorded import Recorded
from reference_divergence import KINDS, make_pair

import flce_ops

N, D, E, V = 12, 5, 7, 31
POISON = float("nan")


def padded(tensor, rows, dim=0):
    """Adds rows after the classes that would change any sum."""
    shape = list(tensor.shape)
    shape[dim] = rows
    padding = torch.full(shape, POISON, dtype=tensor.dtype, device=tensor.device)
    return torch.cat([tensor.detach(), padding], dim).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("student", "teacher"), [(0, 3), (5, 0), (4, 2)])
@pytest.mark.parametrize("probs", [False, True])
def test_padding_has_no_probability_and_no_gradient(device, probs, student, teacher, kind, reduction):
    pair = make_pair((N, D, E, V), device=device, dtype=torch.float64, bias=True, probs=probs)
    extra = {"linear_weight": student, "linear_bias": student, "teacher_weight": teacher, "teacher_bias": teacher}
    given = {name: padded(tensor, extra.get(name, 0)) for name, tensor in pair.items() if name in extra}
    if probs:
        given["teacher_probs"] = padded(pair["teacher_probs"], teacher, dim=-1)
    loss = flce_ops.linear_kl_div(**pair, kind=kind, reduction=reduction)
    found = flce_ops.linear_kl_div(**pair | given, kind=kind, reduction=reduction, vocab_size=V)
    assert torch.equal(found, loss)
    names = ("input", "linear_weight", "linear_bias")
    right = torch.autograd.grad(loss.sum(), [pair[name] for name in names])
    gradients = torch.autograd.grad(found.sum(), [(pair | given)[name] for name in names])
    for name, gradient, expected in zip(names, gradients, right):
        assert not gradient[len(expected) :].any() and len(gradient) == len(expected) + extra.get(name, 0)
        torch.testing.assert_close(gradient[: len(expected)], expected)


def tensors_of_operators(func, args, out):
    return [tensor for tensor in args if isinstance(tensor, torch.Tensor)] if func.namespace == "flce" else []


@pytest.mark.parametrize("shape", [(N,), (3, 4)])
def test_what_is_padded_is_not_copied(shape):
    hidden, teacher = torch.randn(*shape, D), torch.randn(*shape, E)
    weight, teacher_weight, probs = torch.randn(V + 3, D), torch.randn(V + 2, E), torch.rand(*shape, V + 1)
    target = torch.randint(V, shape)
    with Recorded(tensors_of_operators) as given:
        flce_ops.linear_kl_div(hidden, weight, teacher, teacher_weight, vocab_size=V)
        flce_ops.linear_kl_div(hidden, weight, teacher_probs=probs, vocab_size=V)
        flce_ops.linear_cross_entropy(hidden, weight[:V], target)
        flce_ops.linear_log_probs(hidden, weight[:V], target)
    seen = {tensor.data_ptr() for tensor in given.seen}
    assert {tensor.data_ptr() for tensor in (hidden, weight, teacher, teacher_weight, probs)} <= seen
    assert not [tensor for tensor in given.seen if set(tensor.shape) & {V + 1, V + 2, V + 3}]


def test_compiled_is_eager():
    pair = make_pair((N, D, E, V), dtype=torch.float64)
    pair["teacher_weight"] = padded(pair["teacher_weight"], 3)
    compiled = torch.compile(flce_ops.linear_kl_div, fullgraph=True, backend="aot_eager")
    losses = [function(**pair, vocab_size=V) for function in (compiled, flce_ops.linear_kl_div)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, pair["linear_weight"]) for loss in losses))


def test_a_loss_without_the_padding_is_that_of_the_rows_before_it(device):
    """The recipe for the other functions. Class probabilities are cut as the weight is."""
    made = inputs.make_inputs((N, D, V), device=device, dtype=torch.float64)
    weight = padded(made.linear_weight, 4)
    loss = flce_ops.linear_cross_entropy(made.input, weight[:V], made.target)
    right = flce_ops.linear_cross_entropy(made.input, made.linear_weight, made.target)
    assert torch.equal(loss, right)
    loss.backward()
    right.backward()
    assert torch.equal(weight.grad[:V], made.linear_weight.grad) and not weight.grad[V:].any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": V + 1}, ValueError, "at most the 31 classes of linear_weight, got 32"),
        ({"vocab_size": V - 1, "teacher_weight": torch.randn(9, E)}, ValueError, "9 classes of teacher_weight, got 30"),
        ({"vocab_size": 0}, ValueError, "expected vocab_size to be positive or None, got 0"),
        ({"vocab_size": V - 1, "linear_bias": torch.randn(V - 1)}, ValueError, r"linear_bias of shape \(31,\)"),
        ({"vocab_size": V - 1, "linear_weight": torch.randn(V)}, ValueError, r"linear_weight of shape \(V, D\)"),
        ({"vocab_size": V - 1, "teacher_weight": torch.eye(V).to_sparse()}, TypeError, "teacher_weight.*sparse"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, error, message):
    pair = make_pair((N, D, E, V))
    with pytest.raises(error, match=f"^linear_kl_div: .*{message}"):
        flce_ops.linear_kl_div(**pair | changes)
