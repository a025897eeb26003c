"""What linear_kl_div refuses, with the name of the argument."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import re

import pytest
import torch
from reference_divergence import make_pair
from test_kl_div_operator import SHAPE, flce, inner_args

import flce_ops
from flce_ops.entry.arguments import check_teacher
from flce_ops.math.options import KlDivOperands


def test_a_teacher_without_classes_is_a_shards():
    """Of a rank that has none of the vocabulary. Only the numbers of classes must agree."""
    rows, none = torch.empty(3, 4), torch.empty(0, 4)
    check_teacher("linear_kl_div", KlDivOperands(rows, none, None, rows, none, None, None, None))
    with pytest.raises(ValueError, match="student and teacher must have one vocabulary"):
        check_teacher("linear_kl_div", KlDivOperands(rows, torch.empty(5, 4), None, rows, none, None, None, None))


def changed(pair, **changes):
    pair = {**pair, **changes}
    return {name: value for name, value in pair.items() if value is not None}


REFUSED = {
    "neither teacher": ({"teacher_input": None, "teacher_weight": None}, ValueError, "got neither"),
    "half a teacher": ({"teacher_weight": None}, ValueError, "got teacher_input"),
    "both teachers": ({"teacher_probs": lambda p: torch.rand(12, 31)}, ValueError, "teacher_probs came together with"),
    "another vocabulary": (
        {"teacher_weight": lambda p: p["teacher_weight"][:-2]},
        ValueError,
        "one vocabulary, but linear_weight has 31 rows and teacher_weight 29",
    ),
    "other tokens": ({"teacher_input": lambda p: p["teacher_input"][1:]}, ValueError, "teacher_input of shape"),
    "features": ({"teacher_input": lambda p: p["teacher_input"][:, 1:]}, ValueError, "teacher_input has 6 features"),
    "teacher's dtype": ({"teacher_weight": lambda p: p["teacher_weight"].half()}, TypeError, "teacher_weight in"),
    "student's dtype": ({"linear_weight": lambda p: p["linear_weight"].half()}, TypeError, "expected linear_weight in"),
    "integer input": ({"input": lambda p: p["input"].detach().long()}, TypeError, "expected input in one of"),
    "bias": ({"teacher_bias": torch.zeros(5)}, ValueError, "expected teacher_bias of shape (31,)"),
    "flat weight": ({"linear_weight": lambda p: p["linear_weight"].flatten()}, ValueError, "FSDP1"),
    "kind": ({"kind": "kl"}, ValueError, "expected kind to be one of forward, reverse, jsd, tv, nla, got 'kl'"),
    "beta": ({"kind": "jsd", "beta": 1.5}, ValueError, "expected beta in [0, 1], got 1.5"),
    "another kind's beta": ({"kind": "forward", "beta": 2.0}, ValueError, "expected beta in [0, 1], got 2.0"),
    "reduction": ({"reduction": "batchmean"}, ValueError, "expected reduction to be one of"),
    "softcap": ({"teacher_softcap": 0.0}, ValueError, "expected teacher_softcap to be positive"),
    "target's shape": ({"target": lambda p: p["target"][1:]}, ValueError, "expected target of shape (12,)"),
    "target's dtype": ({"target": lambda p: p["target"].float()}, TypeError, "expected target of class indices"),
    "token_weight": ({"token_weight": torch.ones(5)}, ValueError, "expected token_weight of shape (12,)"),
    "normalizer of rows": ({"reduction": "none", "normalizer": 3.0}, ValueError, "normalizer divides a sum"),
    "normalizer's shape": ({"normalizer": torch.ones(2)}, ValueError, "expected normalizer to be a number or a 0-d"),
    "teacher's gradient": (
        {"teacher_weight": lambda p: p["teacher_weight"].clone().requires_grad_()},
        NotImplementedError,
        "the teacher is constant, but teacher_weight requires a gradient; pass teacher_weight.detach()",
    ),
}


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case, compile):
    changes, kind, message = REFUSED[case]
    pair = make_pair(SHAPE)
    changes = {name: change(pair) if callable(change) else change for name, change in changes.items()}
    function = torch.compile(flce_ops.linear_kl_div, backend="eager", fullgraph=True) if compile else None
    with pytest.raises(Exception if compile else kind, match=re.escape(message)):
        (function or flce_ops.linear_kl_div)(**changed(pair, **changes))


def test_given_probabilities_of_another_shape_or_dtype_are_refused():
    pair = make_pair(SHAPE, probs=True)
    with pytest.raises(ValueError, match="expected teacher_probs of shape \\(12, 31\\)"):
        flce_ops.linear_kl_div(**changed(pair, teacher_probs=pair["teacher_probs"][:, 1:]))
    with pytest.raises(TypeError, match="expected teacher_probs in a floating dtype"):
        flce_ops.linear_kl_div(**changed(pair, teacher_probs=pair["teacher_probs"].long()))


@pytest.mark.parametrize("name", ["teacher_logit_scale", "teacher_softcap"])
def test_what_is_of_the_teachers_logits_is_refused_beside_probabilities(name):
    with pytest.raises(
        ValueError, match=f"{name} is of the teacher's logits, but teacher_probs are given; leave {name}"
    ):
        flce_ops.linear_kl_div(**make_pair(SHAPE, probs=True), **{name: 2.0})


def test_a_teacher_that_requires_a_gradient_is_fine_where_nothing_is_recorded():
    pair = make_pair(SHAPE)
    expected = flce_ops.linear_kl_div(**pair).detach()
    pair["teacher_weight"] = torch.nn.Parameter(pair["teacher_weight"])
    with torch.no_grad():
        assert torch.equal(flce_ops.linear_kl_div(**pair), expected)
    with pytest.raises(NotImplementedError, match="teacher_weight requires a gradient"):
        flce.linear_kl_div_forward(*inner_args(pair))  # the inner operators do not drop the option silently, either


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivatives_are_refused_by_name(reduction):
    pair = make_pair(SHAPE)
    loss = flce_ops.linear_kl_div(**pair, reduction=reduction).sum()
    with pytest.raises(NotImplementedError, match="linear_kl_div: second derivatives are not implemented"):
        (gradient,) = torch.autograd.grad(loss, pair["input"], create_graph=True)
        gradient.sum().backward()


@pytest.mark.parametrize("frozen", [None, "linear_weight"])
def test_compiled_second_derivatives_are_refused(frozen):
    """AOTAutograd refuses if the backward graph reads a tensor that requires a gradient, which is a weight that is not
    frozen.
    """
    pair = make_pair(SHAPE)
    if frozen is not None:
        pair[frozen].requires_grad_(False)
    loss = torch.compile(flce_ops.linear_kl_div, backend="aot_eager")(**pair)
    with pytest.raises(RuntimeError, match="double backward"):
        (gradient,) = torch.autograd.grad(loss, pair["input"], create_graph=True)
        gradient.sum().backward()


def test_forward_mode_is_refused_by_name():
    pair = {name: tensor.detach() for name, tensor in make_pair(SHAPE).items()}
    hidden = pair.pop("input")
    with pytest.raises(NotImplementedError, match="linear_kl_div: forward-mode differentiation"):
        torch.func.jvp(lambda input: flce_ops.linear_kl_div(input, **pair), (hidden,), (hidden,))
