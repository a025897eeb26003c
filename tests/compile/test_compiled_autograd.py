"""Compiled autograd, training steps in one compiled function, and torch's higher-order operators over chunks of tokens:
every function gives the gradients of the plain call in float64.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from reference_loss import error
from test_compile import LOSSES_OF_TOKENS, compiled, ignored_inputs, tensors_of
from torch import nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.utils.checkpoint import checkpoint

import flce_ops


@flce_ops.token_loss
def focal(log_prob):
    return -((1 - log_prob.exp()) ** 2) * log_prob


FUNCTIONS = LOSSES_OF_TOKENS | {
    "token loss": lambda *args: flce_ops.linear_token_loss(*args, focal),
    "token loss none": lambda *args: flce_ops.linear_token_loss(*args, focal, reduction="none"),
    "token_weight": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, token_weight=w[:1].expand(50, -1)[:, 0]),
    "learnt scale": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, logit_scale=w.mean()),
    "sparse": lambda *args: flce_ops.linear_cross_entropy(*args, gradient_threshold=0.01, gradient_mode="drop"),
}


def sum_of(function, *args):
    """The sum of all differentiable results."""
    return sum(value.sum() for value in tensors_of(function(*args)) if value.requires_grad)


INPUTS = ignored_inputs()


def operands(dtype=torch.float32):
    *leaves, target = INPUTS
    return *(leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in leaves), target


def gradients_in_float64(function):
    *leaves, target = operands(torch.float64)
    return torch.autograd.grad(sum_of(function, *leaves, target), leaves)


def compiled_autograd(fullgraph=True):
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=fullgraph))


@pytest.mark.parametrize(
    ("name", "forward"),
    [*((name, "eager") for name in FUNCTIONS), *((name, "compiled") for name in ("none", "policy"))],
)
def test_compiled_autograd_is_one_graph_and_applies_each_factor_of_a_retained_graph_once(name, forward):
    """Two heads with saved results in a retained graph are torch's fault: docs/troubleshooting.md."""
    function, (*leaves, target) = FUNCTIONS[name], operands()
    loss = sum_of(compiled(function)[0] if forward == "compiled" else function, *leaves, target)
    seen = []
    leaves[0].register_hook(lambda gradient: 2 * gradient)
    leaves[1].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf))
    with compiled_autograd():
        if name != "positions":
            loss.backward(torch.full_like(loss, 3.0), retain_graph=True)
        loss.backward(torch.full_like(loss, 5.0 if name != "positions" else 8.0))
    assert len(seen) == 2 - (name == "positions")
    for leaf, factor, exact in zip(leaves, (16.0, 8.0), gradients_in_float64(function)):
        assert error(leaf.grad / factor, exact) < 2e-6


@pytest.mark.parametrize("name", ["mean", "none", "options", "log_probs", "policy", "token loss", "logits none"])
def test_compiled_autograd_under_create_graph_has_the_second_derivatives_of_eager_mode(name):
    """AOTAutograd has none of its own: it took the slopes of a token function for constants."""

    def penalty(context):
        *leaves, target = operands(torch.float64)
        loss = sum_of(FUNCTIONS[name], *leaves, target)
        with context:
            first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)

    for fullgraph in (False, True):
        for found, expected in zip(penalty(compiled_autograd(fullgraph)), penalty(torch.enable_grad())):
            assert error(found, expected) < 1e-13


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_compiled_autograd_adds_to_main_grad(forward, reduction):
    function = FUNCTIONS[reduction]
    *leaves, target = operands(torch.float64)
    main_grad = torch.ones_like(leaves[1])

    def loss(*args):
        return flce_ops.linear_cross_entropy(*args, target, reduction=reduction, main_grad=main_grad).sum()

    loss = (compiled(loss)[0] if forward == "compiled" else loss)(*leaves)
    with compiled_autograd():
        loss.backward()
    exact = gradients_in_float64(function)
    assert error(leaves[0].grad, exact[0]) < 1e-13 and error(main_grad - 1, exact[1]) < 1e-13


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mean", "token loss"])
def test_compiled_autograd_of_a_checkpointed_region(name, reentrant):
    """torch breaks the graph at its checkpoint."""
    function, (*leaves, target) = FUNCTIONS[name], operands()

    def region(*args):
        return checkpoint(lambda *args: tuple(tensors_of(function(*args))), *args, use_reentrant=reentrant)

    loss = sum_of(region, *leaves, target)
    with compiled_autograd(fullgraph=False):
        loss.backward()
    for leaf, exact in zip(leaves, gradients_in_float64(function)):
        assert error(leaf.grad, exact) < 2e-6


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(11, 11, dtype=torch.float64), nn.Linear(11, 31, False, dtype=torch.float64)
        self.function = function

    def forward(self, input, target):
        return sum_of(self.function, torch.tanh(self.trunk(input)), self.head.weight, target) / 50


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}
STEPS = [("mean", optimizer) for optimizer in OPTIMIZERS] + [
    (name, "foreach") for name in ("log_probs", "token loss", "logits in place")
]


