"""The expected logit, its gradient and the argmax in the Triton kernels, on the CPU through Triton's interpreter."""

# N tokens, D hidden, V vocabulary

import importlib

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs, scalars
from marks import IN_INTERPRETER
from reference_loss import error, with_lse
from test_triton_interpreter import EVEN, OPTIONS, RAGGED, TOLERANCE, double, logit_options, operands

import flce_ops
from flce_ops import aten
from flce_ops.triton import launch_backward, launch_forward, launch_with_grad

pytestmark = IN_INTERPRETER

DTYPES = [torch.float32, torch.float16]
LOGITS = [OPTIONS[0], OPTIONS[1], {"bias": True, "softcap": 4.0, "logit_scale": 0.7}]


def forward_and_truth(args, options, **shard):
    wanted = {"expected_log_prob": True, "argmax": True, **options, **shard}
    return launch_forward(*args, **wanted), aten.forward(*double(*args), **wanted)


def assert_rows(found, truth, dtype, slack=1.0, *, large=False):
    """target_logit, lse, expected_log_prob and max_logit; the argmax only if the two largest logits differ enough.

    With large logits expected_log_prob is accurate to their last digits, not to its own, so it is judged relative to
    lse.
    """
    found, truth = with_lse(found), with_lse(truth)
    for i in (0, 1, 3, 4):
        assert found[i].dtype == torch.float32
        beside = truth[1] if large and i == 3 else 0.0
        assert error(found[i] + beside, truth[i] + beside) <= slack * TOLERANCE[dtype], i
    assert found[5].dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [RAGGED, EVEN], ids=str)
@pytest.mark.parametrize("options", LOGITS, ids=str)
def test_forward_gives_the_expected_and_the_largest_logit(shape, dtype, options, poisoned_memory):
    args = operands(shape, dtype, options)
    found, truth = forward_and_truth(args, logit_options(options))
    assert_rows(found, truth, dtype)
    assert torch.equal(found[5], truth[5])  # no two products of these operands are that close


@pytest.mark.parametrize("wanted", ["expected_log_prob", "argmax"])
def test_only_an_entropy_replaces_the_logit_of_its_reference_class(wanted, monkeypatch):
    module, asked = importlib.import_module("flce_ops.triton.steps.forward"), []
    launch = module.launch_exponentials

    def recorded(*arguments, **options):
        asked.append(options["reference_class"])
        return launch(*arguments, **options)

    monkeypatch.setattr(module, "launch_exponentials", recorded)
    launch_forward(*operands(RAGGED, torch.float32, {}), **{wanted: True})
    assert [reference is not None for reference in asked] == [wanted == "expected_log_prob"]


@pytest.mark.parametrize("wanted", ["expected_log_prob", "argmax", "logit_sum"])
def test_each_alone_is_what_it_is_with_the_others(wanted, poisoned_memory):
    args = operands(RAGGED, torch.float32, {"bias": True})
    entropy = wanted == "expected_log_prob"  # the entropy reads the target's logit from another place
    everything = launch_forward(*args, logit_sum=True, expected_log_prob=entropy, argmax=True)
    alone = launch_forward(*args, **{wanted: True})
    sizes = {"logit_sum": [2], "expected_log_prob": [3], "argmax": [4, 5]}[wanted]
    for i, (one, other) in enumerate(zip(alone[:8], everything[:8], strict=True)):
        if i < 2 or i in sizes:
            assert torch.equal(one, other), i
        else:
            assert one.shape == (0,), i


@pytest.mark.parametrize("cut", [0, 100, 131])
def test_a_shard_of_the_vocabulary_has_its_own_expectation_and_largest_logit(cut, poisoned_memory):
    *args, _, _ = operands(RAGGED, torch.float32, {})
    args[2] = torch.randint(0, 406, (RAGGED[0],))
    found, truth = forward_and_truth((*args, None, None), {}, vocab_start=cut, vocab_size=406)
    assert_rows(found, truth, torch.float32)
    assert torch.equal(found[5], truth[5])


