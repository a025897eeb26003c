"""Second derivatives are correct in float64; third derivatives are refused by name."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, plain_loss, reference_loss
from torch.autograd import gradcheck, gradgradcheck

import flce_ops

SHAPE = (4, 3, 5)
ARGUMENTS = {
    "plain": ({}, {}),
    "bias": ({"bias": True}, {}),
    "class_weight": ({"weight": True}, {}),
    "label_smoothing": ({}, {"label_smoothing": 0.2}),
    "class_weight_and_smoothing": ({"weight": True}, {"label_smoothing": 0.2}),
    "softcap": ({}, {"softcap": 4.0}),
    "logit_scale": ({}, {"logit_scale": 0.6}),
    "z_loss": ({}, {"z_loss": 0.05}),
    "token_weight": ({"token_weight": True}, {}),
    "normalizer": ({"normalizer": True}, {}),
    "everything": (
        {"bias": True, "weight": True, "token_weight": True, "normalizer": True},
        {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1},
    ),
}


def example(device, name, reduction, shape=SHAPE):
    made, options = ARGUMENTS[name]
    made = {**made, "normalizer": made.get("normalizer", False) and reduction != "none"}
    inputs = make_inputs(shape, device=device, dtype=torch.float64, **made)
    return inputs, {**options, "reduction": reduction}


def as_function_of_leaves(inputs, options, function=None):
    function = function or flce_ops.linear_cross_entropy
    names = list(inputs.leaves)

    def call(*leaves):
        at = dict(zip(names, leaves, strict=True))
        extra = {k: at.get(k, v) for k, v in inputs.options.items()}
        args = (at.get("input", inputs.input), at.get("linear_weight", inputs.linear_weight), inputs.target)
        return function(*args, at.get("linear_bias", inputs.linear_bias), **extra, **options)

    return call, tuple(inputs.leaves.values())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradcheck_and_gradgradcheck(device, name, reduction):
    call, leaves = as_function_of_leaves(*example(device, name, reduction))
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wanted", ["input", "linear_weight", "linear_bias", "token_weight"])
def test_gradgradcheck_of_one_argument(device, wanted, reduction):
    inputs, options = example(device, "everything", reduction)
    for name, leaf in inputs.leaves.items():
        leaf.requires_grad_(name == wanted)
    assert gradgradcheck(*as_function_of_leaves(inputs, options))


def second_derivatives(function, inputs, options, penalty):
    """Gradients of loss + penalty(gradients), as in gradient penalties and meta-learning."""
    inputs = inputs.clone()
    call, leaves = as_function_of_leaves(inputs, options, function)
    loss = call(*leaves).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(loss + penalty(first), leaves)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_gradient_penalty_over_chunks(device, name, reduction):
    inputs, options = example(device, name, reduction, (400, 7, 31))  # a chunk has at least 64 rows, 128 on CUDA

    def penalty(grads):
        return sum(g.square().sum() for g in grads)

    expected = second_derivatives(reference_loss, inputs, options, penalty)
    with flce_ops.workspace(4096):
        found = second_derivatives(flce_ops.linear_cross_entropy, inputs, options, penalty)
    assert flce_ops.last_path().chunks > 2
    for leaf, ours, exact in zip(inputs.leaves, found, expected, strict=True):
        assert error(ours, exact) < 1e-12, leaf


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_penalty_in_lower_precision(device, dtype, reduction):
    inputs = make_inputs((40, 17, 61), device=device, dtype=dtype, bias=True)
    options = {"reduction": reduction}

    def penalty(grads):
        return sum(g.double().square().sum() for g in grads)

    exact = second_derivatives(reference_loss, inputs.clone(torch.float64), options, penalty)
    plain = second_derivatives(plain_loss, inputs, options, penalty)
    ours = second_derivatives(flce_ops.linear_cross_entropy, inputs, options, penalty)
    for name, a, b, c in zip(inputs.leaves, ours, plain, exact, strict=True):
        slack = 1e-6 if dtype == torch.float32 else 1e-2
        assert error(a, c) <= 1.2 * error(b, c) + slack, name


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_with_create_graph_are_those_without(device, reduction):
    inputs, options = example(device, "everything", reduction, (40, 7, 31))
    call, leaves = as_function_of_leaves(inputs, options)
    with_graph = torch.autograd.grad(call(*leaves).sum(), leaves, create_graph=True)
    without = torch.autograd.grad(call(*leaves).sum(), leaves)
    for a, b in zip(with_graph, without, strict=True):
        assert a.requires_grad and not b.requires_grad
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_grad_output_has_a_gradient(device, reduction):
    """d(factor * loss)/d(factor): the outer problem may learn the loss scale."""
    inputs, options = example(device, "plain", reduction)

    def products(function):
        call, leaves = as_function_of_leaves(inputs.clone(), options, function)
        factor = torch.tensor(1.5, dtype=torch.float64, device=device, requires_grad=True)
        first = torch.autograd.grad(factor * call(*leaves).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (factor, *leaves))

    for ours, exact in zip(products(flce_ops.linear_cross_entropy), products(reference_loss), strict=True):
        assert error(ours, exact) < 1e-12


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_third_derivatives_are_refused_by_name(device, reduction):
    inputs, options = example(device, "plain", reduction)
    call, leaves = as_function_of_leaves(inputs, options)
    first = torch.autograd.grad(call(*leaves).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy.*third derivative"):
        torch.autograd.grad(sum(g.square().sum() for g in second), leaves)


def functions_of_matrices(device, name, reduction):
    """The loss and its definition as functions of the leaves, and a direction in the space of the leaves."""
    inputs, options = example(device, name, reduction)
    call, leaves = as_function_of_leaves(inputs, options)
    exact, _ = as_function_of_leaves(inputs, options, reference_loss)
    if reduction == "none":
        call, exact = (lambda *at, f=f: f(*at).square().sum() for f in (call, exact))
    return call, exact, leaves, tuple(torch.randn_like(leaf) for leaf in leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["plain", "bias", "softcap", "everything"])
def test_products_of_the_hessian_with_a_vector(device, name, reduction):
    """hvp also differentiates the second derivative with respect to its vector."""
    call, exact, leaves, along = functions_of_matrices(device, name, reduction)
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        for ours, right in zip(product(call, leaves, along)[1], product(exact, leaves, along)[1], strict=True):
            assert error(ours, right) < 1e-12, product.__name__


def test_a_graph_through_the_product_is_a_third_derivative_and_refused(device):
    call, _, leaves, along = functions_of_matrices(device, "plain", "mean")
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: third derivatives"):
        torch.autograd.functional.hvp(call, leaves, along, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_batch_of_grad_outputs(device, name, reduction):
    call, exact, leaves, _ = functions_of_matrices(device, name, reduction)
    grad_output = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, device=device)
    found, right = (torch.autograd.grad(f(*leaves), leaves, grad_output, is_grads_batched=True) for f in (call, exact))
    for ours, theirs in zip(found, right, strict=True):
        assert ours.shape == theirs.shape and error(ours, theirs) < 1e-12
    hessians = (torch.autograd.functional.hessian(f, leaves, vectorize=f is call) for f in (call, exact))
    jacobians = (torch.autograd.functional.jacobian(f, leaves, vectorize=f is call) for f in (call, exact))
    for ours, theirs in zip(next(jacobians), next(jacobians), strict=True):
        assert error(ours, theirs) < 1e-12
    for ours, theirs in zip(next(hessians), next(hessians), strict=True):
        assert all(error(a, b) < 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_of_tokens_that_are_sure_of_their_class(device, dtype):
    """For nearly 1, p (1 - p) is a difference: contributions through lse must cancel before anything is rounded."""
    inputs = make_inputs((32, 16, 50), device=device, dtype=dtype, ignored=0.0)
    inputs.input.data *= 6
    inputs.target = (inputs.input @ inputs.linear_weight.T).argmax(1)

    def second(function, inputs):
        inputs = inputs.clone()
        leaves = list(inputs.leaves.values())
        first = torch.autograd.grad(function(*inputs.args, reduction="sum"), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.sum() for grad in first), leaves)

    exact = second(reference_loss, inputs.clone(torch.float64))
    found, plain = second(flce_ops.linear_cross_entropy, inputs), second(plain_loss, inputs)
    # for logits of 50, one unit in the last place of lse is a relative error of 1 - p
    unit_of_lse = torch.finfo(torch.float32).eps * float((inputs.input @ inputs.linear_weight.T).detach().abs().max())
    for ours, usual, right in zip(found, plain, exact, strict=True):
        slack = 2 * unit_of_lse if dtype == torch.float32 else 8e-3
        assert error(ours, right) <= 2 * error(usual, right) + slack


@pytest.mark.parametrize("moved", [-3e-3, 3e-3])
def test_second_derivatives_of_sure_tokens_vanish_whatever_the_last_digits_of_lse(device, moved):
    """At logits of 2000 the lse of another GEMM differs by more than the rounding of a probability."""
    inputs = make_inputs((16, 16, 50), device=device, ignored=0.0)
    with torch.no_grad():
        inputs.input *= 2000.0 / (inputs.input @ inputs.linear_weight.T).abs().max()
    logits = inputs.input.detach() @ inputs.linear_weight.detach().T
    target, lse = logits.argmax(1), logits.logsumexp(1)
    sure = logits.topk(2).values.diff().squeeze(1) < -30.0
    assert sure.any()
    cotangent, ones = torch.randn_like(inputs.input), torch.ones_like(lse)
    _, _, _, second, _, _ = torch.ops.flce.linear_cross_entropy_double_backward(
        cotangent,
        None,
        None,
        -ones,
        ones,
        None,
        inputs.input.detach(),
        inputs.linear_weight.detach(),
        target,
        None,
        None,
        lse + moved,
    )
    assert second[sure].abs().max() < 1e-6


def test_third_derivatives_are_refused_by_the_name_of_the_function_that_was_called():
    inputs = make_inputs((5, 3, 7), dtype=torch.float64)
    rows = flce_ops.linear_log_probs(*inputs.args).log_probs
    (first,) = torch.autograd.grad(rows.sum(), inputs.input, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), inputs.input, create_graph=True)
    with pytest.raises(NotImplementedError, match="^linear_log_probs: third derivatives"):
        second.sum().backward()
