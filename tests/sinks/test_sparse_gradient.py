"""A sparse logit gradient: what it keeps, its mean and variance over seeds, and that nothing else affects it."""

# N tokens, n rows, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error
from test_compile import compiled
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import flce_ops
from flce_ops.math import sparse_gradient

SHAPE = (23, 9, 4500)  # three tiles of classes, the last one partial
THRESHOLD = 2.0**-6


def seed_of(number):
    return torch.tensor(number)


def sparse(threshold=THRESHOLD, mode="unbiased", seed=1):
    return {"gradient_threshold": threshold, "gradient_mode": mode, "gradient_seed": seed_of(seed)}


def gradients(inputs, **options):
    loss = flce_ops.linear_cross_entropy(*inputs.args, **{"weight": inputs.weight, **options})
    return loss, torch.autograd.grad(loss, list(inputs.leaves.values()))


DROP_OPTIONS = [{}, {"z_loss": 1e-2, "logit_scale": 0.7}, {"reduction": "sum", "temperature": 1.3}]


@pytest.mark.parametrize("order", [False, True], ids=["ids", "an order"])
@pytest.mark.parametrize("options", DROP_OPTIONS, ids=str)
def test_drop_is_the_dense_gradient_without_small_entries(options, order):
    inputs = make_inputs(SHAPE, dtype=torch.float64, bias=True, weight=True)
    place = torch.randperm(SHAPE[2]) if order else None
    loss, found = gradients(inputs, **sparse(mode="drop"), gradient_class_order=place, **options)
    exact, dense = gradients(inputs, **options)
    assert error(loss, exact) < 1e-15 if order else torch.equal(loss, exact)  # sums over classes in another order
    truth = dense_without(inputs, "drop", options)
    for ours, expected in zip(found, [*truth, dense[2]], strict=True):
        assert error(ours, expected) < 1e-12
    assert error(found[0], dense[0]) > 1e-3


def dense_without(inputs, mode, options):
    """The gradients of both matrices from all logits, in float64."""
    x, w, y, b = (tensor.detach() for tensor in inputs.args)
    scale = options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
    z = scale * (x @ w.T + b)
    valid = y != -100
    column = torch.where(valid, y, 0)
    weight = torch.where(valid, inputs.weight[column], 0.0)
    lse = z.logsumexp(1)
    d_lse = torch.where(valid, weight + 2.0 * options.get("z_loss", 0.0) * lse, 0.0)
    g = z.softmax(1) * d_lse[:, None]
    g[torch.arange(len(y)), column] -= weight
    large = g.abs() >= THRESHOLD * d_lse.abs()[:, None]
    g = torch.where(large & valid[:, None], g, 0.0) * scale
    if options.get("reduction", "mean") == "mean":
        g /= weight.sum()
    return g @ w, g.T @ x


def test_gradients_approach_the_exact_ones_as_one_over_the_root_of_the_draws():
    """For each element, within the variance of grad_linear_weight that independent tokens predict."""
    draws, (tokens, hidden, num_classes) = 360, (6, 4, 60)
    inputs = make_inputs((tokens, hidden, num_classes), dtype=torch.float64, ignored=0.0)
    _, exact = gradients(inputs)
    threshold = 2.0**-4
    found = [gradients(inputs, **sparse(threshold, seed=seed))[1] for seed in range(draws)]
    for index, truth in enumerate(exact):
        samples = torch.stack([grads[index] for grads in found])
        deviation = samples.std(0)
        drawn = deviation > 0.1 * deviation.max()
        z = (samples.mean(0) - truth)[drawn] / deviation[drawn] * draws**0.5
        assert z.abs().max() < 5.0
        few = (samples.view(24, -1, *truth.shape).mean(1) - truth).square().mean().sqrt()
        many = (samples.view(4, -1, *truth.shape).mean(1) - truth).square().mean().sqrt()
        assert 0.2 < many / few < 0.8  # with six times as many draws 0.41 is expected
    x, w, y, _ = (None if tensor is None else tensor.detach() for tensor in inputs.args)
    g = (x @ w.T).softmax(1)
    g[torch.arange(tokens), y] -= 1.0
    variance = torch.where(g.abs() < threshold, g.abs() * (threshold - g.abs()), 0.0) / tokens**2
    ratio = samples.var(0).sum() / (variance.T @ x.square()).sum()
    assert 0.85 < ratio < 1.15