def test_the_first_of_equal_logits_within_a_tile_and_across_tiles():
    weight = torch.randint(-2, 3, (200, 4)).float()
    hidden = torch.randint(-2, 3, (37, 4)).float()
    logits = hidden @ weight.T
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    target = torch.randint(200, (37,))
    assert torch.equal(launch_forward(hidden, weight, target, argmax=True)[5], first)
    found = launch_with_grad(
        hidden, weight, target, None, None, torch.ones(37), output_mask=[True, True, False], argmax=True
    )
    assert torch.equal(found[5], first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 3])
def test_entropy_of_nearly_sure_rows_is_no_worse_than_plain_torch(topk, dtype):
    """The target's logit is computed twice, in two orders. The difference is 1000 times such a row's entropy."""
    classes = torch.randn(509, 64) / 8
    sure = torch.randint(509, (48,))
    x, w = (40 * classes[sure] + 0.1 * torch.randn(48, 64)).to(dtype), classes.to(dtype)
    target = sure if topk == 1 else torch.stack([torch.randint(509, (48,)), sure, sure], 1)
    slope = torch.linspace(-1, 1, 48) * (4096 if dtype == torch.float16 else 1)

    def plain(x, w):
        log_p = F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return entropy.detach(), *torch.autograd.grad((entropy * slope).sum(), (x, w))

    exact = plain(*(leaf.double().requires_grad_() for leaf in (x, w)))
    theirs = plain(*(leaf.detach().clone().requires_grad_() for leaf in (x, w)))
    asked, mask = {"expected_log_prob": True}, {"output_mask": [True, True, False]}
    _, pair, _, expected, *_ = launch_forward(x, w, target, None, None, **asked)
    known = {"expected_log_prob": expected, "grad_expected_log_prob": -slope}
    found = (-expected, *launch_backward(None, None, None, x, w, target, None, None, pair, **mask, **known)[:2])
    unit = 2e-7 * 48**0.5 / exact[0].norm()  # for numbers near 1, the sums of exponentials
    for mine, plainly, truth in zip(found, theirs, exact, strict=True):
        assert error(mine, truth) <= 1.5 * error(plainly, truth) + unit


# with a loss above 40 nats, exp(z - z_target) exceeds float32, and the chunk's exponentials are computed again
def rescued_operands(case):
    N, D, V = RAGGED
    x, w, target, _, _ = operands(RAGGED, torch.float32, {})
    bias = None
    if case == "logits of hundreds":
        x, w = 5 * torch.randn(N, D), 5 * torch.randn(V, D)
    else:
        bias = torch.zeros(V)
        bias[::3] = float("-inf")
        bias[0] = float("-inf")  # class 0 is the stand-in for ignored tokens
        if case == "-inf bias":
            bias[target.clamp(min=0)] = 0.0
    return x, w, target, bias, None


CASES = ["logits of hundreds", "-inf bias", "target at a -inf bias"]


@pytest.mark.parametrize("case", CASES)
def test_rows_far_above_their_reference(case, poisoned_memory):
    args = rescued_operands(case)
    found, truth = forward_and_truth(args, {})
    if case == "logits of hundreds":
        assert ((truth[1].sum(1) - truth[0])[args[2] != -100] > 40).float().mean() > 0.5
    assert_rows(found, truth, torch.float32, large=case == CASES[0])
    assert torch.equal(found[5], truth[5])

    valid = args[2] != -100
    cotangents = [torch.randn(RAGGED[0]).masked_fill(~valid, torch.nan) for _ in range(3)]
    options = {"output_mask": [True, True, case != CASES[0]]}
    ours = {"grad_expected_log_prob": cotangents[2], "expected_log_prob": found[3]}
    exact = {"grad_expected_log_prob": cotangents[2].double(), "expected_log_prob": truth[3]}
    grads = launch_backward(*cotangents[:2], None, *args, found[1], **options, **ours)
    truths = aten.backward(*double(*cotangents[:2]), None, *double(*args), truth[1], **options, **exact)
    plain = aten.backward(
        *cotangents[:2], None, *args, truth[1].float(), **options, grad_expected_log_prob=cotangents[2],
        expected_log_prob=truth[3].float(),
    )  # fmt: skip
    for mine, theirs, right in zip(grads, plain, truths, strict=True):
        assert mine.isfinite().all()
        assert error(mine, right) <= 2 * error(theirs, right) + 1e-5
    for row in (~valid).nonzero():
        assert not grads[0][row].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, alone", [(RAGGED, True), (RAGGED, False), (EVEN, False)], ids=str)
