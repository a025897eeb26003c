"""The Triton kernels of linear_kl_div, on the CPU through Triton's interpreter, against ATen in float64."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from inputs import scalars
from marks import IN_INTERPRETER
from reference_divergence import KINDS, KINKED, make_pair
from reference_loss import dense_logits, error
from test_gradient_gemms import h200  # noqa: F401  a fixture
from test_kl_div_operator import inner_args
from test_triton_interpreter import double

import flce_ops
from flce_ops.aten import kl_div as aten
from flce_ops.math.options import KlDivOperands
from flce_ops.meta.arguments import KlDivWithGrad
from flce_ops.triton.logits import kl_div as triton_kl_div
from flce_ops.triton.logits.divergence_rows import RowResults
from flce_ops.triton.logits.stored import from_stored, to_stored
from flce_ops.triton.rows.valid_tokens import ValidTokens
from flce_ops.triton.steps import gradients
from flce_ops.triton.steps.chunks import padded

pytestmark = IN_INTERPRETER

SHAPE = (37, 35, 24, 131)  # two tiles of rows and three of classes, none of them full
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3}
ROUNDED = {torch.float32: 1e-5, torch.float16: 1e-2}  # the error of log q - log p
# for a divergence with a kink: the share of a gradient's entries that rounding may put on the other side of p = q
FLIPPED = 0.05
CASES = [(torch.float32, False), (torch.float32, True), (torch.float16, False)]


def arguments(dtype, kind, more=None, *, shape=SHAPE, **pair):
    made = make_pair(shape, dtype=dtype, requires_grad=False, **pair)
    options = {"kind": kind, "beta": 0.3, "logit_scale": 0.7, "teacher_logit_scale": 1.2, **(more or {})}
    return inner_args(made), scalars(options, "cpu")


def assert_close(found, exact, tolerance):
    for index, (mine, right) in enumerate(zip(found, exact, strict=True)):
        assert mine.shape == right.shape
        if right.numel():
            assert error(mine, right) <= tolerance, index


def off_the_kink(args, options, dtype):
    """1 for rows of which rounding puts no entry on the other side of p = q, otherwise 0; always 1 without a kink."""
    if options["kind"] not in KINKED:
        return torch.ones(SHAPE[0])
    input, weight, bias, teacher_input, teacher_weight, teacher_bias, probs, _ = double(*args)

    def log_probs(input, weight, bias, prefix):
        scale, cap = options[prefix + "logit_scale"], options.get(prefix + "softcap")
        return dense_logits(input, weight, bias, softcap=cap, logit_scale=scale).log_softmax(-1)

    log_p = probs.log() if probs is not None else log_probs(teacher_input, teacher_weight, teacher_bias, "teacher_")
    distance = (log_probs(input, weight, bias, "") - log_p).abs().amin(-1)
    return (distance > ROUNDED[dtype]).float()


def with_sums(results, smooth):
    """divergence, both lse, student_kl. An lse has two parts; each path divides it differently, so only their sums are
    equal. student_kl, which "forward" does not have, jumps at the kinks.
    """
    divergence, pair, teacher_pair, student_kl = results
    return divergence, pair.double().sum(1), teacher_pair.double().sum(-1), student_kl * smooth[: len(student_kl)]


@pytest.mark.parametrize("dtype, probs", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind, probs, dtype, poisoned_memory):
    args, options = arguments(dtype, kind, probs=probs, bias=True)
    row_scale = torch.rand(SHAPE[0]) * off_the_kink(args, options, dtype)
    options["output_mask"] = [True, True, True]
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    assert [result.dtype for result in found] == [torch.float32] * 2 + [dtype] * 3 + [torch.float32]
    assert_close(found, exact, TOLERANCE[dtype])
    for row in (~args[-1]).nonzero():
        assert not found[1][row] and not found[2][row].any()


def of_forward(kind, found):
    return {"divergence": found[0]} if kind == "nla" else {}


@pytest.mark.parametrize("dtype, probs", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kind, probs, dtype, poisoned_memory):
    args, options = arguments(dtype, kind, probs=probs)
    found = triton_kl_div.launch_kl_div_forward(*args, **options)
    exact = aten.forward(*double(*args), **options)
    smooth = off_the_kink(args, options, dtype)
    assert_close(with_sums(found, smooth), with_sums(exact, smooth), TOLERANCE[dtype])
    grad = (torch.randn(SHAPE[0]) * smooth).masked_fill(~args[-1], torch.nan)
    options["output_mask"] = [True, True, False]
    gradients = triton_kl_div.launch_kl_div_backward(grad, *args, *found[1:], **options, **of_forward(kind, found))
    truth = aten.backward(grad.double(), *double(*args), *exact[1:], **options, **of_forward(kind, exact))
    assert_close(gradients, truth, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_sure_tokens_are_those_that_are_made_in_forward(kind, dtype, poisoned_memory):
    """Both models are sure of one class, so p and q are often equal. At a kink that decides G: by 1/2 of a token."""
    w, x, bias = torch.randn(40, 16).to(dtype), (8.0 * torch.randn(32, 16)).to(dtype), torch.zeros(40, dtype=dtype)
    teacher = (x * (1.0 + 0.02 * torch.randn(32, 16))).to(dtype)
    _, options = arguments(dtype, kind)
    args, row_scale = (x, w, bias, teacher, w, None, None, torch.ones(32, dtype=torch.bool)), torch.rand(32)
    rows = triton_kl_div.launch_kl_div_forward(*args, **options)
    options["output_mask"] = [True, True, True]
    once = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)[2:5]
    twice = triton_kl_div.launch_kl_div_backward(row_scale, *args, *rows[1:], **options, **of_forward(kind, rows))[:3]
    for one, other in zip(once, twice, strict=True):
        assert (one - other).abs().max() <= (1e-6 if dtype == torch.float32 else 2e-3) * (1.0 + one.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_either_model_shows_in_its_row_alone(kind, poisoned_memory):
    args, options = arguments(torch.float32, kind)
    valid = args[-1].nonzero()[:, 0].tolist()
    for model, row in ((0, valid[0]), (3, valid[1])):
        args[model][row] = torch.nan
    options["output_mask"] = [True, False, False]
    for result in launch_forward_and_gradient(args, options):
        rows = result.isnan().view(SHAPE[0], -1).any(1)
        assert rows.nonzero()[:, 0].tolist() == valid[:2], kind


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_after_the_valid_ones_have_a_gradient_of_0(kind, dtype, probs, monkeypatch, poisoned_memory):
    """The weight's GEMM reads them on a GPU, where tiles are loaded whole. V is a multiple of 16: no columns are
    masked.
    """
    seen, multiply = [], gradients.GradientGemms.multiply

    def look(gemms, gradient, chunk, valid_tokens, rows, numbers):
        seen.append(gradient.matrix[int(valid_tokens.total) :].clone())
        multiply(gemms, gradient, chunk, valid_tokens, rows, numbers)

    monkeypatch.setattr(gradients.GradientGemms, "multiply", look)
    args, options = arguments(dtype, kind, shape=(37, 35, 24, 48), probs=probs, ignored=0.5)
    options["output_mask"] = [True, True, False]
    triton_kl_div.launch_kl_div_with_grad(*args, torch.ones(37), **options)
    (behind,) = seen
    assert behind.shape[0] > 5 and not behind.any()


def launch_forward_and_gradient(args, options):
    _, divergence, grad_input, *_ = triton_kl_div.launch_kl_div_with_grad(*args, torch.ones(SHAPE[0]), **options)
    return divergence, grad_input


@pytest.mark.parametrize("kind", KINKED)
def test_no_gradient_where_the_student_is_below_the_teacher_everywhere(kind, poisoned_memory):
    """Given probabilities of 1 in each class: d is 1 in all of them, and K - d is a rounding error."""
    args, options = arguments(torch.float32, kind, probs=True)
    args[6].fill_(1.0)
    options["output_mask"] = [True, True, False]
    found = triton_kl_div.launch_kl_div_with_grad(*args, torch.ones(SHAPE[0]), **options)
    assert found[2].abs().max() <= 1e-6 and found[3].abs().max() <= 1e-5


CAPS = {"softcap": 3.0, "teacher_softcap": 4.0}


@pytest.mark.parametrize("kind", KINDS)
def test_softcaps(kind, poisoned_memory):
    dtype = torch.float16
    args, options = arguments(dtype, kind, CAPS, bias=True)
    row_scale = torch.rand(SHAPE[0]) * off_the_kink(args, options, dtype)
    options["output_mask"] = [True, True, False]
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    assert_close(found, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("softcap", [1e4, 1e8])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_large_softcap_leaves_the_digits_of_the_logits(kind, softcap, poisoned_memory):
    args, options = arguments(torch.float32, kind, {"softcap": softcap, "teacher_softcap": softcap}, bias=True)
    options["output_mask"] = [True, True, True]
    row_scale = torch.rand(SHAPE[0])
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    assert_close(found, aten.with_grad(*double(*args), row_scale.double(), **options), TOLERANCE[torch.float32])


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd", "tv"])
def test_the_softmax_of_stored_logits_adds_up_to_1(kind, softcap, poisoned_memory):
    """So the rounding of near distributions' largest logits cancels; it was up to a third of the divergence."""
    args, options = arguments(torch.float16, kind, {"softcap": softcap, "logit_scale": 1.0}, probs=True)
    args = list(args)
    args[1][:35] = (2.0 * torch.eye(35)).half()  # a class for each feature
    args[0][:] = torch.randn(SHAPE[0], 35).half()
    args[0][torch.arange(SHAPE[0]), torch.arange(SHAPE[0]) % 35] += 6.0  # one of 12 to 20 nats, before the cap
    z = 1.02 * double(*args)[0] @ double(*args)[1].T
    args[6] = (z if softcap is None else softcap * torch.tanh(z / softcap)).softmax(-1).half()
    found = triton_kl_div.launch_kl_div_forward(*args, **options)[0]
    plain = aten.forward(*args, **options)[0]  # on a CPU half products are rounded, as in dense torch
    exact = aten.forward(*double(*args), **options)[0]
    usual = error(plain, exact)
    # a third of plain torch's error, which luck may make smaller: 1.3e-3 was seen
    bound = max(0.3 * usual, 1.5e-3)
    assert args[-1].any() and error(found, exact) <= bound


