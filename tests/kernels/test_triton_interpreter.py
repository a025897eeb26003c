"""The Triton kernels on the CPU, through Triton's interpreter: float32 and float16, against float64 in plain ATen.

bfloat16 is tested on GPUs only, because the interpreter's bfloat16 dot is wrong in Triton 3.6 to 3.9.
"""

# N tokens, D hidden, V vocabulary

import math
from types import SimpleNamespace

import inputs
import pytest
import torch
import triton
import triton.language as tl
from marks import IN_INTERPRETER
from reference_loss import error, with_lse
from test_gradient_gemms import valid_tokens_of

import flce_ops
from flce_ops import aten
from flce_ops.math.options import LogitOptions, Operands
from flce_ops.math.token_weights_and_denominator import Reduction
from flce_ops.triton import launch_backward, launch_forward, launch_scale_in_place, launch_with_grad
from flce_ops.triton.gemm.epilogues import ExpSum
from flce_ops.triton.gemm.logits_gemm import launch_logits_gemm
from flce_ops.triton.rows.after_chunks import LossSum, launch_after_chunks
from flce_ops.triton.rows.bias_and_tile_sums import weighted_column_sum
from flce_ops.triton.rows.gather_tokens import launch_gather_targets
from flce_ops.triton.rows.gradient_factors import launch_set_entries

pytestmark = IN_INTERPRETER

# twice the error seen with the options below
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3}

# tiles are 32x128x32: RAGGED has partial tiles on every side, EVEN has none
RAGGED, EVEN = (37, 35, 131), (32, 32, 128)

OPTIONS = [
    {},
    {"bias": True},
    {"bias": True, "class_weight": True, "label_smoothing": 0.1},
    {"label_smoothing": 0.1, "logit_scale": 0.7},
    {"softcap": 4.0, "logit_scale": 0.7, "z_loss": 1e-2},
    {"bias": True, "class_weight": True, "softcap": 4.0, "z_loss": 1e-2},
]


def operands(shape, dtype, options):
    tensors = {"bias": options.get("bias", False), "weight": options.get("class_weight", False)}
    made = inputs.make_inputs(shape, dtype=dtype, requires_grad=False, **tensors)
    return *made.args, made.weight


def double(*tensors):
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


def assert_close(found, expected, dtype):
    for ours, truth in zip(found, expected, strict=True):
        assert ours.shape == truth.shape
        assert error(ours, truth) <= TOLERANCE[dtype]


