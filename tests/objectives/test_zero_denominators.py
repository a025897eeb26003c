"""Sums divided by 0, inf and nan, or over nothing, give nan, infinities and zeros where plain torch does.

Plain torch means F.cross_entropy's losses, 0 for ignored tokens, and losses.sum() / the weights of the classes that
count, as its own mean is, or / normalizer. A row's softmax subtracts the sum of its gradient, so with a denominator of
0 the target's entry is inf - inf.
"""

# N tokens, D hidden, V vocabulary

import math

import pytest
import torch
import torch.nn.functional as F
from inputs import Inputs, scalars
from reference_divergence import KINDS, KINKED
from reference_loss import plain_loss
from torch.utils.checkpoint import checkpoint

import flce_ops
from flce_ops import aten

N, D, V = 9, 6, 31
NUMBERS = [0.0, -0.0, math.inf, math.nan]


def make(tokens=N, ignored=(0, 4), weight=None, token_weight=None, normalizer=None, positive=False):
    """Targets are among the first 26 classes. With `positive`, all input is positive, so that infinite sums over tokens
    are not nan.
    """
    input, target = torch.randn(tokens, D), torch.randint(V - 5, (tokens,))
    if tokens:
        target[slice(None) if ignored == "all" else list(ignored)] = -100
    return Inputs(
        (input.abs() if positive else input).requires_grad_(),
        torch.randn(V, D).requires_grad_(),
        target,
        torch.randn(V).requires_grad_(),
        weight=None if weight is None else torch.tensor(weight).expand(V) * (torch.arange(V) < V - 5),
        token_weight=None
        if token_weight is None
        else torch.tensor(token_weight).expand(tokens).clone().requires_grad_(),
        normalizer=None if normalizer is None else torch.tensor(normalizer),
    )


# name: (arguments of `make`, options)
CASES = {
    "no token": ({"tokens": 0}, {}),
    "all ignored": ({"ignored": "all"}, {}),
    "class weights 0": ({"weight": 0.0}, {}),
    "class weights 0, smoothed": ({"weight": 0.0}, {"label_smoothing": 0.1}),
    "token weights 0": ({"token_weight": 0.0}, {}),
    "a normalizer of 0 and token weights": ({"normalizer": 0.0, "token_weight": 0.5}, {}),
    "a normalizer of 0 and signs": ({"normalizer": 0.0, "token_weight": [1.0, 1, -2, 0, 3, 1, 1, -5, 2]}, {}),
    "a normalizer of 0 and token weights 0": ({"normalizer": 0.0, "token_weight": 0.0}, {}),
    "a normalizer of 0 and positive input": ({"normalizer": 0.0, "positive": True}, {}),
    "a normalizer of 0, smoothed": ({"normalizer": 0.0}, {"label_smoothing": 0.1}),
    "a normalizer of 0 under a softcap": ({"normalizer": 0.0}, {"softcap": 5.0, "z_loss": 0.01}),
    "a normalizer of 0 without targets": ({"normalizer": 0.0, "ignored": "all"}, {}),
    "a normalizer of 0 without tokens": ({"normalizer": 0.0, "tokens": 0}, {}),
    **{f"a normalizer of {number}": ({"normalizer": number}, {}) for number in NUMBERS},
}


def with_metrics(*args, **options):
    return flce_ops.linear_cross_entropy(*args, return_metrics=True, **options)[0]


def checkpointed(*args, **options):
    return checkpoint(flce_ops.linear_cross_entropy, *args, use_reentrant=False, **options)


PATHS = {"one pass": flce_ops.linear_cross_entropy, "metrics": with_metrics, "recomputed": checkpointed}


def run(function, inputs, **options):
    inputs = inputs.clone()
    loss = function(*inputs.args, **inputs.options, **options)
    grads = torch.autograd.grad(loss, list(inputs.leaves.values()), torch.ones_like(loss))
    return dict(zip(("loss", *inputs.leaves), (loss.detach(), *grads)))


def kinds(tensor):
    """Codes: 2 for nan, 3 and -3 for infinities, 0 for 0, 1 for other numbers."""
    kind = torch.where(tensor == 0.0, 0.0, 1.0).masked_fill(tensor.isnan(), 2.0)
    return torch.where(tensor.isinf(), 3.0 * tensor.sign(), kind)