def losses_of_three_steps(name, optimizer, way):
    torch.compiler.reset()
    input, _, target = operands(torch.float64)
    model = Model(FUNCTIONS[name])
    step_of = OPTIMIZERS[optimizer](model.parameters())

    def step():
        loss = model(input.detach(), target)
        loss.backward()
        step_of.step()
        step_of.zero_grad()
        return loss.detach()

    with torch._dynamo.config.patch(compiled_autograd=way == "compiled autograd"):
        run = step if way == "eager" else torch.compile(step, backend="aot_eager")
        return torch.stack([run() for _ in range(3)])


@pytest.mark.parametrize(("name", "optimizer"), STEPS)
def test_a_whole_training_step_compiles(name, optimizer):
    """Forward, backward and the optimizer in one function. torch breaks the graph at loss.backward() and in the
    optimizer; compiled autograd captures the backward.
    """
    curves = [losses_of_three_steps(name, optimizer, way) for way in ("eager", "compile", "compiled autograd")]
    assert len(curves[0].unique()) == 3
    # a compiled AdamW of lists takes its bias corrections in float32
    tolerance = 5e-6 if optimizer == "foreach" else 1e-12
    assert error(curves[1], curves[0]) < tolerance and error(curves[2], curves[0]) < tolerance


def of_given_logits(x, w, t):
    return flce_ops.cross_entropy(F.linear(x, w), t, reduction="none")  # cond of torch 2.13 takes no w.T in a region


OF_CHUNKS = {
    "mean": flce_ops.linear_cross_entropy,
    **{name: FUNCTIONS[name] for name in ("none", "soft targets", "policy", "kl_div", "token loss")},
    "log_probs": flce_ops.linear_log_probs,
    "logits": of_given_logits,
}
every_function_of_chunks = pytest.mark.parametrize("name", OF_CHUNKS)


def of_chunk(function, *args):
    """The sum of the loss, or of the log-probabilities."""
    return tensors_of(function(*args))[0].sum()


def with_map(function, xs, w, ts):
    return map(lambda chunk: of_chunk(function, chunk[0], w, chunk[1]), (xs, ts)).sum()


def with_cond(function, xs, w, ts):
    branches = lambda x, w, t: of_chunk(function, x, w, t), lambda x, w, t: (0 * x).sum() + (0 * w).sum()  # noqa: E731
    return sum(torch.cond((t >= 0).any(), *branches, (x, w, t)) for x, t in zip(xs, ts))


def with_scan(function, xs, w, ts):
    def add(total, chunk):
        return total + of_chunk(function, chunk[0], w, chunk[1]), total.clone()

    return scan(add, xs.new_zeros(()), (xs, ts))[0]


def with_while_loop(function, xs, w, ts):
    def add(i, total):
        x, t = (tensor.index_select(0, i.view(1))[0] for tensor in (xs, ts))
        return i + 1, total + of_chunk(function, x, w, t)

    return while_loop(lambda i, total: i < len(xs), add, (torch.tensor(0), xs.new_zeros(())))[1]


def with_associative_scan(function, xs, w, ts):
    losses = torch.stack([of_chunk(function, x, w, t) for x, t in zip(xs, ts)])
    return associative_scan(torch.add, losses, 0, combine_mode="generic")[-1]


def with_regions(function, xs, w, ts):
    return sum(REGIONS[function](x, w, t) for x, t in zip(xs, ts))


REGIONS = {
    function: torch.compiler.nested_compile_region(lambda *args, function=function: of_chunk(function, *args))
    for function in OF_CHUNKS.values()
}


def chunks(dtype):
    *leaves, target = operands(dtype)
    return leaves, lambda ways, function: ways(function, leaves[0].view(5, 10, 11), leaves[1], target.view(5, 10))


@pytest.mark.parametrize("way", [with_map, with_cond, with_associative_scan, with_regions])
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "eager") for name in OF_CHUNKS), ("mean", "compiled"), ("policy", "compiled")]
)
def test_a_higher_order_operator_over_chunks_has_the_gradients_of_a_loop(mode, way, name):
    function = OF_CHUNKS[name]
    exact_leaves, exact_of = chunks(torch.float64)
    exact = exact_of(lambda f, xs, w, ts: sum(of_chunk(f, x, w, t) for x, t in zip(xs, ts)), function)
    leaves, found_of = chunks(torch.float32)
    found = found_of(compiled(way)[0] if mode == "compiled" else way, function)
    assert error(found, exact) < 2e-6
    pairs = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(exact, exact_leaves))
    assert all(error(gradient, expected) < 2e-6 for gradient, expected in pairs)


@every_function_of_chunks
@pytest.mark.parametrize("way", [with_scan, with_while_loop])
def test_scan_and_while_loop_run_forward_alone(way, name):
    with torch.no_grad():
        _, of = chunks(torch.float64)
        expected = of(with_associative_scan, OF_CHUNKS[name])
        for found in (of(way, OF_CHUNKS[name]), of(compiled(way)[0], OF_CHUNKS[name])):
            assert error(found, expected) < 1e-13


@every_function_of_chunks
def test_a_gradient_through_scan_is_refused_with_what_to_do(name):
    _, of = chunks(torch.float64)
    with pytest.raises(
        Exception, match="takes no autograd.Function; call it for all tokens at once.*or in torch's map"
    ):
        of(with_scan, OF_CHUNKS[name])
