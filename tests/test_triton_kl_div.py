"""The Triton kernels of linear_kl_div, on the CPU through Triton's interpreter, against ATen in float64."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import pytest
import torch
from inputs import scalars
from reference_divergence import KINDS, make_pair
from reference_loss import error
from test_kl_div_operator import inner_args
from test_triton_interpreter import double


from flce_ops.aten import kl_div as aten
from flce_ops.triton import kl_div as triton_kl_div

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on log2(0) and exp2 of large numbers
]

SHAPE = (37, 35, 24, 131)  # N, D, E, V: two tiles of rows, three of classes, none of them full
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}


def arguments(dtype, kind, *, shape=SHAPE, **pair):
    made = make_pair(shape, dtype=dtype, requires_grad=False, **pair)
    options = {"kind": kind, "beta": 0.3 if kind == "jsd" else None, "logit_scale": 0.7, "teacher_logit_scale": 1.2}
    return inner_args(made), scalars({name: value for name, value in options.items() if value is not None}, "cpu")


def assert_close(found, exact, tolerance):
    for index, (mine, right) in enumerate(zip(found, exact, strict=True)):
        assert mine.shape == right.shape
        if right.numel():
            assert error(mine, right) <= tolerance, index


def shift_sums(results):
    """divergence, the two lse, student_kl: what is taken for a row's maximum is each path's own."""
    divergence, shift, teacher_shift, student_kl = results
    return divergence, shift.double().sum(0), teacher_shift.double().sum(0), student_kl


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind, probs, dtype, poisoned_memory):
    args, options = arguments(dtype, kind, probs=probs, bias=True)
    row_scale = torch.rand(SHAPE[0])
    options["output_mask"] = [True, True, True]
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    assert [result.dtype for result in found] == [torch.float32] * 2 + [dtype] * 3
    assert_close(found, exact, TOLERANCE[dtype])
    for row in (~args[-1]).nonzero():
        assert not found[1][row] and not found[2][row].any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("probs", [False, True], ids=["pair", "probs"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kind, probs, dtype, poisoned_memory):
    args, options = arguments(dtype, kind, probs=probs)
    found = triton_kl_div.launch_kl_div_forward(*args, **options)
    exact = aten.forward(*double(*args), **options)
    assert_close(shift_sums(found), shift_sums(exact), TOLERANCE[dtype])
    grad = torch.randn(SHAPE[0]).masked_fill(~args[-1], torch.nan)
    options["output_mask"] = [True, True, False]
    gradients = triton_kl_div.launch_kl_div_backward(grad, *args, *found[1:], **options)
    truth = aten.backward(grad.double(), *double(*args), *exact[1:], **options)
    assert_close(gradients, truth, TOLERANCE[dtype])
