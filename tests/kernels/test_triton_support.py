"""The Triton kernels of a support, on the CPU through Triton's interpreter, and compiled for an absent GPU."""

# N tokens, K ids of each, E ids of all, D hidden, V vocabulary

import pytest
import torch
from flce_ops.math.support import PaddedIds
from fresh_process import run_script
from inputs import scalars
from reference_loss import error
from reference_support import draw

from flce_ops.aten import support as in_aten
from flce_ops.triton.sparse import gather_sums
from flce_ops.triton.sparse import support as in_triton

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine")
ASKED = dict.fromkeys(("expected_log_prob", "argmax", "log_sum_sq_probs", "mean_logit"), True)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
CASES = [
    (torch.float32, False, {}),
    (torch.float16, True, {"softcap": 4.0, "logit_scale": 0.7}),
    (torch.float32, True, {"softcap": 1e6}),  # leaves the digits of the logits
]
SHAPES = [((11, 37, 31), 5), ((3, 1100, 90), 70), ((60, 8, 3), 3)]  # several blocks of D and of ids; split lists


def prepared(shape, width, dtype, bias, shard=None):
    inputs, ids = draw(shape, width, dtype=dtype, bias=bias, requires_grad=False)
    return inputs, PaddedIds(ids).support(inputs.target != -100, shape[2], shard or slice(0, shape[2]))


def places_of(support):
    return torch.cat([torch.arange(begin, end) for begin, end in zip(support.begins, support.ends)])


def off(ours, exact):
    """The error relative to the numbers, or to 1, the size of the products that may add up to nearly 0."""
    size = float(exact.double().norm())
    return error(ours, exact) * (min(size, 1.0) if size else 1.0)


def double(*tensors):
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape, width", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, bias, options", CASES, ids=str)
def test_rows_and_gradients_are_those_of_aten_in_float64(
    dtype, bias, options, shape, width, poisoned_memory, monkeypatch
):
    monkeypatch.setattr(gather_sums, "SPLIT", 16)
    inputs, support = prepared(shape, width, dtype, bias)
    entries = places_of(support)
    options = scalars(options)
    single = {name: value.float() for name, value in options.items()}
    found = in_triton.launch_forward(*inputs.args, *support, **ASKED, **single)
    truth = in_aten.forward(*double(*inputs.args), *support, **ASKED, **options)
    for number, (ours, exact) in enumerate(zip(found, truth, strict=True)):
        if number == 8:
            ours, exact = ours[entries], exact[entries]
        if number == 4:
            assert torch.equal(ours, exact)
        elif number != 7:  # what the rounding of lse took
            assert off(ours, exact) <= TOLERANCE[dtype], number
    cotangents = [torch.randn(shape[0]) for _ in range(3)]
    every = {"output_mask": [True, True, bias]}

    def gradients(backward, results, args, cotangents, options):
        target_logit, lse, entropy = cotangents
        others = {"grad_expected_log_prob": entropy, "expected_log_prob": results[2], "lse_rest": results[7]}
        return backward(target_logit, lse, None, *args, *support, results[8], results[1], **every, **others, **options)

    ours = gradients(in_triton.launch_backward, found, inputs.args, cotangents, single)
    exact = gradients(in_aten.backward, truth, double(*inputs.args), double(*cotangents), options)
    for mine, right in zip(ours, exact):
        assert mine.shape == right.shape
        if mine.numel():
            assert error(mine, right) <= TOLERANCE[dtype]


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("blocks", [1, 2, 7, 29])
def test_lists_of_classes_are_sorted_by_class_and_token(blocks, poisoned_memory, monkeypatch):
    """Whatever the number of blocks of tokens is."""
    monkeypatch.setattr(in_triton, "TABLE_BYTES", 4 * 13 * blocks)
    inputs, support = prepared((29, 4, 13), 9, torch.float16, True)
    lists = []

    def listed(found, *others, **options):
        lists.append((found.entries.clone(), found.lengths))

    monkeypatch.setattr(in_triton, "launch_gather_lists", listed)
    found = in_triton.launch_forward(*inputs.args, *support)
    cotangent = torch.randn(29)
    in_triton.launch_backward(
        cotangent, cotangent, None, *inputs.args, *support, found[8], found[1], output_mask=[True, True, False]
    )
    (of_tokens, tokens), (of_classes, classes) = lists
    place, token = places_of(support), torch.repeat_interleave(torch.arange(29), support.ends - support.begins)
    assert torch.equal(tokens, support.ends - support.begins)
    of_tokens, of_classes = of_tokens[place], of_classes[: len(place)]
    assert torch.equal(of_tokens & 0xFFFFFFFF, support.classes[place].long())
    column, order = support.classes[place].sort(stable=True)
    assert torch.equal(of_classes & 0xFFFFFFFF, token[order])
    assert torch.equal(of_classes >> 32, (of_tokens >> 32)[order])
    assert torch.equal(classes.long(), column.long().bincount(minlength=13))


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("names", [("logit_scale",), ("logit_scale", "softcap")], ids=str)
def test_numbers_of_tokens_have_the_bits_of_one_number(names):
    inputs, support = prepared((11, 37, 31), 5, torch.float16, True)
    first = torch.arange(11) % 3 == 0
    one, other = ({name: torch.tensor(4.0 / temperature) for name in names} for temperature in (0.5, 1.3))
    of_tokens = {name: torch.where(first, one[name], other[name]) for name in names}
    strided = {name: numbers.repeat_interleave(2)[::2] for name, numbers in of_tokens.items()}
    grad = torch.randn(11)

    def rows(options):
        found = in_triton.launch_forward(*inputs.args, *support, **ASKED, **options)
        gradients = in_triton.launch_backward(
            grad, grad, None, *inputs.args, *support, found[8], found[1], **options, output_mask=[True, False, False]
        )
        return *found[:8], gradients[0].float().unbind(1)[0]

    for ours, *alone in zip(rows(strided), rows(one), rows(other), strict=True):
        assert torch.equal(ours, torch.where(first, *alone))


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("classes", [slice(0, 0 + 13), slice(13, 31), slice(30, 31)], ids=str)
def test_a_shard_has_its_own_classes(classes):
    inputs, support = prepared((11, 37, 31), 5, torch.float32, True, classes)
    input, linear_weight, target, linear_bias = inputs.args
    args = (input, linear_weight[classes], target, linear_bias[classes])
    options = {"vocab_start": classes.start, "vocab_size": 31, **ASKED}
    found = in_triton.launch_forward(*args, *support, **options)
    truth = in_aten.forward(*double(*args), *support, **options)
    for number, (ours, exact) in enumerate(zip(found[:7], truth[:7])):
        here = truth[1].isfinite() if number in (2, 5) else torch.ones_like(exact, dtype=torch.bool)
        ours, exact = ours[here].double(), exact[here].double()
        assert torch.equal(ours.isinf(), exact.isinf()), number
        assert off(ours.nan_to_num(neginf=0.0), exact.nan_to_num(neginf=0.0)) < 3e-6, number


