"""The inner operators keep their contract: what they return, what is differentiable, where a shard starts."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import RAGGED, make_inputs, scalars
from reference_loss import dense_logits, error, reference_loss, run_reference, with_lse

import flce_ops  # noqa: F401  registers the operators

flce = torch.ops.flce
SCORES = {"softcap": 5.0, "logit_scale": 0.7}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDED = {torch.float64: 1e-14, torch.float32: 2.5e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def tight(dtype, device):
    """Tolerance for one number per row. On a CPU half logits are rounded before the softmax, as in plain torch."""
    if device == "cpu" and dtype.itemsize == 2:
        return 4e-3 if dtype == torch.bfloat16 else 6e-4
    return 1e-14 if dtype == torch.float64 else 2e-6


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_rows(inputs, weighted, **scores):
    """target_logit, lse and logit_sum of the logits, 0 for ignored tokens. logit_sum is relative to lse, a constant
    there.
    """
    z = dense_logits(inputs.input, inputs.linear_weight, inputs.linear_bias, **scores)
    valid = inputs.target != -100
    target_logit = z.gather(1, inputs.target.where(valid, 0).long()[:, None])[:, 0].where(valid, 0.0)
    lse = z.logsumexp(1)
    distance = z - lse.detach()[:, None]
    logit_sum = (distance * inputs.weight).sum(1) if weighted else distance.sum(1)
    return target_logit, lse.where(valid, 0.0), logit_sum.where(valid, 0.0)


def test_public_function_is_the_operator(device):
    inputs = make_inputs(device=device, bias=True, weight=True, token_weight=True, normalizer=True)
    options = {**inputs.options, "label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.5, "z_loss": 1e-3}
    by_function = flce_ops.linear_cross_entropy(*inputs.args, **options)
    assert torch.equal(flce.linear_cross_entropy(*inputs.args, **options), by_function)
    assert torch.equal(flce.linear_cross_entropy.default(*inputs.args, **options), by_function)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("logit_sum", [False, True])
@pytest.mark.parametrize("scores", [{}, SCORES], ids=["plain", "softcap"])
def test_forward_returns_row_statistics(device, scores, logit_sum, weighted, dtype, poisoned_memory):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, weight=weighted)
    expected = dense_rows(inputs.clone(torch.float64), weighted, **scores)
    options = {"logit_sum": logit_sum, **scalars(scores, device)}
    found = flce.linear_cross_entropy_forward(*inputs.args, inputs.weight, **options)
    assert len(found) == 9
    assert found[2].shape == ((RAGGED[0],) if logit_sum else (0,))
    for name, ours, exact in zip(("target_logit", "lse", "logit_sum"), with_lse(found)[:3], expected, strict=True):
        assert ours.dtype == accumulator(dtype), name
        if ours.numel():
            assert error(ours, exact) < tight(dtype, device), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", [{}, SCORES], ids=["plain", "softcap"])
def test_all_three_row_statistics_are_differentiable(device, scores, dtype, poisoned_memory):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, weight=True)
    exact_inputs = inputs.clone(torch.float64)
    cotangents = [torch.randn(RAGGED[0], device=device, dtype=torch.float64) for _ in range(3)]
    valid = inputs.target != -100

    def weighed(rows):
        return sum((row.double() * c)[valid].sum() for row, c in zip(rows[:3], cotangents, strict=True))

    expected = torch.autograd.grad(
        weighed(dense_rows(exact_inputs, True, **scores)), list(exact_inputs.leaves.values())
    )
    rows = flce.linear_cross_entropy_forward(*inputs.args, inputs.weight, logit_sum=True, **scalars(scores, device))
    found = torch.autograd.grad(weighed(with_lse(rows)), list(inputs.leaves.values()))
    # cotangents of random sign cancel in sums over tokens; plain torch's error shows the cost of rounding then
    plain_inputs = inputs.clone()
    plain = torch.autograd.grad(weighed(dense_rows(plain_inputs, True, **scores)), list(plain_inputs.leaves.values()))
    for name, ours, usual, exact in zip(inputs.leaves, found, plain, expected, strict=True):
        assert error(ours, exact) <= max(ROUNDED[dtype], error(usual, exact)), name


@pytest.mark.parametrize("mask", [(m & 1, m & 2, m & 4) for m in range(8)], ids=str)
def test_backward_returns_what_the_mask_asks_for(device, mask, poisoned_memory):
    mask = [bool(m) for m in mask]
    inputs = make_inputs(device=device, bias=True, requires_grad=False)
    pair = flce.linear_cross_entropy_forward(*inputs.args, None)[1]
    ones = torch.ones_like(pair[:, 0])
    found = flce.linear_cross_entropy_backward(-ones, ones, None, *inputs.args, None, pair, output_mask=mask)
    inputs = inputs.clone()
    for leaf in (inputs.input, inputs.linear_weight, inputs.linear_bias):
        leaf.requires_grad_()
    exact = run_reference(inputs, reduction="sum")
    for name, ours, wanted in zip(("input", "linear_weight", "linear_bias"), found[:3], mask, strict=True):
        if wanted:
            assert error(ours, exact[name]) < 1e-6, name
        else:
            assert ours.shape == (0,)


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_a_missing_cotangent_is_zero(device, given):
    inputs = make_inputs(device=device, bias=True, weight=True, requires_grad=False)
    pair = flce.linear_cross_entropy_forward(*inputs.args, None)[1]
    cotangents = [torch.randn_like(pair[:, 0]) for _ in range(3)]
    zeros = [c if i in given else torch.zeros_like(c) for i, c in enumerate(cotangents)]
    nones = [c if i in given else None for i, c in enumerate(cotangents)]
    found, expected = (
        flce.linear_cross_entropy_backward(*c, *inputs.args, inputs.weight, pair, output_mask=[True] * 3)
        for c in (nones, zeros)
    )
    for ours, exact in zip(found, expected, strict=True):
        assert error(ours, exact) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, **SCORES}], ids=["plain", "everything"]
)
def test_with_grad_returns_loss_losses_and_gradients(device, options, dtype, poisoned_memory):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, weight=bool(options), token_weight=True)
    row_scale = inputs.token_weight.detach()
    exact = run_reference(inputs, reduction="sum", **options)
    unscaled = inputs.clone(torch.float64)
    losses = reference_loss(*unscaled.args, weight=unscaled.weight, reduction="none", **options).detach()
    mask = [True] * 3
    inputs = inputs.clone()
    for leaf in inputs.leaves.values():
        leaf.requires_grad_(False)
    found = flce.linear_cross_entropy_with_grad(
        *inputs.args, inputs.weight, row_scale, output_mask=mask, **scalars(options, device)
    )
    assert found[0].shape == () and found[0].dtype == found[1].dtype == accumulator(dtype)
    assert error(found[1], losses) < 3 * tight(dtype, device)
    scale = float(
        (losses * row_scale).abs().sum() / exact["loss"].abs()
    )  # token weights of both signs, so the sum cancels
    assert error(found[0], exact["loss"]) < scale * tight(dtype, device)
    for name, ours in zip(("input", "linear_weight", "linear_bias"), found[2:5], strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact[name]) < ROUNDED[dtype], name


def test_with_grad_is_differentiable_in_the_loss_only(device):
    inputs = make_inputs(device=device, bias=True)
    row_scale = torch.ones(RAGGED[0], device=device)
    loss, *others = flce.linear_cross_entropy_with_grad(*inputs.args, None, row_scale, output_mask=[True] * 3)
    assert loss.requires_grad
    assert [t.requires_grad for t in others] == [False] * 11


@pytest.mark.parametrize("name", ["forward", "backward", "with_grad"])
def test_operators_are_tagged_for_the_compiler(name):
    op = getattr(flce, f"linear_cross_entropy_{name}").default
    assert torch.Tag.pt2_compliant_tag in op.tags
    assert not op._schema.is_mutable


def test_schemas_are_the_contract():
    """Argument names and defaults are public: torch.export files and saved graphs contain them."""
    assert str(flce.linear_cross_entropy.default._schema) == (
        "flce::linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, *, "
        'Tensor? weight=None, str reduction="mean", int ignore_index=-100, Scalar label_smoothing=0., '
        "Scalar? softcap=None, Scalar logit_scale=1., Scalar temperature=1., Scalar z_loss=0., "
        "Tensor? token_weight=None, Tensor? normalizer=None, Tensor? target_weight=None, "
        'Tensor? main_grad=None, float gradient_threshold=0., str gradient_mode="unbiased", '
        "Tensor? gradient_seed=None, "
        'str gradient_sparse="both", Tensor? gradient_class_order=None, '
        "bool batch_invariant=False, Tensor? learnt_scale=None) -> Tensor"
    )


# an argument's default, wherever it has one; None for all others
DEFAULTS = {
    "reduction": "mean",
    "ignore_index": -100,
    "logit_scale": 1.0,
    "temperature": 1.0,
    "gradient_mode": "unbiased",
    "gradient_sparse": "both",
    "kind": "forward",
    "objective": "ppo",
    "kl_estimator": "k3",
    "ranks": 1,
}
DEFAULTS |= dict.fromkeys(("clip_low", "clip_high"), 0.2)
DEFAULTS |= dict.fromkeys(("label_smoothing", "z_loss", "gradient_threshold"), 0.0)
DEFAULTS |= dict.fromkeys(("vocab_start", "retain"), 0)
STATISTICS = ("logit_sum", "argmax", "log_sum_sq_probs", "mean_logit", "lse", "entropy", "expected_log_prob", "tail")
DEFAULTS |= dict.fromkeys((*STATISTICS, "batch_invariant", "scale_gradient"), False)
# inner operators have None for a number that does nothing
OTHERS = {"logit_scale": None, "z_loss": None, "expected_log_prob": None}
BETA = {"flce::linear_kl_div": 0.5, "flce::linear_policy_loss": 0.0}


def test_defaults_of_every_operator_are_the_contract():
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("flce::")]
    assert len(schemas) > 18
    for schema in schemas:
        for argument in schema.arguments:
            if argument.has_default_value():
                name, found = argument.name, argument.default_value
                expected = BETA.get(schema.name) if name == "beta" else DEFAULTS.get(name)
                allowed = [expected, OTHERS.get(name, expected)]
                assert any(found == value and type(found) is type(value) for value in allowed), (
                    schema.name,
                    name,
                    found,
                )