def assert_same_kinds(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(kinds(found[name]), kinds(expected[name])), name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_nan_infinite_and_zero_where_plain_torchs_are(case, path, reduction):
    made, options = CASES[case]
    if reduction == "none":
        made = {name: value for name, value in made.items() if name != "normalizer"}
    inputs = make(**made)
    options = {**options, "reduction": reduction}
    assert_same_kinds(run(PATHS[path], inputs, **options), run(plain_loss, inputs, **options))


@pytest.mark.parametrize("case", ["a normalizer of 0 and signs", "class weights 0, smoothed", "no token"])
def test_compiled_they_are_too(case):
    made, options = CASES[case]
    inputs = make(**made)
    compiled = torch.compile(flce_ops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    assert_same_kinds(run(compiled, inputs, **options), run(plain_loss, inputs, **options))


def test_a_normalizer_of_0_gets_the_gradient_of_the_quotient():
    inputs = make(normalizer=0.0)
    inputs.normalizer.requires_grad_()
    assert_same_kinds(run(flce_ops.linear_cross_entropy, inputs), run(plain_loss, inputs))


def plain_divergence(input, linear_weight, teacher_input, teacher_weight, kind, target, normalizer, reduction):
    log_q, log_p = (
        F.linear(input, linear_weight).log_softmax(-1),
        F.linear(teacher_input, teacher_weight).log_softmax(-1),
    )
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    pairs = {"forward": [(log_q, log_p)], "reverse": [(log_p, log_q)]}.get(kind, [(log_m, log_p), (log_m, log_q)])
    if kind in KINKED:
        q, p = log_q.exp(), log_p.exp()
        distance = 0.5 * (p - q).abs()
        # min(p, q), written so that every entry has a slope
        rows = distance.sum(-1) if kind == "tv" else -(0.5 * (p + q) - distance).sum(-1).log()
    else:
        rows = sum(F.kl_div(b, a, log_target=True, reduction="none").sum(-1) / len(pairs) for b, a in pairs)
    valid = target != -100
    total = torch.where(valid, rows, 0.0).sum()
    return (
        total
        if reduction == "sum" and normalizer is None
        else total / (valid.sum().clamp(min=1) if normalizer is None else normalizer)
    )


@pytest.mark.parametrize("path", ["one pass", "recomputed"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", [name for name, (made, options) in CASES.items() if not {"weight", "token_weight"} & {*made}]
)
def test_a_divergence_is_nan_infinite_and_zero_where_plain_torchs_is(case, kind, reduction, path):
    """The mean over no token is 0."""
    inputs = make(**CASES[case][0])
    teacher = torch.randn(inputs.input.shape[0], D), torch.randn(V, D)
    options = {"kind": kind, "target": inputs.target, "normalizer": inputs.normalizer, "reduction": reduction}

    def gradients(function):
        leaves = [operand.detach().clone().requires_grad_() for operand in (inputs.input, inputs.linear_weight)]
        loss = function(*leaves, *teacher, **options)
        return dict(zip(("loss", "input", "linear_weight"), (loss.detach(), *torch.autograd.grad(loss, leaves))))

    def ours(*args, **options):
        if path == "one pass":
            return flce_ops.linear_kl_div(*args, **options)
        return checkpoint(flce_ops.linear_kl_div, *args, use_reentrant=False, **options)

    assert_same_kinds(gradients(ours), gradients(plain_divergence))


@pytest.fixture
def launchers():
    if torch.cuda.is_available():
        pytest.skip("the kernels run for real on this machine (marker gpu)")
    return pytest.importorskip("flce_ops.triton")


GRADIENTS = ("input", "linear_weight", "linear_bias")


def assert_kernels_make_the_same_kinds(kernels, gradients, *args, **options):
    """`gradients`: their places among the results."""
    found, expected = (kernel(*args, output_mask=[True, True, True], **options)[gradients] for kernel in kernels)
    assert_same_kinds(*(dict(zip(GRADIENTS, grads, strict=True)) for grads in (found, expected)))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"softcap": 5.0, "z_loss": 0.01}], ids=str)
@pytest.mark.parametrize("weight", [None, 0.0])
@pytest.mark.parametrize("slope", [math.inf, -math.inf, math.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf - inf
def test_triton_one_pass_makes_of_an_infinite_slope_what_aten_makes(launchers, slope, weight, options):
    """Positive input and one valid token: infinite sums over tokens stay infinite."""
    inputs = make(tokens=2, ignored=(0,), weight=weight, positive=True)
    operands = [None if operand is None else operand.detach() for operand in (*inputs.args, inputs.weight)]
    row_scale = torch.where(inputs.target == -100, 0.0, slope)
    kernels = (launchers.launch_with_grad, aten.with_grad)
    assert_kernels_make_the_same_kinds(kernels, slice(2, 5), *operands, row_scale, **scalars(options))


@pytest.mark.parametrize("slope", [math.inf, -math.inf, math.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf - inf
def test_triton_recomputing_makes_of_an_infinite_slope_what_aten_makes(launchers, slope):
    inputs = make(tokens=2, ignored=(0,), positive=True)
    operands = [None if operand is None else operand.detach() for operand in (*inputs.args, None)]
    cotangent = torch.full((2,), slope)
    _, pair, *_ = aten.forward(*operands)
    kernels = (launchers.launch_backward, aten.backward)
    assert_kernels_make_the_same_kinds(kernels, slice(3), -cotangent, cotangent, None, *operands, pair)


def test_soft_targets_of_class_weight_0_over_a_normalizer_of_0_are_nan_on_both_paths():
    """0 times inf is nan, whether forward makes the gradient or, with a checkpoint, backward."""
    inputs = make(normalizer=0.0)
    target = torch.tensor([[V - 1, V - 2]]).repeat(N, 1)
    target[0] = torch.tensor([2, 3])
    options = {"weight": (torch.arange(V) < V - 5).float(), "normalizer": inputs.normalizer}
    options["target_weight"] = torch.rand(N, 2)

    def loss(input):
        return flce_ops.linear_cross_entropy(input, inputs.linear_weight, target, **options)

    for value in (loss(inputs.input), checkpoint(loss, inputs.input, use_reentrant=False)):
        assert value == math.inf
        assert torch.autograd.grad(value, inputs.input)[0].isnan().all()