@interpreter
@pytest.mark.parametrize("hidden, block", [(37, 64), (1024, 1024), (3000, 1024)])
def test_a_program_takes_at_most_1024_features_at_a_time(hidden, block, monkeypatch):
    """It holds them of several classes at once."""
    launched, kernel = [], in_triton.support_products_kernel

    class Launcher:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(options["BLOCK_D"]) or kernel[grid](*args, **options)

    monkeypatch.setattr(in_triton, "support_products_kernel", Launcher())
    inputs, support = prepared((2, hidden, 7), 3, torch.float32, False)
    in_triton.launch_forward(*inputs.args, *support)
    assert launched == [block]


@interpreter
def test_strides_do_not_matter():
    inputs, support = prepared((11, 37, 31), 5, torch.float16, True)
    input, linear_weight, target, linear_bias = inputs.args
    apart = (
        torch.stack([input, input], 1)[:, 1],
        linear_weight.T.contiguous().T,
        target.repeat_interleave(2)[::2],
        linear_bias.repeat_interleave(2)[::2],
    )
    for ours, usual in zip(
        in_triton.launch_forward(*apart, *support)[:2], in_triton.launch_forward(*inputs.args, *support)
    ):
        assert torch.equal(ours, usual)


COMPILED = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import torch
import flce_ops

ids = torch.empty(512, 80, dtype=torch.int64, device="meta")
options = {"softcap": 30.0, "temperature": 0.7, "entropy": True, "argmax": True, "return_metrics": ["mean_logit"]}
head = {"function": flce_ops.linear_log_probs, "arch": 90, "support": ids}
assert flce_ops.warmup(512, 1000, bias=True, **options, **head) > 10
options["temperature"] = torch.empty(512, device="meta")
assert flce_ops.warmup(512, 1000, bias=True, **options, **head) > 1
"""


def test_kernels_compile_for_a_gpu():
    done = run_script(COMPILED)
    assert done.returncode == 0, done.stderr
