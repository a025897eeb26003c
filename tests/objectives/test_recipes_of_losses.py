"""Losses that are compositions of the public functions: each agrees with dense logits, and costs what it says."""

# N tokens, K kept classes of each, D hidden, V vocabulary, r rank of a pair

import pytest
import torch
import torch.nn.functional as F
from fresh_process import run_fresh
from inputs import make_inputs
from reference_loss import dense_logits, error, reference_loss
from torch import Tensor

import flce_ops

flce = torch.ops.flce
SHAPE = N, D, V = 61, 23, 127
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# ---------------------------------------------------------------- the classes that a sampler kept (top-p, top-k)


def renormalised_log_probs(hidden, weight, sampled, kept, **options) -> Tensor:  # (N,)
    """log p(sampled) over the distinct classes `kept` (N, K) of each token, padded with -100. One pass of the head."""
    ignored = sampled == -100
    kept = kept.masked_fill(ignored.unsqueeze(-1), -100)
    classes = torch.cat([sampled.unsqueeze(-1), kept], -1)
    log_probs = flce_ops.linear_log_probs(hidden, weight, classes, **options).log_probs
    padding = (kept == -100) & ~ignored.unsqueeze(-1)
    of_kept = log_probs[..., 1:].masked_fill(padding, -torch.inf).logsumexp(-1)
    return torch.where(ignored, 0.0, log_probs[..., 0] - of_kept)


def padded(ids: Tensor, lengths: Tensor, width: int) -> Tensor:  # (E,), (N,) -> (N, width)
    """The ids of all tokens, one token after the other, as rows that are padded with -100."""
    there = torch.arange(width, device=ids.device) < lengths.unsqueeze(-1)
    return ids.new_full(there.shape, -100).masked_scatter(there, ids)


def draw_kept(inputs, width: int = 9) -> Tensor:  # (N, width)
    """1 to `width` classes of each token, the sampled one among them."""
    target, rows = inputs.target, torch.arange(N)
    with torch.no_grad():
        logits = dense_logits(*inputs.args[:2]).float()
    logits[rows, target.clamp(min=0)] = 1e4
    kept = logits.topk(width, 1).indices
    kept[torch.arange(width) >= torch.randint(1, width + 1, (N, 1))] = -100
    return kept


def dense_renormalised(hidden, weight, sampled, kept, **options):
    inside = torch.zeros(N, V + 1, dtype=torch.bool).scatter(1, kept.where(kept >= 0, V), True)[:, :V]
    z = dense_logits(hidden, weight, **options)
    z = z if z.dtype == torch.float64 else z.float()
    log_q = z.masked_fill(~inside & (sampled >= 0)[:, None], -torch.inf).log_softmax(-1)
    return log_q.gather(1, sampled.clamp(min=0)[:, None]).squeeze(1).where(sampled >= 0, 0.0)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "logit_scale": 0.7, "temperature": 0.8}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_over_the_kept_classes(dtype, options):
    inputs = make_inputs(SHAPE, dtype=dtype)
    kept, cotangent = draw_kept(inputs), torch.randn(N)

    def run(function, inputs):
        inputs = inputs.clone()
        found = function(*inputs.args[:3], kept, **options)
        (found * cotangent.to(found.dtype)).sum().backward()
        return found, inputs.input.grad, inputs.linear_weight.grad

    exact = run(dense_renormalised, inputs.clone(torch.float64))
    plain, ours = run(dense_renormalised, inputs), run(renormalised_log_probs, inputs)
    for found, usual, truth in zip(ours, plain, exact, strict=True):
        assert error(found, truth) <= 1.5 * error(usual, truth) + 10 * torch.finfo(found.dtype).eps
    assert not ours[0][inputs.target == -100].any() and not ours[1][inputs.target == -100].any()


def test_one_kept_class_has_probability_1_and_ids_may_be_ragged():
    inputs = make_inputs(SHAPE)
    found = renormalised_log_probs(*inputs.args[:3], inputs.target[:, None])
    assert torch.equal(found, torch.zeros(N))
    kept = draw_kept(inputs)
    lengths = (kept != -100).sum(1)
    assert torch.equal(padded(kept[kept != -100], lengths, kept.shape[1]), kept)


# ---------------------------------------------------------------- a low-rank pair on the head (LoRA)


