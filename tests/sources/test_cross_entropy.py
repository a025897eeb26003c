"""cross_entropy of given logits: loss, gradients, logits that may be overwritten, composition, the Triton kernels."""

# N tokens, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs, scalars
from recorded import Recorded
from reference_loss import error, loss_of_logits
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import flce_ops

flce = torch.ops.flce
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"softcap": 4.0, "logit_scale": 0.7, "temperature": 1.3},
    {"label_smoothing": 0.1, "softcap": 4.0, "weight": True, "token_weight": True},
]


def make_logits(shape=(37, 131), *, device="cpu", dtype=torch.float32, options=()):
    """Returns logits (N, V), targets, and the options, with tensors for those that need them."""
    inputs = make_inputs((shape[0], 24, shape[1]), device=device, dtype=torch.float32, weight=True, token_weight=True)
    logits = F.linear(inputs.input, inputs.linear_weight).detach().to(dtype)
    made = dict(options)
    if "weight" in made:
        made["weight"] = inputs.weight.to(dtype)
    if "token_weight" in made:
        made["token_weight"] = inputs.token_weight.detach()
    return logits, inputs.target, made


def dense(logits, target, **options):
    """The definition, on float64 logits, or on the float32 copy of other logits, as a user writes it."""
    softcap, scale = options.pop("softcap", None), options.pop("logit_scale", 1.0)
    temperature = options.pop("temperature", 1.0)
    z = scale * (logits if logits.dtype == torch.float64 else logits.float())
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    return loss_of_logits(z, target, **options)


def in_place(logits, target, **options):
    return flce_ops.cross_entropy(logits, target, inplace_backward=True, **options)


def value_and_gradient(function, logits, target, cotangent=None, **options):
    logits = logits.detach().clone().requires_grad_()
    value = function(logits, target, **options)
    (grad,) = torch.autograd.grad(value, logits, cotangent)
    return value.detach(), grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient_agree_with_float64_as_plain_torch_does(device, dtype, options, reduction):
    logits, target, options = make_logits(device=device, dtype=dtype, options=options)
    cotangent = torch.rand(target.shape if reduction == "none" else (), device=device)
    arguments = {"reduction": reduction, **options}
    exact = value_and_gradient(dense, logits.double(), target, cotangent.double(), **arguments)
    plain = value_and_gradient(
        dense, logits, target, cotangent.to(exact[0] if dtype == torch.float64 else cotangent), **arguments
    )
    cotangent = cotangent.to(plain[0].dtype)
    found = value_and_gradient(flce_ops.cross_entropy, logits, target, cotangent, **arguments)
    assert found[0].dtype == plain[0].dtype and found[1].dtype == dtype
    # a gradient made in forward is rounded again when it is multiplied by the loss's own gradient
    rounding = torch.finfo(dtype).eps / 2
    for ours, usual, right in zip(found, plain, exact):
        usual = error(usual, right)
        assert error(ours, right) <= max(2 * usual, usual + rounding) + 1e-6


@pytest.mark.parametrize("classes", [5003, 40009, 90001])  # blocks in registers, and more blocks, which are read twice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_several_blocks(device, dtype, classes, poisoned_memory):
    logits = (3.0 * torch.randn(4, classes, device=device)).to(dtype)
    target = torch.randint(classes, (4,), device=device)
    target[3] = -100
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3, "weight": torch.rand(classes, device=device)}):
        exact = value_and_gradient(dense, logits.double(), target, **options)
        logits[3] = torch.nan
        found = value_and_gradient(flce_ops.cross_entropy, logits, target, **options)
        made = logits.clone().requires_grad_()
        loss = flce_ops.cross_entropy(made * 1.0, target, inplace_backward=True, **options)
        assert torch.equal(loss, found[0]) and torch.equal(*torch.autograd.grad(loss, made), found[1])
        logits[3] = 0.0
        assert error(found[0], exact[0]) < 1e-6
        assert error(found[1], exact[1]) <= torch.finfo(dtype).eps / 2 + 1e-6
        assert not found[1][3].any()


def test_ignored_rows_hold_anything_and_get_zero(device, poisoned_memory):
    logits, target, _ = make_logits(device=device)
    clean = logits.clone()
    logits[target < 0] = torch.nan
    for reduction in ("mean", "none"):
        cotangent = torch.ones_like(target, dtype=torch.float32) if reduction == "none" else None
        expected = value_and_gradient(flce_ops.cross_entropy, clean, target, cotangent, reduction=reduction)
        found = value_and_gradient(flce_ops.cross_entropy, logits, target, cotangent, reduction=reduction)
        assert all(map(torch.equal, found, expected)) and not found[1][target < 0].any()