def test_an_order_of_classes_changes_nothing_else():
    inputs = make_inputs(SHAPE, dtype=torch.float64, bias=True)
    order = torch.randperm(SHAPE[2])
    inputs.target[5] = (inputs.input[5] @ inputs.linear_weight.T + inputs.linear_bias).argmax()
    exact = flce_ops.linear_cross_entropy(*inputs.args, return_metrics=True)
    loss, metrics = flce_ops.linear_cross_entropy(
        *inputs.args, **sparse(), gradient_class_order=order, return_metrics=True
    )
    assert error(loss, exact[0]) < 1e-14 and torch.equal(metrics.argmax, exact[1].argmax)
    assert metrics.token_accuracy == exact[1].token_accuracy > 0.0
    with pytest.raises(ValueError, match=r"gradient_class_order to be a permutation of the 4500 classes, \(4500,\)"):
        flce_ops.linear_cross_entropy(*inputs.args, **sparse(), gradient_class_order=order[:-1])


NO_PERMUTATIONS = {
    "one id twice": lambda order: order.index_fill(0, torch.tensor([3], device=order.device), order[7].item()),
    "zeros": torch.zeros_like,
    "shifted": lambda order: order + 1,
    "negative": lambda order: order - 1,
}


@pytest.mark.parametrize("what", NO_PERMUTATIONS)
def test_an_order_that_is_no_permutation_is_refused(what):
    inputs = make_inputs((6, 5, 31), dtype=torch.float64, bias=True)
    order = NO_PERMUTATIONS[what](torch.randperm(31))
    probabilities = torch.rand(6, 31).double()
    heads, classes = inputs.linear_weight[:, None].expand(31, 2, 5), inputs.target[:, None].expand(6, 2)
    message = r"linear_cross_entropy: expected gradient_class_order to be a permutation.*an id twice or one outside"
    for options in (sparse(), sparse() | {"return_metrics": ["lse"]}, {"reduction": "none"} | sparse(mode="drop")):
        with pytest.raises(ValueError, match=message):
            flce_ops.linear_cross_entropy(*inputs.args, gradient_class_order=order, **options)
    for operands in ((inputs.linear_weight, probabilities), (heads, classes)):
        with pytest.raises(ValueError, match=message):
            flce_ops.linear_cross_entropy(inputs.input, *operands, gradient_class_order=order, **sparse())


def test_an_order_without_a_threshold_is_refused():
    """It would have no effect."""
    inputs = make_inputs((6, 5, 31), dtype=torch.float64)
    with pytest.raises(
        ValueError, match="gradient_class_order orders .* but gradient_threshold is 0; pass gradient_thr"
    ):
        flce_ops.linear_cross_entropy(*inputs.args, gradient_class_order=torch.randperm(31))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_refuses_an_order_that_is_no_permutation(backend):
    options = {"gradient_threshold": THRESHOLD, "gradient_mode": "drop"}
    inputs = make_inputs((6, 5, 31), dtype=torch.float64)
    order = torch.randperm(31)
    loss, counter = compiled(flce_ops.linear_cross_entropy, backend)
    eager = flce_ops.linear_cross_entropy(*inputs.args)
    assert error(loss(*inputs.args, gradient_class_order=order, **options), eager) < 1e-12
    with pytest.raises(RuntimeError, match="gradient_class_order to be a permutation of the 31 classes"):
        loss(*inputs.args, gradient_class_order=torch.zeros_like(order), **options)
    assert counter.count == 1


@pytest.mark.parametrize("topk", [0, 3])
def test_no_class_becomes_ignore_index_where_an_order_places_it(topk):
    """Every class is a target, and ignore_index is the number of a class."""
    num_classes, ignored = 31, 4
    inputs = make_inputs((num_classes, 5, num_classes), dtype=torch.float64, bias=True)
    target = torch.arange(num_classes, dtype=torch.int32)
    names = ["lse"] if topk else ["lse", "argmax", "is_top1"]
    options: dict = {"ignore_index": ignored, "reduction": "none", "return_metrics": names}
    if topk:
        target = torch.stack([target.roll(k) for k in range(topk)], 1)
        options["target_weight"] = torch.rand(num_classes, topk)
    operands = (inputs.input, inputs.linear_weight, target, inputs.linear_bias)
    exact, expected = flce_ops.linear_cross_entropy(*operands, **options)
    order = torch.arange(num_classes - 1, -1, -1)
    loss, found = flce_ops.linear_cross_entropy(*operands, **options, **sparse(), gradient_class_order=order)
    assert error(loss, exact) < 1e-14
    assert all(torch.equal(found[name], expected[name]) for name in names[1:])
    gradients = [torch.autograd.grad(of.sum(), inputs.linear_bias)[0] for of in (loss, exact)]
    assert error(*gradients) < 1e-12


