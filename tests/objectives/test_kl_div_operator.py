"""linear_kl_div as an operator: opcheck, and compiled with every argument."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import pytest
import torch
from inputs import scalars
from reference_divergence import KINDS, make_pair, run
from reference_loss import error
from test_compile import compiled, warnings_are_errors
from torch.library import opcheck

import flce_ops

flce = torch.ops.flce
SHAPE = (12, 11, 7, 31)
EVERYTHING = {"softcap": 5.0, "logit_scale": 0.7, "teacher_logit_scale": 0.9, "teacher_softcap": 4.0, "beta": 0.3}
WANTED = [(True, True), (True, False), (False, True), (False, False)]


def entry_call(pair):
    pair = dict(pair)
    args = [pair.pop(name, None) for name in ("input", "linear_weight", "teacher_input", "teacher_weight")]
    return tuple(args), pair


def inner_args(pair):
    names = "input linear_weight linear_bias teacher_input teacher_weight teacher_bias teacher_probs".split()
    return *(pair.get(name) for name in names), None if "target" not in pair else pair["target"] != -100


def with_gradients(pair, wanted):
    pair["input"].requires_grad_(wanted[0])
    for name in ("linear_weight", "linear_bias"):
        if name in pair:
            pair[name].requires_grad_(wanted[1])
    return pair


# ---------------------------------------------------------------- opcheck


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_entry_passes_opcheck(device, reduction, dtype):
    args, options = entry_call(make_pair(SHAPE, device=device, dtype=dtype, bias=True))
    opcheck(flce.linear_kl_div.default, args, {**options, "reduction": reduction, "kind": "jsd"})


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_entry_passes_opcheck_with_every_argument(device, reduction, wanted):
    made = make_pair(SHAPE, device=device, bias=True, token_weight=True)
    args, options = entry_call(with_gradients(made, wanted))
    if reduction != "none":
        options["normalizer"] = torch.tensor(7.0, device=device)
    opcheck(flce.linear_kl_div.default, args, {**options, **EVERYTHING, "reduction": reduction, "kind": "reverse"})


@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_pass_opcheck(device, kind, probs):
    pair = make_pair(SHAPE, device=device, bias=True, probs=probs)
    options = scalars({"kind": kind, **EVERYTHING}, device)
    opcheck(flce.linear_kl_div_forward.default, inner_args(pair), options)
    with torch.no_grad():
        divergence, *statistics = flce.linear_kl_div_forward(*inner_args(pair), **options)
    grad = torch.randn_like(divergence).requires_grad_()
    args = (grad, *inner_args(pair), *statistics)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # its derivative is refused
    known = {"divergence": divergence.detach()} if options["kind"] == "nla" else {}
    opcheck(
        flce.linear_kl_div_backward.default, args, {**options, **known, "output_mask": [True] * 3}, test_utils=tests
    )


@pytest.mark.parametrize(
    "kind, wanted", [*(("jsd", wanted) for wanted in WANTED), ("forward", WANTED[0]), ("reverse", WANTED[0])], ids=str
)
def test_with_grad_passes_opcheck(device, kind, wanted):
    pair = with_gradients(make_pair(SHAPE, device=device, bias=True), wanted)
    row_scale = torch.rand(SHAPE[0], device=device)
    options = scalars({"kind": kind, "beta": 0.5, "output_mask": [wanted[0], wanted[1], wanted[1]]}, device)
    opcheck(flce.linear_kl_div_with_grad.default, (*inner_args(pair), row_scale), options)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_operators_pass_opcheck_under_autocast(device, half):
    pair = make_pair(SHAPE, device=device, bias=True)
    args, options = entry_call(pair)
    with torch.autocast(device, half):
        for reduction in ("none", "mean"):
            opcheck(flce.linear_kl_div.default, args, {**options, "reduction": reduction})
        opcheck(flce.linear_kl_div_forward.default, inner_args(pair), {})


# ---------------------------------------------------------------- compile


@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind, reduction", [("forward", "none"), ("reverse", "mean"), ("jsd", "sum")])
def test_compiled_is_eager(device, kind, reduction, probs):
    pair = make_pair(SHAPE, device=device, bias=True, token_weight=True, probs=probs)
    cotangent = torch.randn(SHAPE[0], device=device) if reduction == "none" else torch.tensor(-3.0, device=device)
    loss, counter = compiled(flce_ops.linear_kl_div)
    # refused together with teacher_probs
    of_teacher = [name for name in EVERYTHING if probs and name.startswith("teacher")]
    options = {"kind": kind, "reduction": reduction, **EVERYTHING, **dict.fromkeys(of_teacher)}
    with warnings_are_errors():
        found = run(loss, pair, cotangent, **options)
    expected = run(flce_ops.linear_kl_div, pair, cotangent, **options)
    assert counter.count == 1
    for name in expected:
        assert error(found[name], expected[name]) < 1e-6, name