@pytest.mark.parametrize("layout", ["columns", "padded", "sequences", "shifted", "one token"])
def test_layouts(device, layout):
    logits, target, _ = make_logits((36, 50), device=device)
    if layout == "columns":
        logits = logits.T.contiguous().T
    elif layout == "padded":
        logits = F.pad(logits, (0, 3))[:, :50]
    elif layout == "sequences":
        logits, target = logits.view(4, 9, 50), target.view(4, 9)
    elif layout == "shifted":
        logits, target = logits.view(4, 9, 50)[:, :-1], target.view(4, 9)[:, 1:]
    else:
        logits, target = logits[1], target[1]
    expected = value_and_gradient(lambda x, y: dense(x.view(-1, 50), y.reshape(-1)), logits.contiguous(), target)
    leaf = logits.detach().requires_grad_()
    loss, metrics = flce_ops.cross_entropy(leaf, target, return_metrics=True)
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close((loss, grad), expected)
    assert torch.equal(metrics.argmax, torch.where(target >= 0, logits.argmax(-1), -1))
    right = (metrics.argmax == target).sum() / (target >= 0).sum()
    torch.testing.assert_close(metrics.token_accuracy, right, equal_nan=True)


# ---------------------------------------------------------------- what composes


@pytest.mark.parametrize("handed_over", [False, True])
def test_compiled_in_one_graph_with_the_memory_of_dead_logits(handed_over):
    logits, target, _ = make_logits()
    head = torch.randn(131, 131)

    def loss_of(x):
        made = F.linear(x, head).view(37, 131)
        return flce_ops.cross_entropy(made, target, inplace_backward=handed_over, label_smoothing=0.1)

    expected = value_and_gradient(lambda x, _: loss_of(x), logits, target)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    found = value_and_gradient(lambda x, _: compiled(x), logits, target)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        x = logits.clone().requires_grad_()
        torch.autograd.grad(compiled(x), x, create_graph=True)[0].sum().backward()


def test_logits_that_enter_a_compiled_graph_and_a_part_of_them():
    """A graph must not overwrite logits computed before it, because its outputs would then have no gradient."""
    logits, target, _ = make_logits((36, 131))
    target = target.view(4, 9)

    def losses(made):
        return in_place(made, target) + in_place(made[:, :-1], target[:, 1:])

    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    expected = value_and_gradient(
        lambda x, _: (lambda z: in_place(z[:, :-1], target[:, 1:]) + in_place(z * 1.0, target))(
            (x * 2.0).view(4, 9, 131)
        ),
        logits,
        target,
    )
    found = value_and_gradient(lambda x, _: compiled((x * 2.0).view(4, 9, 131)), logits, target)
    torch.testing.assert_close(found, expected)


def test_the_compiler_keeps_logits_that_are_read_afterwards():
    """The operator declares its mutation. What the graph reads afterwards is the gradient, as in eager mode."""
    logits, target, _ = make_logits()

    def both(x):
        made = x * 2.0
        kept = made.detach().clone()
        return in_place(made, target), kept

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    loss, kept = compiled(logits.clone().requires_grad_())
    torch.testing.assert_close(kept, 2.0 * logits)
    torch.testing.assert_close(loss, dense(2.0 * logits, target))


def test_second_derivatives_over_no_token():
    logits, target = torch.randn(0, 7, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    losses = flce_ops.cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), logits)
    assert second.shape == (0, 7)


def test_transforms_and_checkpoints():
    logits, target, _ = make_logits((11, 13), dtype=torch.float64)
    (grad,) = value_and_gradient(dense, logits, target)[1:]
    torch.testing.assert_close(torch.func.grad(flce_ops.cross_entropy)(logits, target), grad)
    hessian = torch.func.jacrev(torch.func.jacrev(flce_ops.cross_entropy))(logits, target)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.jacrev(dense))(logits, target))
    stacked = torch.func.vmap(flce_ops.cross_entropy, in_dims=(0, None))(torch.stack([logits, 2 * logits]), target)
    torch.testing.assert_close(stacked[1], dense(2 * logits, target))
    for reentrant in (False, True):
        leaf = logits.clone().requires_grad_()
        checkpoint(lambda x: in_place(x * 1.0, target), leaf, use_reentrant=reentrant).backward()
        torch.testing.assert_close(leaf.grad, grad)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: flce_ops.cross_entropy(x, target), (logits,), (logits,))


