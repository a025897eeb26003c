"""Options that are numbers: learnt ones, ones that change between calls, and the temperature."""

# N tokens, D hidden, E the teacher's, V vocabulary

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from inputs import make_inputs
from reference_loss import dense_logits, error, reference_loss
from test_compile import compiled

import flce_ops

SHAPE = (13, 11, 31)
TIGHT = 1e-12


def example(device, dtype=torch.float64, **made):
    return make_inputs(SHAPE, device=device, dtype=dtype, **made)


def number(value, device="cpu", dtype=torch.float64):
    return torch.tensor(value, device=device, dtype=dtype, requires_grad=True)


# ---------------------------------------------------------------- a learnt scale


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.01}], ids=["plain", "softcap"])
def test_a_tensor_as_logit_scale_gets_its_gradient(device, options, reduction):
    inputs = example(device, bias=True)
    found, exact = [], []
    for function, results in ((flce_ops.linear_cross_entropy, found), (reference_loss, exact)):
        scale = number(1.7, device)
        loss = function(*inputs.args, logit_scale=scale, reduction=reduction, **options)
        leaves = (scale, *inputs.leaves.values())
        first = torch.autograd.grad(loss.square().sum(), leaves, create_graph=True)
        results += [loss, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]
    for ours, right in zip(found, exact, strict=True):
        # the derivatives by the scale are sums over all tokens, whose terms may cancel
        assert error(ours, right) < (TIGHT if ours.dim() else 100 * TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learnt_scale_of_the_dtype_of_its_model_or_of_float32(device, dtype):
    inputs = example(device, dtype, bias=True)
    exact = inputs.clone(torch.float64)
    u, valid = dense_logits(*exact.args[:2], exact.args[3]).detach(), inputs.target != -100
    terms = (u.mul(2.5).softmax(1) * u).sum(1) - u.gather(1, inputs.target.clamp(min=0)[:, None]).squeeze(1)
    cancellation = terms[valid].abs().sum() / terms[valid].sum().abs()
    for scale_dtype in {dtype, torch.float32}:
        scale, right = number(2.5, device, scale_dtype), number(2.5, device)
        flce_ops.linear_cross_entropy(*inputs.args, logit_scale=scale).backward()
        reference_loss(*exact.args, logit_scale=right).backward()
        assert scale.grad.dtype == scale_dtype
        assert error(scale.grad, right.grad) < (1e-5 if dtype == torch.float32 else 2e-2) * cancellation


OF_HALF = [torch.bfloat16, torch.float16]
OPTIONS = {"plain": {}, "softcap": {"softcap": 2.0}}
SCALED = {
    "mean": lambda x, w, t, b, s, o: flce_ops.linear_cross_entropy(x, w, t, b, logit_scale=s, **o),
    "none": lambda x, w, t, b, s, o: flce_ops.linear_cross_entropy(x, w, t, b, logit_scale=s, reduction="none", **o),
    "log-probs": lambda x, w, t, b, s, o: flce_ops.linear_log_probs(x, w, t, b, logit_scale=s, **o).log_probs,
    "token_weight": lambda x, w, t, b, s, o: flce_ops.linear_cross_entropy(
        x, w, t, b, logit_scale=s, token_weight=t.cos().abs(), **o
    ),
    "policy": lambda x, w, t, b, s, o: (
        flce_ops.linear_policy_loss(x, w, t, t.cos(), -3.0 - t.sin(), linear_bias=b, logit_scale=s, **o).loss
    ),
    "K classes": lambda x, w, t, b, s, o: flce_ops.linear_cross_entropy(
        x, w, torch.stack([t, t], 1), b, logit_scale=s, target_weight=torch.ones(len(t), 2, device=t.device), **o
    ),
    "probabilities": lambda x, w, t, b, s, o: flce_ops.linear_cross_entropy(
        x, w, F.one_hot(t.clamp(min=0), len(w)).to(x.dtype), b, logit_scale=s, **o
    ),
} | {
    kind: lambda x, w, t, b, s, o, kind=kind: flce_ops.linear_kl_div(
        x, w, x.detach().sin(), w.detach(), linear_bias=b, kind=kind, logit_scale=s, teacher_logit_scale=1.0, **o
    )
    for kind in ("forward", "reverse", "jsd", "nla")
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", [torch.float32, *OF_HALF], ids=str)
def test_a_tensor_has_the_bits_of_the_number(device, dtype, name):
    """With and without a gradient for it: the operands of the kernels are the same."""
    inputs, found = example(device, dtype, bias=True), []
    for scale in (1.3, torch.tensor(1.3, device=device), number(1.3, device, torch.float32)):
        leaves = (inputs.input, inputs.linear_weight, inputs.linear_bias)
        result = SCALED[name](*inputs.args, scale, OPTIONS["softcap"])
        found.append((result, *torch.autograd.grad(result.sum(), leaves)))
    for of_number, of_tensor, learnt in zip(*found, strict=True):
        assert torch.equal(of_number, of_tensor) and torch.equal(of_number, learnt)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SCALED)
def test_every_function_gives_a_scale_its_derivative(device, name, options):
    """Judged by the quotient of differences in float64, whose own error is about 1e-10."""
    inputs, scale, step = example(device, bias=True), number(1.3, device), 1e-5

    def value(scale):
        return SCALED[name](*inputs.args, scale, OPTIONS[options]).sum()

    found = torch.autograd.grad(value(scale), scale)[0]
    with torch.no_grad():
        expected = (value(1.3 + step) - value(1.3 - step)) / (2.0 * step)
    assert error(found, expected) < 1e-8
    for leaf in (inputs.input, inputs.linear_weight, inputs.linear_bias):
        leaf.requires_grad_(False)  # the scale alone is learnt
    assert error(torch.autograd.grad(value(scale), scale)[0], found) < TIGHT


@pytest.mark.parametrize("dtype", OF_HALF, ids=str)
def test_the_gradient_of_a_scale_under_a_saturated_softcap(device, dtype):
    """Few classes are below the cap there, so the gradient is a small sum of large terms: rounded hidden states or
    rounded gradients would leave it errors of plain torch's size.
    """
    ours = plain = 0.0
    for _ in range(5):
        x, w = torch.randn(48, 64, device=device), torch.randn(257, 64, device=device) * 10 / 8
        target, found = torch.randint(257, (48,), device=device), []
        for kind in (torch.float64, dtype):
            scale = number(1.3, device, kind if kind == torch.float64 else torch.float32)
            z = scale.to(kind) * F.linear(x.to(dtype).to(kind), w.to(dtype).to(kind))
            z = (2.0 * torch.tanh(z / 2.0)).to(torch.float64 if kind == torch.float64 else torch.float32)
            found.append(torch.autograd.grad(F.cross_entropy(z, target), scale)[0].double())
        scale = number(1.3, device, torch.float32)
        operands = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), target
        loss = flce_ops.linear_cross_entropy(*operands, logit_scale=scale, softcap=2.0)
        ours += error(torch.autograd.grad(loss, scale)[0].double(), found[0]) ** 2
        plain += error(found[1], found[0]) ** 2
    assert ours < 0.1 * plain


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_of_a_frozen_float16_head_needs_no_loss_scale(device, name):
    """Most entries of this mean's logit gradient are below float16's smallest number. ATen keeps them in float32."""
    made, errors = make_inputs((700, 32, 1500), device=device, dtype=torch.float16, bias=True, requires_grad=False), []
    exact = SCALED[name](*made.clone(torch.float64).args, right := number(0.5, device), {}).mean()
    exact = torch.autograd.grad(exact, right)[0]
    for made_here in (made, made.clone(torch.float32)):
        scale = number(0.5, device, torch.float32)
        loss = SCALED[name](*made_here.args, scale, {}).mean()
        errors.append(error(torch.autograd.grad(loss / 64, scale)[0].double() * 64, exact))
    assert errors[0] < 2e-3 and errors[1] < 1e-5, errors