def logit_options(options):
    return inputs.scalars({name: options[name] for name in ("softcap", "logit_scale") if name in options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [RAGGED, EVEN], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_kernels_agree_with_float64(shape, dtype, options, poisoned_memory):
    args = operands(shape, dtype, options)
    logit_sum = "label_smoothing" in options
    *found, _ = launch_forward(*args, logit_sum=logit_sum, **logit_options(options))
    *truth, _ = aten.forward(*double(*args), logit_sum=logit_sum, **logit_options(options))
    assert_close(with_lse(found), with_lse(truth), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [RAGGED, EVEN], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward_kernels_agree_with_float64(shape, dtype, options, poisoned_memory):
    args = operands(shape, dtype, options)
    target, pair, *_ = aten.forward(*double(*args), **logit_options(options))
    # cotangents have the signs of a loss. With random signs, sums over tokens would cancel and leave only the rounding
    # of G.
    cotangents = list((torch.rand(3, shape[0]) + 0.1) * torch.tensor([[-1.0], [1.0], [-1.0]]))
    if "label_smoothing" not in options:
        cotangents[2] = None
    mask = [True, True, args[3] is not None]
    found = launch_backward(*cotangents, *args, pair.float(), output_mask=mask, **logit_options(options))
    truth = aten.backward(*double(*cotangents), *double(*args), pair, output_mask=mask, **logit_options(options))
    assert_close(found, truth, dtype)


# label smoothing under a softcap is not of rank 1 and takes the ATen path
ONE_PASS_OPTIONS = [options for options in OPTIONS if "label_smoothing" not in options]


@pytest.mark.parametrize("shape", [RAGGED, EVEN], ids=str)
@pytest.mark.parametrize("options", ONE_PASS_OPTIONS, ids=str)
def test_one_pass_kernels_agree_with_float64(shape, options, poisoned_memory):
    args = operands(shape, torch.float32, options)
    assert_one_pass(args, options, [True, True, args[3] is not None])


def test_smoothing_reads_no_ignored_token(poisoned_memory):
    """The smoothing sum over classes is as accurate as a sum of float32 logits, also if these are far from 0."""
    args = list(operands((97, 35, 1200), torch.float32, {"bias": True, "class_weight": True}))
    args[1] += 3.0
    args[0] += 0.5
    args.append(None)
    options = {"output_mask": [True, True, True], "label_smoothing": 0.1}
    exact, plain = aten.with_grad(*double(*args), **options), aten.with_grad(*args, **options)
    found = launch_with_grad(*args, **options)
    # losses of the tokens. Over 25 draws the ratio of the errors was 0.57 to 1.18, its median 0.83.
    assert error(found[1], exact[1]) <= 2.0 * error(plain[1], exact[1])
    args[0][args[2] == -100] = torch.nan
    for ours, same in zip(launch_with_grad(*args, **options), found, strict=True):
        assert torch.equal(ours, same)


@pytest.mark.parametrize("mask", [[False, True, False], [True, False, False]], ids=["dW only", "dX only"])
def test_one_pass_kernels_make_only_the_gradients_asked_for(mask, poisoned_memory):
    found = assert_one_pass(operands(RAGGED, torch.float32, {}), {}, mask)
    assert [grad.numel() > 0 for grad in found[2:5]] == mask


@pytest.mark.parametrize("chunks, options", [(4, OPTIONS[1]), (2, OPTIONS[2]), (2, OPTIONS[4])], ids=str)
def test_one_pass_kernels_agree_with_float64_over_several_chunks(chunks, options, poisoned_memory):
    args = operands((128 * chunks - 106, 20, 300), torch.float32, options)
    with flce_ops.workspace(1):  # even the smallest chunk has 128 rows
        assert_one_pass(args, options, [True, True, args[3] is not None], chunks=chunks)


@pytest.mark.parametrize(
    "way, denominator",
    [(way, None) for way in ("one pass", "smoothed", "chunks", "aten", "no token")]
    + [("one pass", torch.tensor(7.0)), ("chunks", torch.tensor(7)), ("aten", torch.tensor(7))],  # 0-d, any dtype
    ids=str,
)
def test_a_mean_is_the_sum_of_row_scales_over_its_denominator(way, denominator, poisoned_memory):
    """One division of the same numbers gives the same bits. The loss is an exception: its sum is divided as a whole."""
    args = list(operands((150 if way == "chunks" else 37, 20, 67), torch.float32, {}))
    if way == "no token":
        args[2] = torch.full_like(args[2], -100)
    options = {"output_mask": [True, True, False], **({"label_smoothing": 0.1} if way == "smoothed" else {})}
    with_grad = aten.with_grad if way == "aten" else launch_with_grad
    valid = args[2] != -100
    divisor = valid.sum() if denominator is None else denominator
    with flce_ops.workspace(1 if way == "chunks" else 512 << 20):
        found = with_grad(*args, None, denominator, **options)
        expected = with_grad(*args, torch.where(valid, 1.0 / divisor, 0.0), **options)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one, other)
    mean = expected[1].double().sum() / divisor
    assert mean.isnan().item() is (way == "no token" and denominator is None)
    torch.testing.assert_close(found[0].double(), mean, rtol=3e-7, atol=0.0, equal_nan=True)


def assert_one_pass(args, options, mask, chunks=1):
    rows = args[0].shape[0]
    row_scale = torch.rand(rows) / rows
    options = {
        **inputs.scalars({name: options[name] for name in ("label_smoothing", "z_loss") if name in options}),
        **logit_options(options),
    }
    found = launch_with_grad(*args, row_scale, output_mask=mask, **options)
    assert flce_ops.last_path().chunks == chunks
    assert_close(found, aten.with_grad(*double(*args, row_scale), output_mask=mask, **options), torch.float32)
    return found


@pytest.mark.parametrize("vocab_start", [0, 100, 203])
def test_a_shard_of_the_vocabulary_counts_only_its_own_targets(vocab_start):
    *args, _, _ = operands(RAGGED, torch.float32, {})
    args[2] = torch.randint(0, 406, (RAGGED[0],))
    *found, _ = launch_forward(*args, vocab_start=vocab_start, vocab_size=406)
    *truth, _ = aten.forward(*double(*args), vocab_start=vocab_start, vocab_size=406)
    assert_close(with_lse(found), with_lse(truth), torch.float32)


@pytest.mark.parametrize("case", ["logits of magnitude 1e4", "-inf bias", "target at a -inf bias"])
def test_rows_far_above_their_reference_are_rescued(case):
    """The target's logit is hundreds of nats below the largest, so exp(z - reference) overflows in the first pass."""
    N, D, V = RAGGED
    x, w, target, _, _ = operands(RAGGED, torch.float32, {})
    bias = None
    if case == "logits of magnitude 1e4":
        x, w = 100 * torch.randn(N, D), 10 * torch.randn(V, D)
    else:
        bias = torch.zeros(V)
        bias[::3] = float("-inf")
        if case == "-inf bias":
            bias[target.clamp(min=0)] = 0.0
    mask = [True, True, False]
    row_scale = torch.rand(N)
    found = launch_with_grad(x, w, target, bias, None, row_scale, output_mask=mask)
    truth = aten.with_grad(*double(x, w, target, bias, None, row_scale), output_mask=mask)
    assert found[2].isfinite().all() and found[3].isfinite().all()
    finite = truth[1].isfinite()
    assert torch.equal(finite, found[1].isfinite())
    # float32 is good enough at these magnitudes
    plain = aten.with_grad(x, w, target, bias, None, row_scale, output_mask=mask)
    # A float32 logit is off by this many nats. If two classes are that close, so are their probabilities.
    rounding = torch.finfo(torch.float32).eps * (x.double() @ w.double().T).abs().max()
    for ours, theirs, exact in zip(found[1:4], plain[1:4], truth[1:4], strict=True):
        keep = exact.isfinite()
        assert error(ours[keep], exact[keep]) <= max(1.5 * error(theirs[keep], exact[keep]) + 1e-6, rounding)


@pytest.mark.parametrize("softcap", [50.0, 1e4, 1e8])
def test_a_large_softcap_leaves_the_digits_of_the_logits(softcap):
    """tanh of a small number is the number nearly: 1 - 2 / (1 + e) alone would round it at 6e-8 of the softcap."""
    x, w, target, _, _ = operands(RAGGED, torch.float32, {})
    cap = {"softcap": torch.tensor(softcap)}
    found = launch_forward(x, w, target, None, **cap)
    exact = aten.forward(*double(x, w, target, None), softcap=cap["softcap"].double())
    for ours, truth in zip(with_lse(found)[:2], with_lse(exact)[:2], strict=True):
        assert error(ours, truth) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("raised", [False, True])
def test_the_logits_of_a_rescue_are_made_only_if_a_sum_is_too_large(raised):
    N, _, V = RAGGED
    x, w, *_ = operands(RAGGED, torch.float32, {})
    z = x @ w.T / math.log(2.0)
    reference, guard, out = z[:, 0].clone(), torch.zeros((), dtype=torch.int32), torch.full((N, V), float("nan"))
    if raised:
        reference[5] = -1e4
    found, rows = reference.clone(), valid_tokens_of(N, N)
    first = ExpSum(reference, None, None, guard=guard, raised=found)
    launch_logits_gemm(x, w, None, first, LogitOptions(), rows)
    assert guard == raised
    expected = torch.where((torch.arange(N) == 5) & raised, z.amax(1), reference)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    launch_logits_gemm(x, w, None, ExpSum(found, None, None), LogitOptions(), rows, out=out, guard=guard)
    again = (z - expected[:, None]).exp2() if raised else torch.full((N, V), float("nan"))
    torch.testing.assert_close(out, again, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_reference_is_raised_by_tiles_whose_sums_are_too_large_alone():
    """128 logits of 54 sum up to 2^61, one of 59 in another tile to 2^59. So the order of tiles changes no bit."""
    logits = torch.cat([torch.full((128,), 54.0), torch.full((127,), -9.0), torch.tensor([59.0])])
    x, w = torch.ones(3, 1), logits[:, None] * math.log(2.0)
    reference, guard = torch.tensor([0.0, -2.0, 2.0]), torch.zeros((), dtype=torch.int32)  # the last row's sum is 2^59
    raised = reference.clone()
    epilogue = ExpSum(reference, None, None, guard=guard, raised=raised)
    launch_logits_gemm(x, w, None, epilogue, LogitOptions(), valid_tokens_of(3, 3))
    torch.testing.assert_close(raised, torch.tensor([54.0, 59.0, 2.0]), rtol=1e-5, atol=1e-5)
    assert guard == 1


@pytest.mark.parametrize("expected_log_prob", [False, True])
def test_a_shard_whose_classes_are_all_switched_off_has_no_share_and_no_gradient(expected_log_prob):
    x, w, target, _, _ = operands(RAGGED, torch.float32, {})
    bias = torch.full((RAGGED[2],), float("-inf"))
    shard = {"vocab_start": RAGGED[2]}  # every target is before the shard
    wanted = {"vocab_size": 2 * RAGGED[2], "expected_log_prob": expected_log_prob}
    _, pair, *_ = launch_forward(x, w, target, bias, **wanted, **shard)
    lse = pair.sum(1)
    assert torch.equal(lse, torch.where(target == -100, 0.0, float("-inf")))
    zero, zeros = torch.zeros_like(lse), torch.zeros_like(pair)  # as flce_ops/ops/autograd.py passes them
    expectations = {"grad_expected_log_prob": zero, "expected_log_prob": zero} if expected_log_prob else {}
    grads = launch_backward(
        zero, zero, None, x, w, target, bias, None, zeros, output_mask=[True, True, True], **shard, **expectations
    )
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5])
def test_the_grad_output_scales_in_place(factor):
    grad = torch.randn(9001)
    expected = grad * factor
    launch_scale_in_place([grad], torch.tensor(factor))
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("count", [1, 4096, 4097])
def test_the_sum_of_losses_has_every_loss_once_and_nothing_beside_them(count, scaled):
    around = torch.full((count + 2,), torch.nan)
    losses, scales = around.clone()[1:-1], around.clone()[1:-1]
    losses.copy_(torch.rand(count))
    scales.copy_(torch.rand(count))
    loss, total = torch.full((), torch.nan), torch.tensor(count, dtype=torch.int32)
    launch_after_chunks(total, LossSum(losses, Reduction(scales if scaled else None), loss))
    exact = (losses.double() * scales).sum() if scaled else losses.double().mean()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0.0)


