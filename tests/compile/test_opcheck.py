"""torch.library.opcheck: schema, autograd registration, fake kernels and AOT dispatch of every operator."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs, scalars
from torch.library import opcheck

import flce_ops  # noqa: F401  registers the operators

flce = torch.ops.flce
SHAPE = (12, 11, 31)
WANTED = [(True, True), (True, False), (False, True), (False, False)]
EVERYTHING = {"softcap": 5.0, "logit_scale": 0.7}
# bfloat16's results have their own dtypes, whichever arguments need a gradient
WANTED_AND_DTYPES = [(wanted, torch.float32) for wanted in WANTED] + [((True, True), torch.bfloat16)]


def example(device, dtype, wanted=(True, True), **made):
    """wanted: whether (input, parameters) need a gradient."""
    inputs = make_inputs(SHAPE, device=device, dtype=dtype, **made)
    inputs.input.requires_grad_(wanted[0])
    for parameter in (inputs.linear_weight, inputs.linear_bias):
        if parameter is not None:
            parameter.requires_grad_(wanted[1])
    return inputs


def gradients_of(inputs):
    return [inputs.input.requires_grad, inputs.linear_weight.requires_grad, inputs.linear_bias is not None]


# every dtype with a bias: float16 recomputes, bfloat16 sums in float32; without a bias each call has one argument less
ENTRY_CASES = [(True, torch.float32), (True, torch.float64), (True, torch.bfloat16), (True, torch.float16)]
ENTRY_CASES += [(False, torch.float32), (False, torch.float16)]


@pytest.mark.parametrize("bias, dtype", ENTRY_CASES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_entry(device, bias, reduction, dtype):
    inputs = example(device, dtype, bias=bias)
    opcheck(flce.linear_cross_entropy.default, inputs.args, {"reduction": reduction})


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_entry_over_who_needs_a_gradient(device, wanted, reduction):
    inputs = example(device, torch.float32, wanted, bias=True)
    opcheck(flce.linear_cross_entropy.default, inputs.args, {"reduction": reduction})


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_entry_with_every_argument(device, reduction):
    inputs = example(device, torch.float32, bias=True, weight=True, token_weight=True, normalizer=reduction != "none")
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2, **EVERYTHING, **inputs.options}
    opcheck(flce.linear_cross_entropy.default, inputs.args, options)


@pytest.mark.parametrize("wanted, dtype", WANTED_AND_DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"logit_sum": True, **EVERYTHING}], ids=["plain", "everything"])
def test_forward(device, options, wanted, dtype):
    inputs = example(device, dtype, wanted, bias=bool(options), weight=bool(options))
    opcheck(flce.linear_cross_entropy_forward.default, (*inputs.args, inputs.weight), scalars(options, device))


def test_forward_of_a_vocabulary_shard(device):
    inputs = example(device, torch.float32)
    args = (inputs.input, inputs.linear_weight[8:20], inputs.target, None, None)
    opcheck(flce.linear_cross_entropy_forward.default, args, {"vocab_start": 8, "vocab_size": 31})


@pytest.mark.parametrize("wanted, dtype", WANTED_AND_DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_backward(device, options, wanted, dtype):
    inputs = example(device, dtype, wanted, bias=bool(options), weight=bool(options))
    with torch.no_grad():
        _, pair, *_ = flce.linear_cross_entropy_forward(*inputs.args, inputs.weight, **scalars(options, device))
    cotangents = [torch.randn_like(pair[:, 0]).requires_grad_() for _ in range(3)]
    if not options:
        cotangents[2] = None
    args = (*cotangents, *inputs.args, inputs.weight, pair)
    options = {"output_mask": [True, True, bool(options)], **scalars(options, device)}
    opcheck(flce.linear_cross_entropy_backward.default, args, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_into_a_buffer(device, dtype):
    inputs = example(device, dtype, bias=True)
    with torch.no_grad():
        _, pair, *_ = flce.linear_cross_entropy_forward(*inputs.args, None)
    main_grad = torch.randn(inputs.linear_weight.shape, device=device)
    args = (
        torch.randn_like(pair[:, 0]),
        torch.randn_like(pair[:, 0]),
        None,
        *(t.detach() for t in inputs.args),
        None,
        pair,
    )
    options = {"output_mask": [True, True, True], "main_grad": main_grad}
    opcheck(flce.linear_cross_entropy_backward_.default, args, options)


@pytest.mark.parametrize("wanted, dtype", WANTED_AND_DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, **EVERYTHING}], ids=["plain", "everything"]
)
def test_with_grad(device, options, wanted, dtype):
    inputs = example(device, dtype, wanted, bias=bool(options), weight=bool(options))
    row_scale = torch.rand(SHAPE[0], device=device) if options else None  # None for a mean
    args = (*inputs.args, inputs.weight, row_scale)
    options = {"output_mask": gradients_of(inputs), **scalars(options, device)}
    opcheck(flce.linear_cross_entropy_with_grad.default, args, options)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_entry_under_autocast(device, reduction, half):
    inputs = example(device, torch.float32, bias=True)
    with torch.autocast(device, half):
        opcheck(flce.linear_cross_entropy.default, inputs.args, {"reduction": reduction})


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_inner_operators_under_autocast(device, half):
    inputs = example(device, torch.float32, bias=True)
    row_scale = torch.rand(SHAPE[0], device=device)
    with torch.autocast(device, half):
        opcheck(flce.linear_cross_entropy_forward.default, (*inputs.args, None), {})
        args = (*inputs.args, None, row_scale)
        opcheck(flce.linear_cross_entropy_with_grad.default, args, {"output_mask": [True, True, True]})


@pytest.mark.parametrize("shape", [(0, 11, 31), (1, 11, 31), (5, 1, 1)], ids=str)
def test_entry_of_degenerate_shapes(device, shape):
    inputs = make_inputs(shape, device=device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(flce.linear_cross_entropy.default, inputs.args, {"reduction": "sum"}, test_utils=tests)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_upstream(device, requires_grad):
    factor = torch.tensor(2.0, device=device)
    leaf = torch.randn(3, 2, device=device, requires_grad=requires_grad)
    made = [torch.randn(3, 2, device=device), torch.randn(4, device=device)]
    opcheck(flce.linear_cross_entropy_upstream.default, (made, factor, leaf))
    opcheck(flce.linear_cross_entropy_upstream_.default, (made, factor))


def test_every_registered_operator_is_checked_here():
    """The operators of a sharded vocabulary, of divergences and of log-probabilities are checked in tests named after
    them.
    """
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flce::") and "vocab_parallel" not in name and "linear_cross_entropy" in name
    }
    ends = ("", "_metrics", "_forward", "_backward", "_backward_", "_with_grad", "_upstream", "_upstream_")
    assert names == {f"linear_cross_entropy{end}" for end in ends}