def test_features_that_tensor_maps_cannot_address_are_filled_up(monkeypatch, poisoned_memory):
    """In forward, too: backward then makes the same logits as forward."""
    monkeypatch.setattr("flce_ops.triton.rows.copy_rows.on_tma_device", lambda tensor: True)
    args, options = arguments(torch.float16, "reverse")
    assert args[0].shape[1] % 16
    found = triton_kl_div.launch_kl_div_forward(*args, **options)
    assert "features of zeros added" in flce_ops.last_path().reason
    assert_close(found, aten.forward(*double(*args), **options), TOLERANCE[torch.float16])


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, None), (torch.float32, 3.0), (torch.float16, None)])
def test_class_probabilities_and_weights_of_either_sign(dtype, softcap, poisoned_memory):
    args, options = arguments(dtype, "cross_entropy", {"softcap": softcap}, probs=True, bias=True)
    args[6][:, ::3] = 0.0
    args[6][:, 1::5] *= -0.7
    options["output_mask"] = [True, True, True]
    row_scale = torch.rand(SHAPE[0])
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    assert_close(found, aten.with_grad(*double(*args), row_scale.double(), **options), 2 * TOLERANCE[dtype])
    del options["output_mask"]
    forward = triton_kl_div.launch_kl_div_forward(*args, **options)
    assert_close(forward[:1], aten.forward(*double(*args), **options)[:1], 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "nbytes, tokens, kind, cut",
    [
        (1, 300, "reverse", (3, 128, 128)),  # for no row
        (300_000, 300, "jsd", (2, 256, 128)),  # for G of 256 rows together with the teacher's logits of 128
        (500_000, 600, "forward", (2, 384, 256)),  # the largest part is not a chunk's first one
    ],
)
def test_chunks_and_their_parts(nbytes, tokens, kind, cut, monkeypatch, poisoned_memory):
    shape, parts, run_part = (tokens, 40, 24, 131), [], triton_kl_div.KlDivStep.run_part

    def look(step, valid_tokens, tokens, logits):
        parts.append(tokens.shape[0])
        run_part(step, valid_tokens, tokens, logits)

    monkeypatch.setattr(triton_kl_div.KlDivStep, "run_part", look)
    args, options = arguments(torch.float32, kind, shape=shape, ignored=0.4)
    row_scale = torch.rand(shape[0])
    options["output_mask"] = [True, True, True]
    with flce_ops.workspace(nbytes):
        found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
        assert (flce_ops.last_path().chunks, flce_ops.last_path().rows_per_chunk, max(parts)) == cut
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    assert_close(found, exact, TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [100, 128, 1280, 1408, 4000])
def test_parts_fit_the_memory_of_both_models(rows):
    for room in (rows + 128, rows + 640, 2 * rows):
        parts = triton_kl_div.parts_of(rows, room)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == rows
        assert all(part.start % 128 == 0 and 2 * part.stop - part.start <= room for part in parts)
    assert [part.stop for part in triton_kl_div.parts_of(1408, 2048)] == [768, 1408]