@pytest.mark.parametrize("options", LOGITS[1:], ids=str)
def test_backward_of_the_expected_log_prob(shape, dtype, options, alone, poisoned_memory):
    args = operands(shape, dtype, options)
    logits = logit_options(options)
    _, pair, _, mean, *_ = aten.forward(*double(*args), expected_log_prob=True, **logits)
    cotangents = [torch.rand(shape[0]) + 0.1 for _ in range(4)]  # of one sign, so that nothing cancels in the sums
    if alone:
        cotangents[:3] = [None] * 3
    mask = [True, True, args[3] is not None]
    found = launch_backward(
        *cotangents[:3], *args, pair.float(), output_mask=mask, **logits,
        grad_expected_log_prob=cotangents[3], expected_log_prob=mean.float(),
    )  # fmt: skip
    truth = aten.backward(
        *double(*cotangents[:3]), *double(*args), pair, output_mask=mask, **logits,
        grad_expected_log_prob=cotangents[3].double(), expected_log_prob=mean,
    )  # fmt: skip
    for mine, right in zip(found, truth, strict=True):
        assert mine.shape == right.shape
        assert error(mine, right) <= 2 * TOLERANCE[dtype]  # p (1 + z - mean) has both signs


def test_backward_in_slices_of_rows_and_vocabulary(poisoned_memory):
    args = operands((150, 20, 300), torch.float32, {"bias": True})
    _, pair, _, mean, *_ = aten.forward(*double(*args), expected_log_prob=True)
    cotangents = [torch.rand(150) + 0.1 for _ in range(3)]
    mask = [True, True, True]
    with flce_ops.workspace(1):
        found = launch_backward(
            *cotangents[:2], None, *args, pair.float(), output_mask=mask,
            grad_expected_log_prob=cotangents[2], expected_log_prob=mean.float(),
        )  # fmt: skip
        assert flce_ops.last_path().chunks == 2
    truth = aten.backward(
        *double(*cotangents[:2]), None, *double(*args), pair, output_mask=mask,
        grad_expected_log_prob=cotangents[2].double(), expected_log_prob=mean,
    )  # fmt: skip
    for mine, right in zip(found, truth, strict=True):
        assert error(mine, right) <= 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "workspace, rows, options",
    [(512 << 20, 37, {}), (512 << 20, 37, {"softcap": 4.0, "z_loss": 1e-2}), (1, 150, {"label_smoothing": 0.1})],
    ids=["one pass", "one pass, softcap", "small workspace"],
)
def test_with_grad_gives_the_argmax_and_changes_nothing_else(workspace, rows, options, poisoned_memory):
    args = (*operands((rows, 20, 300), torch.float32, {}), torch.rand(rows) / rows)
    mask = [True, True, False]
    options = scalars(options)
    with flce_ops.workspace(workspace):
        plain = launch_with_grad(*args, output_mask=mask, **options)
        found = launch_with_grad(*args, output_mask=mask, argmax=True, **options)
    assert plain[5].shape == (0,)
    for one, other in zip(plain[:5], found[:5], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    logits = {name: options[name] for name in ("softcap",) if name in options}
    truth = aten.forward(*double(*args[:5]), argmax=True, **logits)
    assert torch.equal(found[5], truth[5])


@pytest.mark.parametrize("case", CASES)
def test_with_grad_gives_the_argmax_of_rescued_rows(case, poisoned_memory):
    args = rescued_operands(case)
    found = launch_with_grad(*args, torch.ones(RAGGED[0]), output_mask=[True, True, False], argmax=True)
    assert torch.equal(found[5], aten.forward(*double(*args), argmax=True)[5])


def test_nan_in_a_row_leaves_a_class_of_the_vocabulary_and_the_other_rows_alone():
    made = make_inputs(RAGGED, requires_grad=False)
    made.target[3] = 5  # an ignored token would have no class
    right = launch_forward(*made.args, argmax=True, expected_log_prob=True)
    made.input[3] = torch.nan
    found = launch_forward(*made.args, argmax=True, expected_log_prob=True)
    others = torch.arange(RAGGED[0]) != 3
    assert 0 <= found[5][3] < RAGGED[2]
    assert torch.equal(found[5][others], right[5][others])
    torch.testing.assert_close(found[3][others], right[3][others])
