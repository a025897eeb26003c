"""linear_log_probs: log-probabilities, logsumexp, entropy and argmax, compared with dense logits in float64."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import RAGGED, SHAPES, Inputs, make_inputs
from reference_loss import dense_logits, error

import flce_ops
from flce_ops import linear_log_probs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOATS = ("log_probs", "lse", "entropy")
BOTH = {"entropy": True, "argmax": True}

# Extra tolerance for cases in which plain torch's error happens to be small, in units of the operands' rounding.
UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# float64 is its own reference here, with an error of 0. Sums of V terms in another order differ by 30 units.
SLACK = {torch.float64: 100, torch.float32: 5, torch.bfloat16: 0.6, torch.float16: 0.6}

# name: (arguments of make_inputs, options)
ARGUMENTS = {
    "plain": ({}, {}),
    "bias": ({"bias": True}, {}),
    "ignore_index": ({"ignore_index": 3}, {}),  # a real class
    "softcap": ({}, {"softcap": 4.0}),
    "temperature": ({"bias": True}, {"logit_scale": 1 / 0.7}),
    "softcap_after_scale": ({"bias": True}, {"softcap": 4.0, "logit_scale": 1.7}),
    "negative_scale": ({}, {"logit_scale": -0.3}),
    "int32_target": ({"target_dtype": torch.int32}, {}),
}


def dense(input, linear_weight, target, linear_bias=None, *, ignore_index=-100, **options):
    """The definition on dense logits. Logits of half operands become float32 before the softmax."""
    z = dense_logits(input, linear_weight, linear_bias, **options)
    z = z if z.dtype == torch.float64 else z.float()
    log_p = z.log_softmax(-1)
    valid = target != ignore_index
    column = torch.where(valid, target, 0).long().unsqueeze(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # a bias of -inf makes p 0, and p log p must be 0
    rows = (log_p.gather(-1, column).squeeze(-1), z.logsumexp(-1), entropy)
    return flce_ops.LinearLogProbs(*(torch.where(valid, row, 0.0) for row in rows), z.argmax(-1).where(valid, -1))


def ours(*args, **options):
    return linear_log_probs(*args, **BOTH, tail=True, **options)


def run(function, inputs: Inputs, cotangents, dtype=None, **options):
    """Returns the results, and the gradients of their inner product with the cotangents, {name: tensor or None}."""
    inputs = inputs.clone(dtype)
    if inputs.ignore_index != -100:
        options["ignore_index"] = inputs.ignore_index
    found = function(*inputs.args, **options)
    pairs = [(getattr(found, name), cotangent) for name, cotangent in cotangents.items()]
    torch.autograd.backward([row for row, _ in pairs], [cotangent.to(row.dtype) for row, cotangent in pairs])
    rows = {name: getattr(found, name).detach() for name in FLOATS}
    return {**rows, **{name: leaf.grad for name, leaf in inputs.leaves.items()}}, found.argmax


def cotangents_of(names, inputs):
    return {name: torch.randn(inputs.target.shape, device=inputs.target.device) for name in names}


def assert_no_worse_than_plain(inputs, cotangents, slack=1.0, **options):
    dtype = inputs.input.dtype
    exact, _ = run(dense, inputs, cotangents, torch.float64, **options)
    plain, _ = run(dense, inputs, cotangents, **options)
    found, argmax = run(ours, inputs, cotangents, **options)
    for name, tensor in found.items():
        if tensor is None:
            assert exact[name] is None, name
            continue
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        assert tensor.dtype == (expected if name in FLOATS else dtype), name
        room = slack * SLACK[dtype] * (2.5 if name == "linear_bias" else 1.0)  # a few entries dominate its norm
        limit = error(plain[name], exact[name]) + room * UNIT[dtype]
        assert error(tensor, exact[name]) <= limit, name
    assert_largest(inputs, argmax, **options)


def assert_largest(inputs, argmax, **options):
    """The argmax of dense logits. Half products are rounded, so it is compared only if the two largest float64 logits
    differ clearly.

    It is -1 for ignored tokens.
    """
    z = dense_logits(*(t if t is None else t.detach().double() for t in (*inputs.args[:2], inputs.args[3])), **options)
    assert argmax.dtype == torch.int64 and argmax.shape == inputs.target.shape
    valid = inputs.target != inputs.ignore_index
    assert (argmax[~valid] == -1).all()
    if z.shape[-1] == 1:
        assert not argmax[valid].any()
        return
    two = z.topk(2, -1).values
    apart = two[..., 0] - two[..., 1] > 4 * UNIT[inputs.input.dtype] * z.masked_fill(z.isinf(), 0.0).abs().amax(-1)
    assert torch.equal(argmax[apart & valid], z.argmax(-1)[apart & valid])
    assert len(argmax) < 10 or apart.float().mean() > 0.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_rows_and_gradients_are_no_worse_than_plain_torch(device, name, dtype, poisoned_memory):
    made, options = ARGUMENTS[name]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    assert_no_worse_than_plain(inputs, cotangents_of(FLOATS, inputs), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "logit_scale": 1.7}], ids=["plain", "softcap"])
def test_the_gradient_of_each_alone_is_no_worse_than_plain_torch(device, options, name, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    assert_no_worse_than_plain(inputs, cotangents_of([name], inputs), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != RAGGED], ids=str)
def test_other_shapes(device, shape, dtype, poisoned_memory):
    inputs = make_inputs(shape, device=device, dtype=dtype, bias=True)
    assert_no_worse_than_plain(inputs, cotangents_of(FLOATS, inputs), slack=20)  # few numbers, so luck matters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_chunks(device, dtype, poisoned_memory):
    inputs = make_inputs((600, 33, 509), device=device, dtype=dtype, bias=True)
    with flce_ops.workspace(1):
        assert_no_worse_than_plain(inputs, cotangents_of(FLOATS, inputs), softcap=6.0)
        assert flce_ops.last_path().op.endswith("_backward")
        assert flce_ops.last_path().chunks > 4


def test_leading_dimensions_are_kept(device):
    inputs = make_inputs((24, 11, 31), device=device)
    flat = ours(*inputs.args)
    shaped = ours(inputs.input.view(2, 3, 4, 11), inputs.linear_weight, inputs.target.view(2, 3, 4))
    for one, other in zip(flat, shaped, strict=True):
        assert torch.equal(one.view(2, 3, 4), other)
    single = ours(inputs.input[1], inputs.linear_weight, inputs.target[1])
    for one, other in zip(flat, single, strict=True):
        assert other.shape == ()
        torch.testing.assert_close(one[1], other)
