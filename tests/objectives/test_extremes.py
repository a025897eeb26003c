"""Nothing to learn from, huge logits, classes that are switched off, no tokens."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from inputs import RAGGED, make_inputs
from reference_loss import error, plain_loss, reference_loss, run, run_reference
from torch.utils.checkpoint import checkpoint

import flce_ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERYTHING = {"bias": True, "weight": True, "token_weight": True}
OPTIONS = {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ignored_tokens_get_zero_gradient(device, reduction, dtype, poisoned_memory):
    """Gradient rows of ignored tokens are written, too, whatever their cotangents are."""
    inputs = make_inputs(device=device, dtype=dtype, token_weight=True)
    ignored = inputs.target == -100
    cotangent = None
    if reduction == "none":
        cotangent = torch.ones(RAGGED[0], device=device).masked_fill(ignored, float("nan"))
    inputs.token_weight.data[ignored] = float("inf")
    found = run(flce_ops.linear_cross_entropy, inputs, cotangent, reduction=reduction)
    assert torch.equal(found["input"][ignored], torch.zeros_like(found["input"][ignored]))
    assert found["linear_weight"].isfinite().all()
    if reduction == "none":
        assert torch.equal(found["loss"][ignored], torch.zeros_like(found["loss"][ignored]))
    else:
        assert found["loss"].isfinite()
        assert torch.equal(found["token_weight"][ignored], torch.zeros_like(found["token_weight"][ignored]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3}, {"softcap": 30.0}], ids=["plain", "z_loss", "softcap"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_logits_of_ten_thousand_stay_finite(device, reduction, options, dtype):
    inputs = make_inputs((60, 32, 509), device=device, dtype=dtype)
    with torch.no_grad():
        logits = F.linear(inputs.input.double(), inputs.linear_weight.double())
        inputs.input.mul_((1e4 / logits.abs().max()).to(dtype))
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction, **options)
    exact = run_reference(inputs, reduction=reduction, **options)
    plain = run(plain_loss, inputs, reduction=reduction, **options)
    # for float32 and "none", backward computes p = exp(z - lse) from a float32 lse, whose unit at 1e4 is 1e-3 (1e-5 was
    # seen)
    slack = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2e-3, torch.float16: 3e-4}[dtype]
    for name, tensor in found.items():
        if exact[name].abs().max() > torch.finfo(tensor.dtype).max:
            continue  # float16 with z_loss: slopes of 20 times inputs of hundreds overflow
        assert tensor.isfinite().all(), name
        # logits near 1e4 have rounding errors near 1e-3 in float32; it is chance which path's are larger
        assert error(tensor, exact[name]) <= 2 * error(plain[name], exact[name]) + slack, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"z_loss": 0.01, "logit_scale": 0.5}, {"softcap": 5.0}],  # with a softcap, -inf becomes -softcap
    ids=["plain", "z_loss", "softcap"],
)
def test_bias_of_minus_infinity_switches_a_class_off(device, reduction, options, dtype):
    """This is how padded columns of a vocabulary are masked. Several in a row fill whole tiles."""
    inputs = make_inputs((64, 32, 1021), device=device, dtype=dtype, bias=True)
    off = torch.zeros(1021, dtype=torch.bool, device=device)
    off[300:900] = True  # at least one whole tile of 256 classes
    off[inputs.target[inputs.target != -100]] = False
    inputs.linear_bias.data[off] = float("-inf")
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction, **options)
    exact = run_reference(inputs, reduction=reduction, **options)
    plain = run(plain_loss, inputs, reduction=reduction, **options)
    slack = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2e-3, torch.float16: 3e-4}[dtype]
    for name, tensor in found.items():
        assert plain[name].isfinite().all(), f"torch is not finite either: {name}"
        assert tensor.isfinite().all(), name
        assert error(tensor, exact[name]) <= error(plain[name], exact[name]) + slack, name
    if not options.get("softcap"):
        assert torch.equal(found["linear_weight"][off], torch.zeros_like(found["linear_weight"][off]))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_first_tile_all_minus_infinity(device, reduction):
    """An online logsumexp starts from -inf, and -inf - -inf is nan unless the first tiles are handled specially."""
    inputs = make_inputs((33, 16, 1021), device=device, dtype=torch.float32, bias=True)
    inputs.linear_bias.data[:-3] = float("-inf")
    inputs.target.copy_(torch.randint(1018, 1021, (33,)))
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    exact = run_reference(inputs, reduction=reduction)
    plain = run(plain_loss, inputs, reduction=reduction)
    for name in exact:  # a bias of three classes, whose gradients cancel in about one draw of thirty
        assert error(found[name], exact[name]) <= 2 * error(plain[name], exact[name]) + 1e-6, name


def test_loss_of_a_class_switched_off_is_infinite_as_in_torch(device):
    inputs = make_inputs((5, 4, 7), device=device, bias=True, ignored=0.0)
    inputs.linear_bias.data[inputs.target[0]] = float("-inf")
    found = flce_ops.linear_cross_entropy(*inputs.args, reduction="none")
    assert torch.equal(found.isinf(), plain_loss(*inputs.args, reduction="none").isinf())
    assert found[0] == float("inf")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_features_leaves_the_bias(device, reduction):
    inputs = make_inputs((6, 0, 31), device=device, bias=True)
    expected, found = (
        run_reference(inputs, reduction=reduction),
        run(flce_ops.linear_cross_entropy, inputs, reduction=reduction),
    )
    for name in expected:
        assert error(found[name], expected[name]) < 1e-6, name


def sum_of_rows(function, inputs):
    """The largest absolute sum of a row of the logit gradient. It should be 0, because softmax and one-hot both add up
    to 1.
    """
    bias = inputs.linear_bias.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(inputs.input, inputs.linear_weight, inputs.target, bias), bias)
    return float(grad.double().sum().abs()) / inputs.target.shape[0]


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
def test_rows_of_the_logit_gradient_add_up_to_zero_at_any_magnitude(device, offset):
    """A bias that is equal for all classes changes no probability, only lse."""
    inputs = make_inputs((40, 24, 300), device=device, bias=True, ignored=0.0, requires_grad=False)
    inputs.linear_bias += offset

    def total(*args):
        return flce_ops.linear_cross_entropy(*args, reduction="sum")

    calls = {
        "one pass": total,
        "recomputing": lambda *args: flce_ops.linear_cross_entropy(*args, reduction="none").sum(),
        "checkpointed": lambda *args: checkpoint(total, *args, use_reentrant=False),
        "log-probabilities": lambda *args: flce_ops.linear_log_probs(*args).log_probs.sum(),
    }
    found = {name: sum_of_rows(call, inputs) for name, call in calls.items()}
    assert max(found.values()) < 5e-7, found
    exact = reference_loss(*inputs.clone(torch.float64).args, reduction="none")
    plain = plain_loss(*inputs.args, reduction="none")
    ours = flce_ops.linear_cross_entropy(*inputs.args, reduction="none")
    assert error(ours, exact) <= 2 * error(plain, exact) + 1e-7
