"""Second and third derivatives: the plain formula on dense logits, and a warning that says what a matrix takes.

tests/objectives/test_product.py has the second derivatives of every function with every option.
"""

# N tokens, D hidden, V vocabulary

import math
import warnings

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, plain_loss, reference_loss
from torch.autograd import gradcheck, gradgradcheck

import flce_ops

SHAPE = (4, 3, 5)
ARGUMENTS = {
    "plain": ({}, {}),
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
def test_gradcheck_and_gradgradcheck(device, reduction):
    call, leaves = as_function_of_leaves(*example(device, "everything", reduction))
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wanted", ["input", "linear_weight", "linear_bias", "token_weight"])
def test_gradgradcheck_of_one_argument(device, wanted, reduction):
    inputs, options = example(device, "everything", reduction)
    for name, leaf in inputs.leaves.items():
        leaf.requires_grad_(name == wanted)
    assert gradgradcheck(*as_function_of_leaves(inputs, options))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivatives_asked_for_one_by_one_are_those_of_one_backward(device, reduction):
    call, leaves = as_function_of_leaves(*example(device, "everything", reduction))

    def each(value, **graph):
        return [torch.autograd.grad(value, leaf, retain_graph=True, **graph)[0] for leaf in leaves]

    loss = call(*leaves).sum()
    both, alone = torch.autograd.grad(loss, leaves, create_graph=True), each(loss, create_graph=True)
    penalties = [sum(gradient.square().sum() for gradient in first) for first in (both, alone)]
    expected = torch.autograd.grad(penalties[0], leaves, retain_graph=True)
    for found, of_one_backward in ((alone, both), *((each(penalty), expected) for penalty in penalties)):
        torch.testing.assert_close(found, list(of_one_backward), rtol=1e-12, atol=1e-14)


def second_derivatives(function, inputs, options, penalty):
    """Gradients of loss + penalty(gradients), as in gradient penalties and meta-learning."""
    inputs = inputs.clone()
    call, leaves = as_function_of_leaves(inputs, options, function)
    loss = call(*leaves).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(loss + penalty(first), leaves)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradient_penalty_over_chunks(device, reduction):
    inputs, options = example(
        device, "everything", reduction, (400, 7, 31)
    )  # a chunk has at least 64 rows, 128 on CUDA

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


def functions_of_matrices(device, name, reduction):
    """The loss and its definition as functions of the leaves, and a direction in the space of the leaves."""
    inputs, options = example(device, name, reduction)
    call, leaves = as_function_of_leaves(inputs, options)
    exact, _ = as_function_of_leaves(inputs, options, reference_loss)
    if reduction == "none":
        call, exact = (lambda *at, f=f: f(*at).square().sum() for f in (call, exact))
    return call, exact, leaves, tuple(torch.randn_like(leaf) for leaf in leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_products_of_the_hessian_with_a_vector(device, name, reduction):
    """hvp also differentiates the second derivative with respect to its vector."""
    call, exact, leaves, along = functions_of_matrices(device, name, reduction)
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        for ours, right in zip(product(call, leaves, along)[1], product(exact, leaves, along)[1], strict=True):
            assert error(ours, right) < 1e-12, product.__name__


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ARGUMENTS)
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


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
@pytest.mark.parametrize("given", [False, True], ids=["linear", "given logits"])
def test_second_derivatives_where_a_class_that_is_switched_off_has_a_gradient(device, given, smoothing):
    """It is a target, or label smoothing counts it: the loss is infinite, and the gradients are not."""
    x, w, weight, *along = (torch.randn(s, dtype=torch.float64) for s in ((3, 4), (6, 4), (3,), (3, 4), (6, 4), (3,)))
    bias, target = torch.tensor([0.3, -torch.inf, 0.0, 0.1, 0.2, 0.0]).double().to(device), torch.tensor([1, 0, 5])

    def ours(x, w, weight):
        options = {"token_weight": weight, "reduction": "none", "label_smoothing": smoothing, "logit_scale": 2.0}
        if given:
            return flce_ops.cross_entropy(x @ w.T + bias, target.to(device), **options).sum() / 3
        return flce_ops.linear_cross_entropy(x, w, target.to(device), linear_bias=bias, **options).sum() / 3

    def plain(x, w, weight):
        losses = torch.nn.functional.cross_entropy(
            2.0 * (x @ w.T + bias), target.to(device), label_smoothing=smoothing, reduction="none"
        )
        return (losses * weight).sum() / 3

    def second(function):
        leaves = [leaf.to(device).requires_grad_() for leaf in (x, w, weight)]
        first = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, [v.to(device) for v in along])

    for found, right in zip(second(ours), second(plain), strict=True):
        assert error(found, right) < 1e-12


def policy(input, linear_weight, target, linear_bias=None):
    advantages = torch.linspace(-1.0, 1.0, len(target), dtype=input.dtype, device=input.device)
    old = torch.full_like(advantages, -2.0)  # without it, the ratio is 1 whatever a difference moves
    options = {"linear_bias": linear_bias, "reduction": "none", "clip_low": math.inf, "clip_high": math.inf}
    return flce_ops.linear_policy_loss(input, linear_weight, target, advantages, old, **options).loss


def of_rows(input, linear_weight, target, linear_bias=None):
    found = flce_ops.linear_log_probs(input, linear_weight, target, linear_bias, softcap=5.0, entropy=True)
    return found.log_probs + found.lse * found.entropy


def given_logits(input, linear_weight, target, linear_bias=None):
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    return flce_ops.cross_entropy(logits, target, reduction="none")


FUNCTIONS = {
    "loss": flce_ops.linear_cross_entropy,
    "losses": lambda *args: flce_ops.linear_cross_entropy(*args, reduction="none", label_smoothing=0.1, z_loss=0.01),
    "policy": policy,
    "log-probabilities and entropy": of_rows,
    "given logits": given_logits,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_third_derivatives(device, name):
    """Those of the first derivatives, whose second ones gradgradcheck compares with differences."""
    inputs = make_inputs(SHAPE, device=device, dtype=torch.float64, bias=True)

    def first(*leaves):
        loss = FUNCTIONS[name](*leaves[:2], inputs.target, leaves[2]).square().sum()
        return torch.autograd.grad(loss, leaves, create_graph=True)

    assert gradgradcheck(first, tuple(inputs.leaves.values()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_warns_of_a_matrix_of_all_logits(device, name):
    inputs = make_inputs((525, 8, 2003), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first derivative has no such matrix
        loss = FUNCTIONS[name](*inputs.args).sum()
        first = torch.autograd.grad(loss, inputs.linear_weight, create_graph=True)[0]
    with pytest.warns(UserWarning, match="cross_entropy_backward: a second derivative keeps .* logits, 4 MiB each"):
        first.square().sum().backward()