def lora_loss(hidden, weight, down, up, target, dropout, scaling=2.0, **options) -> Tensor:
    """weight (V, D) is frozen; down (r, D) and up (V, r) are trained. Makes a copy of the weight, and its gradient."""
    features = scaling * F.linear(dropout(hidden), down)
    operands = torch.cat([hidden, features], -1), torch.cat([weight, up], 1)
    return flce_ops.linear_cross_entropy(*operands, target, **options)


def dense_lora_loss(hidden, weight, down, up, target, dropout, scaling=2.0, **options):
    logits = F.linear(hidden, weight) + F.linear(scaling * F.linear(dropout(hidden), down), up)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return reference_loss(logits, torch.eye(V, dtype=logits.dtype), target, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "label_smoothing": 0.1, "reduction": "none"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_low_rank_pair_with_dropout(dtype, options):
    inputs, r = make_inputs(SHAPE, dtype=dtype), 3
    tensors = inputs.input.detach(), (torch.randn(r, D) / D**0.5).to(dtype), (0.3 * torch.randn(V, r)).to(dtype)
    mask = (torch.rand(N, D) > 0.3).double() / 0.75
    cotangent = torch.randn(N) if "reduction" in options else torch.tensor(1.7)

    def run(function, dtype):
        hidden, down, up = leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        weight = inputs.linear_weight.detach().to(dtype)
        loss = function(hidden, weight, down, up, inputs.target, lambda x: x * mask.to(dtype), **options)
        return [loss, *torch.autograd.grad((loss * cotangent.to(loss.dtype)).sum(), leaves)]

    exact, plain, ours = run(dense_lora_loss, torch.float64), run(dense_lora_loss, dtype), run(lora_loss, dtype)
    for found, usual, truth in zip(ours, plain, exact, strict=True):
        assert error(found, truth) <= 1.5 * error(usual, truth) + 4 * torch.finfo(dtype).eps


# ---------------------------------------------------------------- a temperature of each token


def at_temperatures(hidden, weight, temperature, bias=None):  # (N, D), (V, D), (N,), (V,) -> hidden, weight
    """Operands whose logits are those of each token divided by its temperature. A bias becomes one more feature."""
    if bias is not None:
        hidden = torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)
        weight = torch.cat([weight, bias.unsqueeze(1)], 1)
    return hidden / temperature.unsqueeze(-1).to(hidden.dtype), weight


def for_each_temperature(hidden, weight, target, temperature, **options) -> Tensor:  # (N,)
    """log p(target) without a rounding of hidden states, and behind a softcap: one call for each temperature."""
    log_probs = hidden.new_zeros(target.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for value in temperature.unique().tolist():
        rows = (temperature == value).nonzero().squeeze(1)
        found = flce_ops.linear_log_probs(hidden[rows], weight, target[rows], temperature=value, **options)
        log_probs = log_probs.index_put((rows,), found.log_probs)
    return log_probs


def log_probs_at(inputs, temperature, **options):
    """Dense, in the operands' dtype with float32 logits; 0 at ignored tokens."""
    dtype = torch.promote_types(inputs.input.dtype, torch.float32)
    operands = (tensor.to(dtype) for tensor in inputs.args[:2])
    bias = None if inputs.linear_bias is None else inputs.linear_bias.to(dtype)
    z = dense_logits(*operands, bias, temperature=temperature.to(dtype), **options)
    found = z.log_softmax(-1).gather(1, inputs.target.clamp(min=0)[:, None]).squeeze(1)
    return found.where(inputs.target >= 0, 0.0)


def log_probs_of_quotients(inputs, temperature) -> Tensor:
    """With products in float32 at least: a CPU rounds logits of bfloat16 operands."""
    operands = at_temperatures(*inputs.args[:2], temperature, inputs.linear_bias)
    dtype = torch.promote_types(inputs.input.dtype, torch.float32)
    return flce_ops.linear_log_probs(*(operand.to(dtype) for operand in operands), inputs.target).log_probs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)  # of the quotients