@pytest.mark.parametrize("workspace", [64 << 20, 512 << 20, None])
@pytest.mark.parametrize("tokens, hidden, teacher, vocab", [(8192, 2048, 4096, 128256), (700, 896, 896, 50257)])
@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.usefixtures("h200")
def test_stored_logits_fit_the_workspace(probs, tokens, hidden, teacher, vocab, workspace, monkeypatch):
    """Both models' logits, or 512 rows of logits where the workspace is smaller; without a workspace, 2048."""

    def made(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    monkeypatch.setattr("flce_ops.support.workspace.LEAST_ROWS", 512)
    of_teacher = (None, None, None, made(tokens, vocab))
    if not probs:
        of_teacher = (made(tokens, teacher), made(vocab, teacher), None, None)
    operands = KlDivOperands(made(tokens, hidden), made(vocab, hidden), None, *of_teacher, None)
    call = KlDivWithGrad.bind(*operands, made(tokens), output_mask=[True, True, False])
    wanted = gradients.Gradients(made(tokens, hidden), made(vocab, hidden), None)
    with nullcontext() if workspace is None else flce_ops.workspace(workspace):
        step = triton_kl_div.KlDivStep(call, ValidTokens(made(tokens), made(), 0), wanted, RowResults())
    chunks = step.chunking.chunks
    assert chunks[0].start == 0 and chunks[-1].stop == tokens
    longest = max(chunk.stop - chunk.start for chunk in chunks)
    rows, row_bytes = step.logits.shape[0], 2 * padded(vocab, 2)
    assert rows == longest if probs else longest < rows <= 2 * longest
    room = max(workspace or 512 << 20, (2048 if workspace is None else 512) * row_bytes)
    assert rows * row_bytes <= room and (len(chunks) == 1 or rows * row_bytes >= 0.5 * room)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [50, 90, 120, 400, 1000])