def test_chunks_and_ignored_tokens_do_not_change_what_is_kept():
    inputs = make_inputs((600, 8, 4500), dtype=torch.float64)
    options = sparse() | {"reduction": "sum"}
    _, whole = gradients(inputs, **options)
    with flce_ops.workspace(1):
        _, cut = gradients(inputs, **options)
    assert flce_ops.last_path().chunks > 1
    for ours, expected in zip(cut, whole, strict=True):
        assert error(ours, expected) < 1e-12
    inputs.target[100:200] = -100
    _, fewer = gradients(inputs, **options)
    assert error(fewer[0][200:], whole[0][200:]) < 1e-12


def scalar_loss(*args, **options):
    return flce_ops.linear_cross_entropy(*args, **options)


def losses_of_tokens(*args, **options):
    losses = flce_ops.linear_cross_entropy(*args, reduction="none", **options)
    return (losses * (torch.arange(len(losses), device=losses.device) - 5.0)).sum()


def entropy_beside_log_probs(*args, **options):
    found = flce_ops.linear_log_probs(*args, entropy=True, gradient_sparse="linear_weight", **options)
    return (found.log_probs * found.entropy.detach()).sum()


OBJECTIVES = [scalar_loss, losses_of_tokens, entropy_beside_log_probs]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_compiled_step_and_a_checkpoint_keep_the_same_entries(device, objective):
    inputs = make_inputs((24, 8, 300), device=device)
    options = sparse() | {"gradient_seed": torch.tensor(3, device=device)}
    expected = torch.autograd.grad(objective(*inputs.args, **options), list(inputs.leaves.values()))

    def step(input, seed):
        args = (input, *inputs.args[1:])
        return objective(*args, **options | {"gradient_seed": seed})

    def grads(loss):
        return torch.autograd.grad(loss, list(inputs.leaves.values()))

    again = checkpoint(step, inputs.input, options["gradient_seed"], use_reentrant=False)
    compiled = torch.compile(step, fullgraph=True)
    for ours in (grads(again), grads(compiled(inputs.input, options["gradient_seed"]))):
        assert all(map(torch.equal, ours, expected))
    with torch.compiler.set_stance("fail_on_recompile"):
        other = grads(compiled(inputs.input, torch.tensor(4, device=device)))
    assert not torch.equal(other[1], expected[1])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_transform_of_torch_func_keeps_the_same_entries(objective):
    # in float32 the two paths round p differently, and in one draw of about a thousand they keep another entry
    inputs = make_inputs((24, 8, 300), dtype=torch.float64)
    options = sparse()
    expected = torch.autograd.grad(objective(*inputs.args, **options), list(inputs.leaves.values()))
    input, weight, target, _ = inputs.args

    def of_operands(input, weight):
        return objective(input, weight, target, **options)

    found = torch.func.grad(of_operands, argnums=(0, 1))(input.detach(), weight.detach())
    for ours, exact in zip(found, expected, strict=True):
        assert error(ours, exact) < 1e-13
    stacked = torch.stack([input, 2.0 * input]).detach()
    batched = torch.func.vmap(torch.func.grad(of_operands), in_dims=(0, None))(stacked, weight.detach())
    assert error(batched[0], expected[0]) < 1e-13


