"""float16 with a loss scale: whatever is finite in plain torch is finite here, and as accurate."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_divergence import KINDS, make_pair, plain_divergence
from reference_divergence import run as run_divergence
from reference_divergence import run_reference as run_reference_divergence
from reference_loss import error, plain_loss, run, run_reference

import flce_ops

UNIT = 2.0**-11
FACTORS = [1.0, 1024.0, 65536.0]  # the last one is GradScaler's initial scale

# name: (arguments of make_inputs, options, a factor for weight and bias)
CASES = {
    "plain": ({}, {}, {}),
    "class_weight": ({"weight": True}, {"label_smoothing": 0.1}, {"weight": 1000.0}),
    "z_loss": ({}, {"z_loss": 10.0}, {}),
    "z_loss_and_bias": ({"bias": True}, {"z_loss": 1.0}, {"linear_bias": 100.0}),
    "token_weight": ({"token_weight": True}, {}, {"token_weight": 100.0}),
}


def half_inputs(tokens, case, device="cpu"):
    made, options, factors = CASES[case]
    inputs = make_inputs((tokens, 24, 61), device=device, dtype=torch.float16, **made)
    with torch.no_grad():
        for name, factor in factors.items():
            getattr(inputs, name).mul_(factor)
    return inputs, options


def assert_as_finite_and_exact(found, plain, exact):
    """Checks each gradient whose counterpart in plain torch is finite."""
    compared = [name for name in found if plain[name].isfinite().all()]
    for name in compared:
        assert found[name].isfinite().all(), name
        # one entry may dominate the only row, and by chance plain torch may round it well; and some numbers underflow
        # in both
        slack = (2 if len(found["input"]) <= 3 else 1) * UNIT + 2.0**-24 * found[name].numel() ** 0.5 / exact[
            name
        ].norm()
        assert error(found[name], exact[name]) <= 1.5 * error(plain[name], exact[name]) + slack, name
    return compared


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("case", CASES)
def test_what_plain_torch_keeps_finite_is_finite_and_as_exact(device, case, tokens, reduction, factor):
    inputs, options = half_inputs(tokens, case, device)
    cotangent = torch.full((tokens,) if reduction == "none" else (), factor, device=device)
    options = {**options, "reduction": reduction}
    found, plain = (run(f, inputs, cotangent, **options) for f in (flce_ops.linear_cross_entropy, plain_loss))
    compared = assert_as_finite_and_exact(found, plain, run_reference(inputs, cotangent, **options))
    assert factor > 1.0 or "linear_weight" in compared


@pytest.mark.parametrize("case", ["class_weight", "z_loss_and_bias"])
def test_what_plain_torch_keeps_finite_is_finite_when_compiled(case):
    inputs, options = half_inputs(3, case)
    compiled = torch.compile(flce_ops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found, plain = (run(f, inputs, **options) for f in (compiled, plain_loss))
    assert "linear_weight" in assert_as_finite_and_exact(found, plain, run_reference(inputs, **options))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_plain_torch_keeps_finite_of_a_divergence_is_finite_and_as_exact(kind, reduction, factor):
    for tokens in (1, 200):
        pair = make_pair((tokens, 24, 16, 61), dtype=torch.float16, ignored=0.0)
        pair["teacher_weight"] *= 20.0  # teacher and student differ by hundreds of nats
        cotangent = torch.full((tokens,) if reduction == "none" else (), factor)
        options = {"kind": kind, "reduction": reduction}
        found, plain = (
            run_divergence(f, pair, cotangent, **options) for f in (flce_ops.linear_kl_div, plain_divergence)
        )
        exact = run_reference_divergence(pair, cotangent, **options)
        assert assert_as_finite_and_exact(found, plain, exact)


def test_each_element_of_vmap_rounds_a_weight_gradient_of_its_own(device):
    """The weight gradients of two tokens exceed float16's range, and they cancel.

    Tokens of one call are summed in float32. vmap makes a call for each element, whose gradient is rounded by itself:
    it overflows, and a loss scaler leaves the step out. In bfloat16 both are right.
    """

    def losses(x, w, t):
        return flce_ops.linear_cross_entropy(x, w, t, reduction="none")

    for dtype in (torch.float16, torch.bfloat16):
        x = torch.tensor([[200.0, 1.0], [-200.0, 1.0]], dtype=dtype, device=device)
        w = torch.zeros(5, 2, dtype=dtype, device=device, requires_grad=True)
        target = torch.tensor([3, 3], device=device)
        found = []
        for loss in (
            losses(x, w, target),
            torch.func.vmap(losses, in_dims=(0, None, 0))(x[:, None], w, target[:, None]),
            plain_loss(x, w, target, reduction="none"),
        ):
            found.append(torch.autograd.grad((1024.0 * loss).sum(), w)[0])
        of_one_call, of_vmap, plain = found
        torch.testing.assert_close(of_one_call, plain, atol=2.0**-10, rtol=2 * UNIT)
        if dtype == torch.float16:
            assert not of_vmap.isfinite().all()
        else:
            torch.testing.assert_close(of_vmap, plain, atol=2.0**-10, rtol=2 * UNIT)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("function", ["cross_entropy", "kl_div"])
def test_a_row_that_is_not_finite_leaves_the_others_as_they_were(function, bad):
    """A mean over many tokens, whose gradients would underflow without the loss scale that arrives in backward."""
    pair = make_pair((64, 24, 16, 61), dtype=torch.float16, ignored=0.0)
    teacher = [pair["teacher_input"], pair["teacher_weight"]]

    def gradients(input):
        leaves = [input.clone().requires_grad_(), pair["linear_weight"].detach().clone().requires_grad_()]
        options = {"normalizer": 1e6, "reduction": "sum"}
        if function == "cross_entropy":
            loss = flce_ops.linear_cross_entropy(*leaves, pair["target"], **options)
        else:
            loss = flce_ops.linear_kl_div(*leaves, *teacher, **options)
        return torch.autograd.grad(65536.0 * loss, leaves)

    input = pair["input"].detach()
    expected, _ = gradients(input)
    input[5, 3] = bad
    found, grad_weight = gradients(input)
    assert expected.norm() > 0
    others = torch.arange(64) != 5
    assert torch.equal(found[others], expected[others])
    assert found[5].isnan().all() and grad_weight.isnan().all()
