"""The Triton kernels of linear_kl_div, on the CPU through Triton's interpreter, against ATen in float64."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import pytest
import torch
from inputs import scalars
from reference_divergence import KINDS, make_pair
from reference_loss import error
from test_kl_div_operator import inner_args
from test_triton_interpreter import double

import flce_ops
from flce_ops.aten import kl_div as aten
from flce_ops.triton import kl_div as triton_kl_div

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on log2(0) and exp2 of large numbers
]

SHAPE = (37, 35, 24, 131)  # N, D, E, V: two tiles of rows, three of classes, none of them full
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}


def arguments(dtype, kind, more=None, *, shape=SHAPE, **pair):
    made = make_pair(shape, dtype=dtype, requires_grad=False, **pair)
    options = {"kind": kind, "beta": 0.3, "logit_scale": 0.7, "teacher_logit_scale": 1.2, **(more or {})}
    return inner_args(made), scalars(options, "cpu")


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


CAPS = {"softcap": 3.0, "teacher_softcap": 4.0}


@pytest.mark.parametrize("kind", KINDS)
def test_softcaps(kind, poisoned_memory):
    dtype = torch.float16
    args, options = arguments(dtype, kind, CAPS, bias=True)
    row_scale = torch.rand(SHAPE[0])
    options["output_mask"] = [True, True, False]
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    assert_close(found, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("nbytes, kind, cut", [(1, "reverse", (3, 128)), (250_000, "jsd", (2, 256))])
def test_chunks_and_their_parts(nbytes, kind, cut, poisoned_memory):
    """Of a workspace for no row, and for G of 256 rows beside the teacher's logits of 128."""
    shape = (300, 40, 24, 131)
    args, options = arguments(torch.float32, kind, shape=shape, ignored=0.4)
    row_scale = torch.rand(shape[0])
    options["output_mask"] = [True, True, True]
    with flce_ops.workspace(nbytes):
        found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
        assert (flce_ops.last_path().chunks, flce_ops.last_path().rows_per_chunk) == cut
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    assert_close(found, exact, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_hundreds_and_classes_switched_off(kind, poisoned_memory):
    args, options = arguments(torch.float32, kind, bias=True)
    args = [20 * arg if arg is not None and arg.dim() == 2 else arg for arg in args]
    for bias in (args[2], args[5]):
        bias[::3] = -torch.inf
        bias[64:128] = -torch.inf  # a tile
    options["output_mask"] = [True, True, False]
    row_scale = torch.rand(SHAPE[0])
    call = (*args, row_scale), options
    found, plain = triton_kl_div.launch_kl_div_with_grad(*call[0], **options), aten.with_grad(*call[0], **options)
    exact = aten.with_grad(*double(*call[0]), **options)
    for mine, theirs, right in zip(found, plain, exact, strict=True):
        assert mine.isfinite().all()
        if right.numel():
            assert error(mine, right) <= 2 * error(theirs, right) + 1e-6