def test_an_acceptance_rate_that_underflows(size, dtype, poisoned_memory):
    """Models that are sure of different classes: only the logarithm of "nla"'s rate is a number of float32."""
    (x, w, bias, teacher, teacher_w, *others), options = arguments(dtype, "nla", bias=True)
    x, teacher = x * 0.1, teacher * 0.1
    x[:, 0], teacher[:, 0], w[:, 0], teacher_w[:, 0] = 1.0, 1.0, 0.0, 0.0
    w[3, 0], teacher_w[77, 0] = size / 0.7, size / 1.2
    args = (x, w, bias, teacher, teacher_w, *others)
    options["output_mask"] = [True, True, True]
    row_scale = torch.rand(SHAPE[0])
    found = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    exact = aten.with_grad(*double(*args), row_scale.double(), **options)
    of_rows = {name: option for name, option in options.items() if name != "output_mask"}
    rows = triton_kl_div.launch_kl_div_forward(*args, **of_rows)
    again = triton_kl_div.launch_kl_div_backward(row_scale, *args, *rows[1:], **options, divergence=rows[0])
    assert exact[1].max() > 0.8 * size
    # e^loss has the loss's absolute error; in 16 bits a stored logit has one of 2^-12 of its size
    tolerance = 10 * TOLERANCE[dtype] + 2.0**-22 * size if dtype == torch.float32 else 0.1
    assert error(found[1], exact[1]) <= TOLERANCE[dtype]
    for one, other, right in zip(found[2:5], again[:3], exact[2:5], strict=True):
        assert error(one, right) <= tolerance and error(other, right) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_hundreds_and_classes_switched_off(kind, poisoned_memory):
    args, options = arguments(torch.float32, kind, bias=True)
    args = [20 * arg if arg is not None and arg.dim() == 2 else arg for arg in args]
    for bias in (args[2], args[5]):
        bias[::3] = -torch.inf
        bias[64:128] = -torch.inf  # a whole tile
    options["output_mask"] = [True, True, False]
    row_scale = torch.rand(SHAPE[0])
    call = (*args, row_scale), options
    found, plain = triton_kl_div.launch_kl_div_with_grad(*call[0], **options), aten.with_grad(*call[0], **options)
    exact = aten.with_grad(*double(*call[0]), **options)
    # A saturated "jsd" has gradients of 1e-13; an entry of G is accurate to the rounding of the row's scale.
    rows = {2: args[1], 3: args[0]}  # the rows that G is multiplied by
    rounding = 2.0**-24 * (args[0] @ args[1].T).abs().max()  # of the largest logit: probabilities are off by as much
    for k, (mine, theirs, right) in enumerate(zip(found, plain, exact, strict=True)):
        assert mine.isfinite().all()
        if right.numel():
            size = right.norm()
            if k in rows:
                size = torch.maximum(size, row_scale.norm() * rows[k].square().sum(1).mean().sqrt())
            assert (mine - right).norm() <= 4 * (theirs - right).norm() + rounding * size