def test_a_scale_of_0_gets_its_derivative(device):
    inputs, scale, right = example(device, bias=True), number(0.0, device), number(0.0, device)
    loss = flce_ops.linear_cross_entropy(*inputs.args, logit_scale=scale)
    exact = reference_loss(*inputs.args, logit_scale=right)
    assert error(loss, exact) < TIGHT
    assert error(torch.autograd.grad(loss, scale)[0], torch.autograd.grad(exact, right)[0]) < TIGHT


def test_a_learnt_scale_in_a_checkpointed_region(device):
    inputs, found = example(device, bias=True), []
    for checkpointed in (False, True):
        scale = number(1.3, device)

        def loss(scale=scale):
            return flce_ops.linear_cross_entropy(*inputs.args, logit_scale=scale)

        result = torch.utils.checkpoint.checkpoint(loss, use_reentrant=False) if checkpointed else loss()
        found.append(torch.autograd.grad(result, scale)[0])
    assert error(*found) < TIGHT


def test_a_learnt_scale_under_vmap_and_grad(device):
    args = example(device).args[:3]

    def loss(scale):
        return flce_ops.linear_cross_entropy(*args, logit_scale=scale)

    scales = torch.tensor([0.7, 1.3], device=device, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(loss))(scales)
    for scale, ours in zip(scales.clone(), found):
        scale.requires_grad_()
        assert error(ours, torch.autograd.grad(reference_loss(*args, logit_scale=scale), scale)[0]) < TIGHT


