"""Second derivatives of losses and rows over a sharded vocabulary equal those of one process."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from inputs import Inputs
from process_pool import worlds
from reference_loss import error, plain_loss
from sharded_inputs import TOLERANCE, R, batch, full, mesh_of, place
from test_distributed_vocabulary import with_padding
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion

import flce_ops


@in_worlds(worlds(2, 4))
@pytest.mark.parametrize("function", [torch.square, torch.exp], ids=["square", "exp"])
def test_second_derivatives_of_functions_of_the_loss(device, function):
    """The gradient that reaches the loss then depends on the loss, so it has a derivative, too."""
    size = dist.get_world_size()
    cases = [(mesh_of(device, size), *layouts) for layouts in (([Shard(0)], [R]), ([R], [Shard(0)]), ([R], [R]))]
    if size == 4:
        cases.append((mesh_of(device, 2, 2), [Shard(0), R], [R, Shard(0)]))
    for mesh, tokens, rows in cases:
        inputs = batch(device, dtype=torch.float64, token_weight=True)
        placed = place(inputs, mesh, tokens, rows)
        loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options)
        found = squared_gradient_norm(function(loss), placed.input)
        exact = squared_gradient_norm(function(plain_loss(*inputs.args, **inputs.options)), inputs.input)
        assert error(full(found), exact) < 1e-12
        for name, expected in inputs.leaves.items():
            assert error(full(placed.leaves[name].grad), expected.grad) < 1e-12, (name, tokens, rows)


@in_worlds(worlds(2))
def test_derivatives_of_hidden_states_made_with_the_sharded_head(device):
    """If input depends on linear_weight, that path is counted once, with and without create_graph."""
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, dtype=torch.float64)
    placed = place(inputs, mesh, [R], [Shard(0)])

    def derivatives(made: Inputs, loss_function) -> list[Tensor]:
        hidden = (made.input @ made.linear_weight.T).tanh() @ made.linear_weight
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(mesh, [R])
        loss = loss_function(hidden, made.linear_weight, made.target)
        (first,) = torch.autograd.grad(loss, made.linear_weight, retain_graph=True)
        (with_graph,) = torch.autograd.grad(loss, made.linear_weight, create_graph=True)
        return [first, with_graph, *torch.autograd.grad(with_graph.square().sum(), made.linear_weight)]

    found = derivatives(placed, flce_ops.linear_cross_entropy)
    names = ["first", "with a graph", "second"]
    if torch.__version__ < TorchVersion("2.13"):  # 2.11 loses a part of the derivative if DTensors are multiplied
        names.remove("second")
    for name, ours, exact in zip(names, found, derivatives(inputs, plain_loss)):
        assert error(full(ours), exact) < 1e-12, (name, error(full(ours), exact))


@in_worlds(worlds(2))
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_rows_of_a_sharded_logit_gradient_add_up_to_zero_at_any_magnitude(device, offset):
    """Each shard's lse is rounded, to 5e-4 at 10^4, but the shards' shares of the softmax add up to 1."""
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, bias=True)
    inputs.linear_bias.data += offset
    for reduction in ("sum", "none"):
        placed = place(inputs, mesh, [R], [Shard(0)])
        flce_ops.linear_cross_entropy(*placed.args, reduction=reduction).sum().backward()
        assert abs(float(full(placed.linear_bias.grad).double().sum())) / inputs.target.numel() < 5e-7, reduction


@in_worlds(worlds(2))
def test_second_derivatives_beside_a_rank_of_padded_classes(device):
    inputs = batch(device, dtype=torch.float64, bias=True)
    placed = place(with_padding(inputs, 2, -torch.inf), mesh_of(device, 2), [R], [Shard(0)])
    found = squared_gradient_norm(flce_ops.linear_cross_entropy(*placed.args), placed.input)
    exact = squared_gradient_norm(flce_ops.linear_cross_entropy(*inputs.args), inputs.input)
    assert error(full(found), exact) < TOLERANCE
    for name in ("input", "linear_weight", "linear_bias"):
        grad, expected = full(placed.leaves[name].grad), inputs.leaves[name].grad
        assert error(grad[: len(expected)], expected) < TOLERANCE and not grad[len(expected) :].any(), name


def squared_gradient_norm(loss: Tensor, input: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, input, create_graph=True)
    penalty = gradient.square().sum()
    penalty.backward()
    return penalty.detach()