def test_weighted_sums_agree_with_float64():
    matrix, factor = torch.randn(2100, 131), torch.randn(2100)
    assert error(weighted_column_sum(matrix, factor), factor.double() @ matrix.double()) <= 1e-6
    assert error(weighted_column_sum(matrix.T[:, :77], None), matrix.T[:, :77].double().sum(0)) <= 1e-6
    tall = torch.rand(40000, 1)  # two steps, and one more; all of one sign, because a sum near 0 has no relative error
    assert error(weighted_column_sum(tall, None), tall.double().sum(0)) <= 1e-6
    kept = weighted_column_sum(matrix, factor, valid_tokens_of(1300, 2100))
    assert error(kept, factor[:1300].double() @ matrix[:1300].double()) <= 1e-6


def gathered(input, linear_weight, target):
    """The rows, their targets' logits and the guard."""
    call = SimpleNamespace(operands=Operands(input, linear_weight, target, None, None), logits=LogitOptions())
    rows = torch.empty(input.shape[0], input.shape[1], dtype=input.dtype)
    at_target = launch_gather_targets(call, valid_tokens_of(input.shape[0], input.shape[0]), rows)
    return rows, at_target.logit, at_target.guard


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_no_row_is_guarded_before_one_overflows(tokens, poisoned_memory):
    *_, guard = gathered(torch.randn(tokens, 20), torch.randn(67, 20), torch.zeros(tokens, dtype=torch.int64))
    assert guard.shape == () and guard == 0