def ignored_rows(device):
    """Arguments in which rows 2 and 3 never count: class indices, labels to shift, K classes, two heads' rows."""
    inputs = example(device, bias=True, ignored=0.0)
    target = inputs.target.index_fill(0, torch.tensor([2, 3], device=device), -100)
    labels = inputs.target.index_fill(0, torch.tensor([3, 4], device=device), -100)
    heads = torch.stack([inputs.linear_weight, inputs.linear_weight.cos()], 1)
    return inputs.linear_weight, target, labels, torch.stack([target, target], 1), heads, inputs.linear_bias


IGNORED_ROWS = {
    "mean": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(x, w, t, b, logit_scale=s),
    "temperature": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(x, w, t, b, temperature=s),
    "none": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(
        x, w, t, b, logit_scale=s, softcap=3.0, reduction="none"
    ),
    "metrics": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(
        x, w, t, b, logit_scale=s, return_metrics=True
    )[0],
    "weight 0": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(
        x, w, t.clamp(min=0), b, logit_scale=s, token_weight=(t >= 0).double()
    ),
    "shift": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(
        x, w, labels, b, logit_scale=s, shift=True
    ),
    "K classes": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(
        x, w, k, b, logit_scale=s, target_weight=k.cos().abs()
    ),
    "two heads": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_cross_entropy(x, h, k, logit_scale=s),
    "log-probs": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_log_probs(x, w, t, b, logit_scale=s).log_probs,
    "policy": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_policy_loss(x, w, t, t.cos(), temperature=s).loss,
    "policy, none": lambda x, w, t, labels, k, h, b, s: (
        flce_ops.linear_policy_loss(x, w, t, t.cos(), logit_scale=s, reduction="none").loss
    ),
    "divergence": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_kl_div(
        x, w, w[: len(t)].detach(), w.detach(), kind="jsd", target=t, logit_scale=s, teacher_logit_scale=1.0
    ),
    "divergence, shift": lambda x, w, t, labels, k, h, b, s: flce_ops.linear_kl_div(
        x, w, w[: len(t)].detach(), w.detach(), target=labels, shift=True, logit_scale=s, teacher_logit_scale=1.0
    ),
}


@pytest.mark.parametrize("name", IGNORED_ROWS)
def test_a_learnt_scale_does_not_read_ignored_rows(device, name):
    """Its gradient, and second derivatives where they exist, equal those with numbers in the ignored rows."""
    arguments = ignored_rows(device)
    x = torch.randn(SHAPE[:2], device=device).double()
    bad = x.clone()
    bad[2], bad[3] = torch.nan, torch.inf
    found = []
    for rows in (bad, x):
        leaves = (number(1.7, device), rows.requires_grad_())
        loss = IGNORED_ROWS[name](leaves[1], *arguments, leaves[0]).square().sum()
        twice = "divergence" not in name
        first = torch.autograd.grad(loss, leaves, create_graph=twice)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves) if twice else ()
        found.append((*first, *second))
    assert all(derivative.isfinite().all() for derivative in found[1])
    for ours, right in zip(*found, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_learnt_scale_does_not_read_ignored_rows_in_a_compiled_graph(device, backend):
    inputs, scale = example(device, bias=True), number(0.7, device)
    inputs.target[3] = -100
    expected = torch.autograd.grad(flce_ops.linear_cross_entropy(*inputs.args, temperature=scale), scale)
    with torch.no_grad():
        inputs.input[3] = torch.nan
    loss, counter = compiled(flce_ops.linear_cross_entropy, backend)
    found = torch.autograd.grad(loss(*inputs.args, temperature=scale), scale)
    assert error(found[0], expected[0]) < TIGHT
    if torch.device(device).type == "cpu":
        for bad in (-1.0, 0.0):
            with pytest.raises(RuntimeError, match="expected temperature to be positive and finite"):
                loss(*inputs.args, temperature=number(bad))
    assert counter.count == 1


def test_a_batch_of_temperatures_compiles(device):
    args = example(device).args[:3]

    def losses(temperatures):
        return torch.func.vmap(lambda t: flce_ops.linear_cross_entropy(*args, temperature=t))(temperatures)

    temperatures = torch.tensor([0.7, 1.3], device=device)
    loss, _ = compiled(losses)
    assert error(loss(temperatures), losses(temperatures)) < TIGHT


def test_a_learnt_scale_beside_a_class_that_is_switched_off(device):
    """First and second derivatives are those without the class. Plain torch's are nan there, from 0 times -inf."""
    inputs, found = example(device, bias=True, ignored=0.0), []
    inputs.target.clamp_(max=SHAPE[2] - 2)
    with torch.no_grad():
        inputs.linear_bias[-1] = -torch.inf
    for classes in (SHAPE[2], SHAPE[2] - 1):
        leaves = (number(1.3, device), inputs.input, inputs.linear_weight, inputs.linear_bias)
        operands = (inputs.input, inputs.linear_weight[:classes], inputs.target, inputs.linear_bias[:classes])
        loss = flce_ops.linear_cross_entropy(*operands, logit_scale=leaves[0], reduction="none").square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)))
    for ours, without in zip(*found, strict=True):
        assert error(ours, without) < TIGHT