REFUSED = {
    "probabilities": (lambda x, y: flce_ops.cross_entropy(x, x.softmax(-1)), TypeError, "class indices"),
    "learnt": (lambda x, y: flce_ops.cross_entropy(x, y, logit_scale=x[0, 0]), TypeError, "logit_scale to be a number"),
    "range": (lambda x, y: flce_ops.cross_entropy(x, y + 131), IndexError, "expected target in"),
    "quantized": (lambda x, y: flce_ops.cross_entropy(x.to_sparse(), y), TypeError, "expected logits to be a dense"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument(case):
    call, kind, message = REFUSED[case]
    logits, target, _ = make_logits()
    with pytest.raises(kind, match=message):
        call(logits, target.clamp(min=0))


def test_a_training_steps_loss_is_one_operator_and_no_pass_over_the_targets():
    """ATen operations beside it would be launches of a few microseconds each."""
    logits, target, _ = make_logits()
    logits.requires_grad_()
    with Recorded(lambda func, *_: [] if func.is_view else [func.overloadpacket.__name__]) as calls:
        flce_ops.cross_entropy(logits, target)
    assert calls.seen == ["linear_cross_entropy_with_grad"]


STATISTICS = dict.fromkeys(("argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit"), True)
OF_FORWARD = dict.fromkeys(("logit_sum", "argmax", "expected_log_prob", "log_sum_sq_probs", "mean_logit"), True)


@pytest.mark.parametrize("several", [False, True], ids=["one class", "several classes"])
def test_inner_operators_of_given_logits_are_those_of_a_head_that_is_the_identity(several):
    logits, target, _ = make_logits((13, 7), dtype=torch.float64)
    if several:
        target = torch.stack([target, target.roll(1), target.roll(2)], 1)
    options = {"target_weight": torch.rand(13, 3).double()} if several else {"label_smoothing": 0.1}
    found = []
    for weight in (None, torch.eye(7, dtype=torch.float64)):
        given = logits, weight, target, None, None
        rows = flce.linear_cross_entropy_forward(*given, **OF_FORWARD)
        of_rows = torch.ones_like(rows[0]), torch.ones(13).double(), None
        asked = {"grad_expected_log_prob": torch.ones(13).double(), "expected_log_prob": rows[3]}
        mask = {"output_mask": [True, False, False]}
        gradients = flce.linear_cross_entropy_backward(*of_rows, *given, rows[1], **asked, **mask)
        step = flce.linear_cross_entropy_with_grad(*given, None, **mask, **STATISTICS, **options)
        found.append([*rows, gradients[0], *step])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=str)
def test_operators(dtype, options):
    logits, target, _ = make_logits((9, 13), dtype=dtype)
    logits.requires_grad_()
    numbers, scale = scalars(options), torch.rand(9)
    opcheck(flce.cross_entropy.default, (logits, target), options)
    opcheck(flce.cross_entropy_metrics.default, (logits, target), {"reduction": "none"})
    given, mask = (logits, None, target, None, None), {"output_mask": [True, False, False]}
    opcheck(flce.linear_cross_entropy_forward.default, given, {"logit_sum": True, "argmax": True, **numbers})
    smoothed = {"label_smoothing": 0.1, **mask, **numbers}
    opcheck(flce.linear_cross_entropy_with_grad.default, (*given, scale), smoothed)
    for denominator in (None, torch.tensor(3.0)):
        opcheck(flce.linear_cross_entropy_with_grad.default, (*given, None, denominator), mask | numbers)
    pair = flce.linear_cross_entropy_forward(logits.detach(), *given[1:])[1]
    of_token = torch.randn_like(pair[:, 0])
    opcheck(flce.linear_cross_entropy_backward.default, (of_token, of_token, None, *given, pair), mask | numbers)
    # a leaf that requires a gradient cannot be overwritten
    opcheck(flce.cross_entropy_.default, (logits.detach(), target), {})
    opcheck(flce.cross_entropy_with_grad_.default, (logits.detach(), *given[1:], scale), mask)
    opcheck(flce.cross_entropy_metrics_.default, (logits.detach(), target), {})