def test_hidden_states_are_found_beyond_2_31_numbers():
    """The memory between the rows is reserved, not used."""
    stride = 2**30 + 64
    input = torch.empty(2 * stride + 20, dtype=torch.float16).as_strided((3, 20), (stride, 1))
    input.copy_(torch.randn(3, 20))
    linear_weight = torch.randn(67, 20, dtype=torch.float16)
    rows, logit, _ = gathered(input, linear_weight, torch.tensor([5, 0, 66]))
    assert torch.equal(rows, input)
    exact = (input.double() * linear_weight[[5, 0, 66]].double()).sum(1) / math.log(2)
    torch.testing.assert_close(logit.double(), exact, rtol=1e-5, atol=1e-5)


def test_entries_are_set_in_the_columns_of_the_matrix_only():
    matrix = torch.zeros(200, 12)[:, :10]
    target = torch.randint(-1, 20, (200,))
    value = torch.randn(200)
    expected = torch.zeros(200, 10)
    for row, column in enumerate(target.tolist()):
        if 0 <= column < 10:
            expected[row, column] = value[row]
    launch_set_entries(matrix, target, value, valid_tokens_of(150, 200))
    expected[150:] = 0.0
    assert torch.equal(matrix, expected)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
def test_recomputed_rows_add_up_to_zero_at_any_magnitude(offset, poisoned_memory):
    """One float32 represents an lse of 10^4 to 5e-4. An lse_pair has more digits."""
    args = operands(RAGGED, torch.float32, {"bias": True})
    for operand in args[:2]:  # products are exact: NumPy, which multiplies here, rounds the same row in several ways
        operand.mul_(8).round_().div_(8)
    args[3].add_(offset)
    _, pair, *_ = launch_forward(*args)
    valid = (args[2] != -100).float()
    cotangents = (-valid, valid, None)
    *_, grad_bias, _ = launch_backward(*cotangents, *args, pair, output_mask=[True] * 3)
    assert abs(float(grad_bias.double().sum())) / RAGGED[0] < 5e-7


@triton.jit
def masked_by_a_scalar_kernel(pointer, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(pointer + places, 1, mask=(places < 3) & (n > 2))


def test_a_scalar_condition_in_a_mask_is_refused_under_every_triton():
    """Triton 3.9 refuses it. In tests, interpreter.py refuses it for the others."""
    with pytest.raises(Exception, match="expected a boolean mask, got int"):
        masked_by_a_scalar_kernel[(1,)](torch.zeros(8, dtype=torch.int32), 5, 8)