def test_a_learnt_scale_of_a_row_that_counts_and_holds_nan_is_nan(device):
    inputs, scale = example(device, bias=True, ignored=0.0), number(1.3, device)
    with torch.no_grad():
        inputs.input[3, 2] = torch.nan
    for reduction in ("mean", "none"):
        loss = flce_ops.linear_cross_entropy(*inputs.args, logit_scale=scale, reduction=reduction).sum()
        assert torch.autograd.grad(loss, scale)[0].isnan()


def test_a_float32_temperature_of_a_float64_model_is_divided_by_in_float64(device):
    inputs = example(device)
    temperature = torch.tensor(0.7, device=device)
    loss = flce_ops.linear_cross_entropy(*inputs.args, temperature=temperature)
    assert error(loss, reference_loss(*inputs.args, logit_scale=1.0 / temperature.double())) < TIGHT


# ---------------------------------------------------------------- refusals

MISTAKES = [
    (lambda x, w, t, s: flce_ops.linear_kl_div(x, w, x, w, logit_scale=s), ValueError, "teacher_logit_scale"),
    (lambda x, w, t, s: flce_ops.linear_cross_entropy(x, w, t, logit_scale=s + 1j), TypeError, "logit_scale.*real"),
    (
        lambda x, w, t, s: flce_ops.linear_cross_entropy(x, w, t, temperature=s, softcap=5.0),
        NotImplementedError,
        "temperature.*softcap.*number",
    ),
    (lambda x, w, t, s: torch.ops.flce.linear_cross_entropy(x, w, t, logit_scale=s), RuntimeError, "number"),
    (
        lambda x, w, t, s: torch.ops.flce.linear_cross_entropy_forward(x, w, t, softcap=s),
        NotImplementedError,
        "softcap gets no gradient",
    ),
    (
        lambda x, w, t, s: torch.ops.flce.linear_cross_entropy_forward(x @ w.T, None, t, logit_scale=s),
        NotImplementedError,
        "logit_scale gets no gradient",
    ),
    (
        lambda x, w, t, s: flce_ops.linear_cross_entropy(
            x, w, t, logit_scale=s, gradient_threshold=1e-3, gradient_mode="drop"
        ),
        NotImplementedError,
        "sparse gradient beside the gradient of a logit_scale.*gradient_threshold out",
    ),
]


@pytest.mark.parametrize("call, kind, message", MISTAKES, ids=[message for _, _, message in MISTAKES])
def test_a_tensor_that_would_lose_its_graph_is_refused(device, call, kind, message):
    inputs = example(device, ignored=0.0)
    with pytest.raises(kind, match=message):
        call(*inputs.args[:3], number(2.0, device))


NUMBERS = {
    "linear_cross_entropy": lambda x, w, t, **options: flce_ops.linear_cross_entropy(x, w, t, **options),
    "linear_log_probs": lambda x, w, t, **options: flce_ops.linear_log_probs(x, w, t, **options).log_probs,
    "linear_policy_loss": lambda x, w, t, **options: flce_ops.linear_policy_loss(x, w, t, t.cos(), **options).loss,
    "linear_kl_div": lambda x, w, t, **options: flce_ops.linear_kl_div(x, w, x.detach(), w.detach(), **options),
    "cross_entropy": lambda x, w, t, **options: flce_ops.cross_entropy(x @ w.T, t, **options),
}
POSITIVE = ["softcap", "temperature", "teacher_softcap"]