@pytest.mark.parametrize("kind", KINDS)
def test_classes_that_given_probabilities_and_the_student_leave_out(kind, poisoned_memory):
    """For one token the student's probability is not 0, so "reverse" is inf there and has no gradient."""
    args, options = arguments(torch.float32, kind, probs=True, bias=True, target=False)
    args[2][::3] = -torch.inf
    args[6][:, ::3] = 0.0
    args[6][4, 1] = 0.0
    options["output_mask"] = [True, False, False]
    row_scale = torch.rand(SHAPE[0])
    _, divergence, grad_input, *_ = triton_kl_div.launch_kl_div_with_grad(*args, row_scale, **options)
    _, right, right_grad, *_ = aten.with_grad(*double(*args), row_scale.double(), **options)
    others = torch.arange(SHAPE[0]) != 4
    if kind == "reverse":
        assert divergence[4] == right[4] == torch.inf and grad_input[4].isnan().all() and right_grad[4].isnan().all()
    else:
        others[4] = True
    assert right[others].isfinite().all() and right_grad[others].isfinite().all()
    assert_close((divergence[others], grad_input[others]), (right[others], right_grad[others]), 3e-6)


def test_16_bits_hold_every_logit_below_its_maximum():
    u = torch.cat([-torch.logspace(-6, 4, 500), torch.tensor([0.0, -1.0, -16.9999, -17.0, -17.1, -torch.inf])])
    code = torch.empty(u.shape, dtype=torch.int16)
    found = torch.empty_like(u)
    round_trip_kernel[(1,)](u, code, found, u.numel(), BLOCK=1024)
    assert (found - u)[u > -17].abs().max() <= 1.01 * 2.0**-12
    as_half = (u > -1) | (u <= -17)
    assert torch.equal(found[as_half], u[as_half].half().float())
    assert ((found - u)[u > -65504].abs() <= 2.0**-11 * u[u > -65504].abs() + 2.0**-25).all()


