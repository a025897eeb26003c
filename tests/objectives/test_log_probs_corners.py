"""linear_log_probs with ignored tokens, switched-off classes and extreme logits."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs
from reference_loss import error
from test_log_probs import BOTH, DTYPES, FLOATS, UNIT, assert_no_worse_than_plain, cotangents_of, dense, ours, run

import flce_ops
from flce_ops import linear_log_probs

flce = torch.ops.flce


def test_nothing_asked_for_is_none_and_empty_in_the_operator(device):
    inputs = make_inputs((6, 5, 7), device=device)
    found = linear_log_probs(*inputs.args)
    assert found.entropy is None and found.argmax is None
    assert [t.shape for t in flce.linear_log_probs(*inputs.args)[2:]] == [(0,)] * 5
    assert [t.shape for t in flce.linear_cross_entropy_forward(*inputs.args)[2:-1]] == [(0,)] * 6
    for name in ("entropy", "argmax"):
        alone = linear_log_probs(*inputs.args, **{name: True})
        assert [n for n in BOTH if getattr(alone, n) is not None] == [name]
        torch.testing.assert_close(getattr(alone, name), getattr(ours(*inputs.args), name))


def test_only_the_argmax_has_no_graph(device):
    found = ours(*make_inputs((6, 5, 7), device=device).args)
    assert [t.requires_grad for t in found] == [True, True, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5}, {"softcap": 5.0}], ids=["plain", "scale", "softcap"])
def test_classes_switched_off_by_a_bias_of_minus_infinity(device, options, dtype, poisoned_memory):
    inputs = make_inputs((64, 32, 1021), device=device, dtype=dtype, bias=True)
    off = torch.zeros(1021, dtype=torch.bool, device=device)
    off[:900] = True  # whole tiles, including the first
    inputs.target[inputs.target != -100] = torch.randint(900, 1021, ((inputs.target != -100).sum(),), device=device)
    inputs.linear_bias.data[off] = float("-inf")
    assert_no_worse_than_plain(inputs, cotangents_of(FLOATS, inputs), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_target_that_is_switched_off_has_no_probability_and_leaves_the_entropy_right(device, dtype):
    inputs = make_inputs((40, 16, 301), device=device, dtype=dtype, bias=True, ignored=0.1)
    # class 0 is the stand-in for ignored tokens
    inputs.linear_bias.data[inputs.target[1]] = inputs.linear_bias.data[0] = float("-inf")
    cotangents = cotangents_of(FLOATS, inputs)
    exact, _ = run(dense, inputs, cotangents, torch.float64)
    found, _ = run(ours, inputs, cotangents)
    assert found["log_probs"][1] == float("-inf")
    for name, tensor in found.items():
        assert error(tensor, exact[name]) <= 40 * UNIT[dtype], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_ten_thousand_stay_finite(device, dtype):
    inputs = make_inputs((60, 32, 509), device=device, dtype=dtype)
    with torch.no_grad():
        logits = F.linear(inputs.input.double(), inputs.linear_weight.double())
        inputs.input.mul_((1e4 / logits.abs().max()).to(dtype))
    cotangents = {name: torch.rand(60, device=device) for name in FLOATS}
    exact, _ = run(dense, inputs, cotangents, torch.float64)
    plain, _ = run(dense, inputs, cotangents)
    found, _ = run(ours, inputs, cotangents)
    # for float32 a unit of lse is 1e-3 here, and p = exp(z - lse) has that error
    slack = {torch.float64: 1e-11, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.1}[dtype]
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
        if name == "entropy":
            off, theirs = ((result[name] - exact[name]).abs().max() for result in (found, plain))
            assert off <= 1.5 * theirs + 8 * torch.finfo(tensor.dtype).eps
        else:
            assert error(tensor, exact[name]) <= 3 * error(plain[name], exact[name]) + slack, name


def test_a_peaked_distribution_has_entropy_zero_and_a_flat_one_log_v(device):
    weight = torch.zeros(37, 5, device=device)
    hidden = torch.randn(4, 5, device=device)
    target = torch.arange(4, device=device)
    flat = ours(hidden, weight, target)
    torch.testing.assert_close(flat.entropy, torch.full((4,), 37.0, device=device).log())
    torch.testing.assert_close(flat.log_probs, -flat.entropy)
    bias = torch.zeros(37, device=device).index_fill_(0, torch.tensor(9, device=device), 60.0)
    peaked = ours(hidden, weight, target, bias)
    assert peaked.entropy.abs().max() < 1e-5
    assert (peaked.argmax == 9).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equal_logits_is_the_argmax(device, dtype):
    weight = torch.randint(-2, 3, (600, 4), device=device).to(dtype)  # products of small integers are exact
    hidden = torch.randint(-2, 3, (50, 4), device=device).to(dtype)
    logits = hidden.float() @ weight.float().T
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).float().mean() > 0.5
    target = torch.randint(600, (50,), device=device)
    assert torch.equal(ours(hidden, weight, target).argmax, first)
    hidden.requires_grad_()
    _, metrics = flce_ops.linear_cross_entropy(hidden, weight, target, return_metrics=True)
    assert torch.equal(metrics.argmax, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_entropy_of_nearly_sure_rows_keeps_the_digits_of_plain_torch(device, dtype):
    """The entropy must not be a difference of lse and a mean logit, because both have the rounding errors of logits of
    40.
    """
    classes = torch.randn(1009, 64, device=device) / 8
    y = torch.randint(1009, (256,), device=device)
    x = (40 * classes[y] + 0.1 * torch.randn(256, 64, device=device)).to(dtype).requires_grad_()
    w = classes.to(dtype).requires_grad_()

    def plain(x, w):
        log_p = F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def step(function, *leaves):
        entropy = function(*leaves)
        slope = torch.linspace(-1, 1, len(entropy), device=device) * (4096 if dtype == torch.float16 else 1)
        return entropy.detach(), *torch.autograd.grad((entropy * slope).sum(), leaves)

    exact = step(plain, *(leaf.detach().double().requires_grad_() for leaf in (x, w)))
    found = step(lambda x, w: flce_ops.linear_log_probs(x, w, y, entropy=True).entropy, x, w)
    assert 0 < exact[0].median() < 0.5
    unit = 2e-7 * len(x) ** 0.5 / exact[0].norm()  # for numbers near 1, the sums of exponentials
    for mine, theirs, truth in zip(found, step(plain, x, w), exact, strict=True):
        assert error(mine, truth) <= 1.5 * error(theirs, truth) + unit