def test_hidden_states_divided_by_temperatures(dtype, bias):
    """In float32 the quotient costs what any rounding there does. In bfloat16 each quotient is rounded to 8 bits, as
    the hidden states themselves were: an error of 2^-9 a feature, 1 to 3 thousandths of the log-probabilities here.
    """
    inputs = make_inputs(SHAPE, dtype=dtype, bias=bias)
    temperature = 0.3 + 2.0 * torch.rand(N, dtype=torch.float64)

    def ours(inputs):
        return log_probs_of_quotients(inputs, temperature)

    results = []
    for function, made in (
        (lambda i: log_probs_at(i, temperature), inputs.clone(torch.float64)),
        (ours, inputs.clone()),
    ):
        found = function(made)
        results.append([found, *torch.autograd.grad(found.sum(), list(made.leaves.values()))])
    found, exact = results[1][0], results[0][0]
    least = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 3e-4}[dtype]
    assert least <= error(found, exact) <= {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for gradient, truth in zip(results[1][1:], results[0][1:], strict=True):
        assert error(gradient, truth) <= {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}[dtype]
    powers_of_2 = 2.0 ** torch.randint(-2, 3, (N,))  # by which a quotient is exact
    found = log_probs_of_quotients(inputs, powers_of_2)
    assert error(found, log_probs_at(inputs.clone(torch.float64), powers_of_2)) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_call_for_each_temperature_rounds_nothing_and_takes_a_softcap(dtype):
    inputs, options = make_inputs(SHAPE, dtype=dtype), {"softcap": 4.0, "logit_scale": 0.7}
    temperature = torch.tensor([0.6, 1.0, 1.3], dtype=torch.float64)[torch.randint(3, (N,))]
    found = for_each_temperature(*inputs.args[:3], temperature, **options)
    exact = inputs.clone(torch.float64)
    truth = log_probs_at(exact, temperature, **options)
    assert error(found, truth) <= (1e-14 if dtype == torch.float64 else 1e-6)
    gradients = torch.autograd.grad(found.sum(), inputs.args[:2])
    for gradient, right in zip(gradients, torch.autograd.grad(truth.sum(), exact.args[:2]), strict=True):
        assert error(gradient, right) <= (1e-13 if dtype == torch.float64 else 2e-6)


# ---------------------------------------------------------------- an exported program


def test_an_exported_program_runs_where_the_package_is_imported(tmp_path):
    class Loss(torch.nn.Module):
        def forward(self, hidden, weight, target):
            return flce_ops.linear_cross_entropy(hidden, weight, target)

    args = make_inputs(SHAPE, requires_grad=False).args[:3]
    torch.export.save(torch.export.export(Loss(), args), tmp_path / "loss.pt2")
    torch.save((args, Loss()(*args)), tmp_path / "expected.pt")
    script = """
import sys, torch
try:
    torch.export.load(sys.argv[1])
    raise SystemExit("it was loaded without the operators")
except Exception:
    import flce_ops
args, expected = torch.load(sys.argv[2])
torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(*args), expected)
"""
    run_fresh(script, str(tmp_path / "loss.pt2"), str(tmp_path / "expected.pt"))


# ---------------------------------------------------------------- refusals that name a recipe

X, W, Y = torch.randn(5, 4), torch.randn(7, 4), torch.randint(7, (5,))
HEADS = {
    "linear_cross_entropy": lambda **options: flce_ops.linear_cross_entropy(X, W, Y, **options),
    "linear_log_probs": lambda **options: flce_ops.linear_log_probs(X, W, Y, **options),
    "linear_policy_loss": lambda **options: flce_ops.linear_policy_loss(X, W, Y, torch.ones(5), **options),
    "linear_kl_div": lambda **options: flce_ops.linear_kl_div(X, W, X, W, **options),
    "cross_entropy": lambda **options: flce_ops.cross_entropy(X @ W.T, Y, **options),
}


@pytest.mark.parametrize("function", HEADS)
def test_an_argument_that_a_composition_stands_for_is_refused_with_the_composition(function):
    call = HEADS[function]
    with pytest.raises(
        TypeError, match=f"^{function}: no argument is named support; call linear_log_probs .*logsumexp"
    ):
        call(support=Y[:, None])
    for name in ("low_rank_input", "lora_A"):
        with pytest.raises(TypeError, match=rf"^{function}: no argument is named {name}; .*torch.cat\(\[linear_weight"):
            call(**{name: X})
    for options in ({}, {"softcap": 5.0}):
        with pytest.raises(NotImplementedError, match=f"^{function}: a temperature of each token is .*input / temp"):
            call(temperature=torch.ones(5), **options)