@pytest.mark.parametrize("gradient_sparse, other", [("input", "linear_weight"), ("linear_weight", "input")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_gradient_that_is_not_chosen_is_exact_and_costs_no_sampling_alone(gradient_sparse, other, reduction):
    inputs = make_inputs((24, 8, 300), dtype=torch.float64, bias=True)
    options = {"reduction": reduction}
    chosen = sparse() | options | {"gradient_sparse": gradient_sparse}

    def of(inputs, **options):
        return torch.autograd.grad(flce_ops.linear_cross_entropy(*inputs.args, **options).sum(), inputs.leaves.values())

    found, exact = of(inputs, **chosen), of(inputs, **options)
    for name, ours, expected in zip(inputs.leaves, found, exact, strict=True):
        assert error(ours, expected) > 1e-2 if name == gradient_sparse else error(ours, expected) < 1e-12
    both = dict(zip(inputs.leaves, of(inputs, **chosen | {"gradient_sparse": "both"})))
    assert error(found[list(inputs.leaves).index(gradient_sparse)], both[gradient_sparse]) < 1e-12
    getattr(inputs, gradient_sparse).requires_grad_(False)
    for ours, expected in zip(of(inputs, **chosen), of(inputs, **options), strict=True):
        assert torch.equal(ours, expected)
    assert "sparse" not in flce_ops.last_path().reason


@pytest.mark.parametrize("mode", sparse_gradient.MODES)
def test_the_operators_pass_opcheck(device, mode):
    inputs = make_inputs((12, 11, 31), device=device, bias=True)
    options = sparse(mode=mode) | {"gradient_seed": torch.tensor(3, device=device)}
    order = torch.randperm(31, device=device)
    opcheck(torch.ops.flce.linear_cross_entropy.default, inputs.args, options | {"gradient_class_order": order})
    args = (*inputs.args, None, None)
    opcheck(torch.ops.flce.linear_cross_entropy_with_grad.default, args, {"output_mask": [True] * 3, **options})
    opcheck(torch.ops.flce.linear_cross_entropy_forward.default, inputs.args, options)
    opcheck(torch.ops.flce.linear_log_probs.default, inputs.args, options | {"gradient_sparse": "input"})
    no_leaves = [tensor.detach() for tensor in inputs.args]
    slopes = torch.rand(12, device=device)
    args = (-slopes, slopes, None, *no_leaves, None, torch.rand(12, 2, device=device))
    opcheck(torch.ops.flce.linear_cross_entropy_backward.default, args, {"output_mask": [True] * 3, **options})


REFUSED = [
    ({"gradient_threshold": 1.0}, ValueError, r"gradient_threshold in \[0, 1\), got 1.0"),
    ({"gradient_threshold": torch.tensor(0.1)}, TypeError, "gradient_threshold"),
    ({"gradient_mode": "keep"}, ValueError, "gradient_mode to be one of unbiased, drop, got 'keep'"),
    ({"gradient_mode": "tiles"}, ValueError, "gradient_mode to be one of unbiased, drop, got 'tiles'"),
    ({"gradient_seed": None}, ValueError, "expects gradient_seed, a 0-d int64 tensor"),
    ({"gradient_seed": torch.tensor([1])}, ValueError, r"gradient_seed to be a 0-d tensor in torch.int64, got \(1,\)"),
    ({"gradient_seed": torch.tensor(1.0)}, ValueError, "gradient_seed to be a 0-d tensor in torch.int64"),
    ({"gradient_seed": torch.tensor(1, device="meta")}, ValueError, "gradient_seed on the device of input"),
    (
        {"gradient_sparse": "weight"},
        ValueError,
        "gradient_sparse to be one of both, input, linear_weight, got 'weight'",
    ),
    ({"main_grad": torch.zeros(7, 4)}, NotImplementedError, "the sparse gradient with main_grad"),
]


@pytest.mark.parametrize("options, kind, message", REFUSED, ids=str)
def test_what_does_not_go_with_it_is_refused_by_name(options, kind, message):
    inputs = make_inputs((5, 4, 7))
    with pytest.raises(kind, match=message):
        flce_ops.linear_cross_entropy(*inputs.args, **sparse() | options)


def test_other_losses_and_derivatives_refuse_it():
    inputs = make_inputs((5, 4, 7))
    with pytest.raises(NotImplementedError, match="sparse gradient of class probabilities"):
        flce_ops.linear_cross_entropy(*inputs.args[:2], torch.full((5, 7), 1 / 7), **sparse())
    heads = torch.randn(7, 2, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="sparse gradient of a K-dimensional loss"):
        flce_ops.linear_cross_entropy(inputs.input, heads, torch.zeros(5, 2, dtype=torch.int64), **sparse())
    with pytest.raises(NotImplementedError, match="float16"):
        flce_ops.linear_cross_entropy(*inputs.clone(torch.float16).args, **sparse())
    for function in (flce_ops.linear_log_probs, flce_ops.linear_policy_loss):
        advantages = [torch.ones(5)] * (function is flce_ops.linear_policy_loss)
        with pytest.raises(ValueError, match=f"{function.__name__}: gradient_mode='unbiased' expects gradient_seed"):
            function(*inputs.args[:3], *advantages, gradient_threshold=0.1)
    with pytest.raises(NotImplementedError, match="gradient of the entropy with gradient_threshold"):
        flce_ops.linear_log_probs(*inputs.args, entropy=True, **sparse()).entropy.sum().backward()


def test_without_a_gradient_it_does_nothing():
    inputs = make_inputs((5, 4, 7), requires_grad=False)
    losses = flce_ops.linear_cross_entropy(*inputs.args, reduction="none", **sparse())
    assert torch.equal(losses, flce_ops.linear_cross_entropy(*inputs.args, reduction="none"))
