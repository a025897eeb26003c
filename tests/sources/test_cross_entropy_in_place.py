"""With inplace_backward the gradient overwrites the logits, or autograd refuses. No one reads wrong logits."""

# N tokens, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from test_cross_entropy import OPTIONS, dense, in_place, make_logits, value_and_gradient

import flce_ops


@pytest.mark.parametrize("made_as", [(35, 131), (5, 7, 131), (35 * 131,)])
@pytest.mark.parametrize("seen_as", [(35, 131), (5, 7, 131)])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_the_gradient_is_written_over_logits_that_are_handed_over(device, options, made_as, seen_as):
    logits, target, _ = make_logits((35, 131), device=device)
    target = target.view(seen_as[:-1])
    expected = value_and_gradient(flce_ops.cross_entropy, logits, target.view(-1), **options)
    leaf = logits.clone().requires_grad_()
    made = leaf.view(made_as) * 1.0
    loss = in_place(made if made_as == seen_as else made.view(seen_as), target, **options)
    assert flce_ops.last_path().op == "cross_entropy_with_grad_"
    assert torch.equal(made.detach().view(-1, 131), expected[1])
    for factor in (1.0, 3.0):  # with the first factor it is not the last backward
        (grad,) = torch.autograd.grad(factor * loss, leaf, retain_graph=factor == 1.0)
        torch.testing.assert_close(grad, factor * expected[1])
    assert torch.equal(loss, expected[0])


UNTOUCHED = {
    "not handed over": lambda leaf, target: flce_ops.cross_entropy(leaf * 1.0, target),
    "a leaf": in_place,
    "a view of a leaf": lambda leaf, target: in_place(leaf.view(37, 131), target),
    "a part": lambda leaf, target: in_place(F.pad(leaf, (0, 1))[:, :-1], target),
    "expanded": lambda leaf, target: in_place((leaf[:1] * 1.0).expand(37, 131), target),
    "per token": lambda leaf, target: in_place(leaf * 1.0, target, reduction="none").sum(),
    "float16": lambda leaf, target: in_place(leaf.half(), target),
    "their gradient is kept": lambda leaf, target: in_place((lambda z: (z.retain_grad(), z)[1])(leaf * 1.0), target),
    "negated where they are read": lambda leaf, target: in_place(torch._neg_view(leaf * 1.0), target),
    "no gradient": lambda leaf, target: in_place(leaf.detach() * 1.0, target),
    "torch.func": lambda leaf, target: torch.func.grad(lambda x: in_place(x * 1.0, target))(leaf.detach()).sum(),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_logits_that_somebody_may_read_stay(case, monkeypatch):
    """Logits are also kept if overwriting was allowed but autograd does not permit it. No overwriting operator runs."""
    logits, target, _ = make_logits()
    leaf = logits.clone().requires_grad_()
    UNTOUCHED[case](leaf, target)
    assert flce_ops.last_path().op != "cross_entropy_with_grad_"
    assert torch.equal(leaf.detach(), logits)


def test_a_copy_that_flattening_makes_is_overwritten_without_being_handed_over():
    logits, target, _ = make_logits((36, 50))
    made = logits.requires_grad_().view(4, 9, 50) * 1.0
    before = made.detach().clone()
    loss = flce_ops.cross_entropy(made[:, :-1], target.view(4, 9)[:, 1:])
    assert flce_ops.last_path().op == "cross_entropy_with_grad_" and torch.equal(made.detach(), before)
    expected = value_and_gradient(dense, before[:, :-1].reshape(-1, 50), target.view(4, 9)[:, 1:].reshape(-1))
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad.view(4, 9, 50)[:, :-1].reshape(-1, 50), expected[1])