@pytest.mark.parametrize("function, name", [(f, name) for f in NUMBERS for name in POSITIVE])
def test_what_divides_is_positive_and_finite(device, function, name):
    """As a number for every function; as a 0-d tensor where the temperature may be a tensor."""
    if name == "teacher_softcap" and function != "linear_kl_div":
        return
    args = example(device, ignored=0.0).args[:3]
    for value in (0.0, -1.0, float("inf"), float("nan")):
        message = f"{function}: expected {name} to be positive and finite"
        with pytest.raises(ValueError, match=message):
            NUMBERS[function](*args, **{name: value})
        tensors = name == "temperature" and function not in ("linear_kl_div", "cross_entropy")
        if tensors and torch.device(device).type == "cpu":  # on CUDA it is a device-side assert
            with pytest.raises(ValueError, match=message):
                NUMBERS[function](*args, temperature=torch.tensor(value))
            with pytest.raises(ValueError, match=message):
                torch.func.vmap(lambda t: NUMBERS[function](*args, temperature=t))(torch.tensor([1.0, value]))


# ---------------------------------------------------------------- temperature


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_temperature_divides_behind_the_cap_as_sampling_does(device, softcap):
    inputs = example(device, bias=True, ignored=0.0)
    options = {"softcap": softcap, "logit_scale": 1.4}
    logits = dense_logits(inputs.input, inputs.linear_weight, inputs.linear_bias, **options) / 0.6
    expected = logits.log_softmax(1).gather(1, inputs.target[:, None]).squeeze(1)
    found = flce_ops.linear_log_probs(*inputs.args, **options, temperature=0.6, entropy=True)
    assert error(found.log_probs, expected) < TIGHT
    assert error(found.entropy, torch.distributions.Categorical(logits=logits).entropy()) < TIGHT
    for reduction in ("none", "mean"):
        loss = flce_ops.linear_cross_entropy(*inputs.args, **options, temperature=0.6, reduction=reduction)
        assert error(loss, -expected if reduction == "none" else -expected.mean()) < TIGHT
    if softcap:
        before = flce_ops.linear_log_probs(*inputs.args, softcap=softcap, logit_scale=1.4 / 0.6).log_probs
        assert (before - expected).abs().max() > 0.1


def test_temperature_of_a_divergence_divides_both_capped_logits(device):
    inputs = example(device)
    teacher = torch.randn(SHAPE[0], 5, device=device).double(), torch.randn(SHAPE[2], 5, device=device).double()
    caps = {"softcap": 3.0, "teacher_softcap": 2.0, "logit_scale": 1.4, "teacher_logit_scale": 0.8}
    z = dense_logits(inputs.input, inputs.linear_weight, softcap=3.0, logit_scale=1.4) / 1.5
    t = dense_logits(*teacher, softcap=2.0, logit_scale=0.8) / 1.5
    expected = F.kl_div(z.log_softmax(1), t.log_softmax(1), log_target=True, reduction="batchmean")
    found = flce_ops.linear_kl_div(*inputs.args[:2], *teacher, **caps, temperature=1.5)
    assert error(found, expected) < TIGHT


# ---------------------------------------------------------------- numbers that change between calls

CHANGING = {
    "normalizer": lambda x, w, t, v: flce_ops.linear_cross_entropy(x, w, t, normalizer=v),
    "logit_scale": lambda x, w, t, v: flce_ops.linear_cross_entropy(x, w, t, logit_scale=v),
    "softcap": lambda x, w, t, v: flce_ops.linear_cross_entropy(x, w, t, softcap=v, reduction="none").sum(),
    "z_loss": lambda x, w, t, v: flce_ops.linear_cross_entropy(x, w, t, z_loss=v, return_metrics=True)[0],
    "temperature": lambda x, w, t, v: flce_ops.linear_log_probs(x, w, t, temperature=v, softcap=5.0).log_probs.sum(),
    "beta": lambda x, w, t, v: flce_ops.linear_kl_div(x, w, x.detach().sin(), w.detach(), kind="jsd", beta=v),
    "teacher": lambda x, w, t, v: flce_ops.linear_kl_div(
        x, w, x.detach().sin(), w.detach(), teacher_logit_scale=v, teacher_softcap=v, normalizer=v, temperature=v
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_number_that_changes_from_step_to_step_compiles_twice(device, name):
    """As in plain torch: once for the first value, once for all others, including 1 and 2, at which options are off."""
    inputs = example(device)
    step, counter = compiled(CHANGING[name])
    for value in (0.1, 0.2, 0.3, 0.45, 0.5, 0.6, 0.7) if name == "beta" else (0.5, 1.0, 1.7, 2.0, 3.3, 4.1, 5.9):
        found, eager = (
            torch.autograd.grad(call(*inputs.args[:3], value), (inputs.input, inputs.linear_weight))
            for call in (step, CHANGING[name])
        )
        for ours, right in zip(found, eager, strict=True):
            assert error(ours, right) < TIGHT
    assert counter.count == 2