def test_every_stored_number_keeps_its_value():
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
    u = torch.where(numbers >= 0, numbers.float() / -2048 - 1, numbers.view(torch.float16).float())
    code, found = torch.empty_like(numbers), torch.empty_like(u)
    round_trip_kernel[(1,)](u, code, found, u.numel(), BLOCK=2**16)
    torch.testing.assert_close(found, u, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(code[numbers >= 0], numbers[numbers >= 0])


@triton.jit
def round_trip_kernel(u_ptr, code_ptr, found_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(code_ptr + i, to_stored(tl.load(u_ptr + i, mask=i < n, other=0.0), tl.int16), mask=i < n)
    tl.store(found_ptr + i, from_stored(tl.load(code_ptr + i, mask=i < n, other=0)), mask=i < n)


@pytest.mark.parametrize("kind", KINDS)
def test_flat_float16_logits_are_no_worse_than_dense_torch(kind):
    """The logits are those of an untrained model: float16 rounds them little, and a tile's maximum is far away."""
    args, options = arguments(torch.float16, kind, shape=(60, 64, 64, 640))
    args = [None if arg is None else torch.randn(arg.shape).half() if arg.dim() == 2 else arg for arg in args]
    for weight in (args[1], args[4]):
        weight *= 0.3 / 8
    options["output_mask"] = [True, True, False]
    grad = torch.randn(60)
    call = (*args, grad)
    found = triton_kl_div.launch_kl_div_with_grad(*call, **options)[2:4]
    plain = aten.with_grad(*call, **options)[2:4]  # on a CPU half products are rounded, as in dense torch
    exact = aten.with_grad(*double(*call), **options)[2:4]
    for mine, theirs, right in zip(found, plain, exact, strict=True):
        assert error(mine, right) <= 1.3 * error(theirs, right) + FLIPPED * (kind in KINKED)


@pytest.mark.parametrize("kind, apart", [("forward", False), ("reverse", False), ("jsd", False), ("jsd", True)])
def test_models_that_agree_or_share_no_class_leave_no_gradient(kind, apart, poisoned_memory):
    """log q - log p, or log q - log m, is the same for all classes that count. The stored q add up to 1 only within
    1e-4.
    """
    made = make_pair((19, 24, 24, 300), dtype=torch.float16, requires_grad=False, bias=True)
    made |= {"teacher_input": made["input"], "teacher_weight": made["linear_weight"]}
    made["linear_bias"] = made["teacher_bias"] = torch.zeros(300, dtype=torch.float16)
    if apart:
        switched_off = torch.arange(300) % 2 == 0
        made["linear_bias"] = made["linear_bias"].masked_fill(switched_off, -torch.inf)
        made["teacher_bias"] = made["teacher_bias"].masked_fill(~switched_off, -torch.inf)
    options = scalars({"kind": kind, "beta": 0.3}, "cpu") | {"output_mask": [True, False, False]}
    row_scale = torch.full((19,), 4096.0)  # keeps G above float16's smallest numbers
    call = (*inner_args(made), row_scale)
    _, divergence, grad_input, *_ = triton_kl_div.launch_kl_div_with_grad(*call, **options)
    _, exact, *_ = aten.with_grad(*double(*call), **options)
    assert grad_input.abs().max() <= 4096 * 5e-7
    assert (divergence - exact).abs().max() <= 3e-5  # relative to 0.6, for sums of the stored p