SAVED = {
    "its result was saved": lambda x, target: in_place(torch.tanh(x), target),
    "they were saved as an operand": lambda x, target: (lambda z: z.square().sum() + in_place(z, target))(x * 2.0),
    "a view of them was saved": lambda x, target: (lambda z: z.view(-1).square().sum() + in_place(z, target))(x * 2.0),
    "read afterwards": lambda x, target: (lambda z: in_place(z, target) + z.sum())(x * 2.0),
    "a view read afterwards": lambda x, target: (lambda z: in_place(z.view(37, 131), target) + z.sum())(
        (x * 2.0).view(-1)
    ),
    "a second loss": lambda x, target: (lambda z: in_place(z, target) + flce_ops.cross_entropy(z, target))(x * 2.0),
    "overwritten afterwards": lambda x, target: (lambda z: (in_place(z, target), z.detach().zero_())[0])(x * 2.0),
}


@pytest.mark.parametrize("case", SAVED)
def test_no_gradient_is_wrong_in_silence_where_handed_over_logits_had_other_readers(case):
    logits, target, _ = make_logits()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|hold their gradient after the call"):
        SAVED[case](logits.requires_grad_(), target).backward()


ASKED = {
    "retain_grad": lambda z: z.retain_grad(),
    "a hook": lambda z: z.register_hook(lambda grad: None),
    "a hook of several": lambda z: torch.autograd.graph.register_multi_grad_hook([z], lambda grads: None),
}


# No hook on a view: torch 2.13 crashes if a hook is set after any operation wrote to the base.
@pytest.mark.parametrize(("view", "ask"), [*((False, ask) for ask in ASKED), (True, "retain_grad")])
def test_a_gradient_of_the_logits_that_is_asked_for_after_handing_them_over_is_refused(view, ask):
    """No gradient reaches these logits any more, so z.grad would silently stay None."""
    logits, target, _ = make_logits()
    made = (logits.requires_grad_().view(-1) * 2.0).view(37, 131) if view else logits.requires_grad_() * 2.0
    loss = in_place(made, target)
    ASKED[ask](made)
    with pytest.raises(
        RuntimeError, match=r"no gradient reaches a retain_grad\(\) or a hook that was set on them since"
    ):
        loss.backward()


@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_of_the_logits_that_is_asked_for_before_handing_them_over_arrives(view):
    logits, target, _ = make_logits()

    def gradients(loss):
        seen = []
        made = (logits.view(-1) * 2.0).view(37, 131) if view else logits * 2.0
        made.register_hook(seen.append)
        made.retain_grad()
        loss(made, target).backward()
        return made.grad, *seen

    logits.requires_grad_()
    torch.testing.assert_close(gradients(in_place), gradients(dense))


def test_a_gradient_of_logits_that_were_copied_is_still_theirs():
    """The gradient overwrites the copy."""
    logits, target, _ = make_logits((36, 50))
    made = (logits.requires_grad_().view(4, 9, 50) * 1.0)[:, :-1]
    loss = in_place(made, target.view(4, 9)[:, 1:])
    made.retain_grad()
    loss.backward()
    assert flce_ops.last_path().op == "cross_entropy_with_grad_" and torch.equal(
        made.grad, logits.grad.view(4, 9, 50)[:, :-1]
    )


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return -3.0 * grad.view(37, 131)


def hooked(view):
    view.register_hook(lambda grad: 2.0 * grad)
    return view.view(37, 131)


@pytest.mark.parametrize("way", [lambda z: Reversed.apply(z).view(37, 131), lambda z: hooked(z.view(-1))])
def test_the_gradient_goes_back_through_the_views_of_handed_over_logits(way):
    """Not further, to the tensor they are views of."""
    logits, target, _ = make_logits()
    expected = value_and_gradient(lambda x, y: dense(way(x * 1.0), y), logits, target)
    found = value_and_gradient(lambda x, y: in_place(way(x * 1.0), y), logits, target)
    assert flce_ops.last_path().op == "cross_entropy_with_grad_"
    torch.testing.assert_close(found, expected)


def test_uses_that_save_nothing_before_handing_over_are_right():
    logits, target, _ = make_logits()
    leaf = logits.clone().requires_grad_()
    made = leaf * 2.0
    (made.mean() + in_place(made, target)).backward()
    (expected,) = torch.autograd.grad((lambda z: z.mean() + dense(z, target))(logits.requires_grad_() * 2.0), logits)
    torch.testing.assert_close(leaf.grad, expected)
