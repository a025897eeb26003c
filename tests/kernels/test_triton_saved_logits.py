"""Gradients from saved logits: the Triton kernels in the interpreter, against float64 and against recomputed logits."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import triton
import triton.language as tl
from inputs import make_inputs
from marks import IN_INTERPRETER
from reference_loss import error
from test_triton_interpreter import double, operands
from test_triton_log_probs import CASES, rescued_operands

import flce_ops
from flce_ops import aten
from flce_ops.triton import launch_backward, launch_forward
from flce_ops.triton.gemm import backends
from flce_ops.triton.gemm.tiles import EPILOGUE_N
from flce_ops.triton.logits.stored import saved_logits, to_stored

pytestmark = IN_INTERPRETER

# Errors of saved logits alone, twice what was seen. float32 shows them; float16's own rounding hides them.
TOLERANCE = {torch.float32: 2.5e-4, torch.float16: 1.5e-3}
RAGGED = (150, 20, 300)
MASK = [True, True, True]


def gradients(launch_or_aten, rows, args, cotangents, output_mask=MASK, **options):
    """Gradients of those results among target_logit, lse, logit_sum and expected_log_prob that have a cotangent."""
    *cotangents, of_expected = cotangents
    if of_expected is not None:
        options |= {"grad_expected_log_prob": of_expected, "expected_log_prob": rows[3]}
    return launch_or_aten(*cotangents, *args, rows[1], output_mask=output_mask, **options)


def case(shape, dtype, wanted, ignored=0.3):
    made = make_inputs(shape, dtype=dtype, bias=True, weight=True, requires_grad=False, ignored=ignored)
    args = (*made.args, made.weight)
    # of one sign: otherwise the sums over tokens would cancel and leave only the rounding of G
    signs = (-1.0, 1.0, -0.1, 1.0)
    cotangents = [sign * (torch.rand(shape[0]) + 0.1) if name in wanted else None for name, sign in zip("alms", signs)]
    truth = aten.forward(*double(*args), logit_sum=True, expected_log_prob=True)
    return args, cotangents, gradients(aten.backward, truth, double(*args), double(*cotangents))


# a log-probability; the entropy's expected logit; all of them with label smoothing's sum; and the number of rows
WANTED = [("al", 150), ("s", 128), ("alms", 128)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wanted, retain", WANTED)
def test_gradients_of_retained_rows(wanted, retain, dtype, poisoned_memory):
    args, cotangents, truth = case(RAGGED, dtype, wanted)
    rows = launch_forward(*args, logit_sum=True, expected_log_prob=True, retain=retain)
    found = gradients(launch_backward, rows, args, cotangents, retained=rows[8])
    again = gradients(launch_backward, rows, args, cotangents)
    for ours, made_again, right in zip(found, again, truth, strict=True):
        assert error(ours, right) <= TOLERANCE[dtype]
        assert dtype == torch.float32 or error(ours, right) <= 1.3 * error(made_again, right)
    for place, ours in enumerate(found):  # the same logits serve one backward for each gradient
        mask = [place == other for other in range(3)]
        assert torch.equal(gradients(launch_backward, rows, args, cotangents, mask, retained=rows[8])[place], ours)


def test_forward_and_backward_in_chunks(poisoned_memory):
    """Forward's chunks end where the saved rows end. Backward's chunks contain saved and recomputed rows."""
    args, cotangents, truth = case((280, 20, 300), torch.float32, "alms")
    with flce_ops.workspace(1):
        rows = launch_forward(*args, logit_sum=True, expected_log_prob=True, retain=200)
        found = gradients(launch_backward, rows, args, cotangents, retained=rows[8])
        assert flce_ops.last_path().chunks == 3
    whole = launch_forward(*args, logit_sum=True, expected_log_prob=True, retain=280)
    for part, other in zip(rows[:4], whole[:4], strict=True):
        torch.testing.assert_close(part, other)
    for ours, right in zip(found, truth, strict=True):
        assert error(ours, right) <= TOLERANCE[torch.float32]


def values(numbers):
    """What stored numbers stand for, relative to their tile's maximum."""
    return torch.where(numbers >= 0, -1.0 - numbers / 2048, numbers.view(torch.float16).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_saved_logits_are_right_within_half_a_step(dtype, poisoned_memory):
    x, w, target, bias, _ = operands((70, 24, 300), dtype, {"bias": True})
    target = target.clamp(min=0)
    *_, retained = launch_forward(x, w, target, bias, retain=70)
    saved, tile = saved_logits(retained, 300), EPILOGUE_N.value
    u = values(saved.numbers.contiguous())
    z2 = torch.log2(torch.exp(torch.nn.functional.linear(x.double(), w.double(), bias.double())))
    found = u + saved.tile_max[:, torch.arange(300) // tile]
    assert u.max() == 0 and (u > -17).float().mean() > 0.9
    assert (found - z2)[u > -17].abs().max() <= 2.0**-12 + 1e-5


@triton.jit
def to_stored_kernel(u_ptr, numbers_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(numbers_ptr + i, to_stored(tl.load(u_ptr + i), tl.int16))


def test_a_logit_above_its_maximum_by_a_rounding_is_saved_as_the_maximum():
    """On a GPU a fused multiply-add does not round the product from which the maximum is subtracted. The interpreter
    rounds it, so here the difference is given.
    """
    above = torch.tensor([0.0, 2.0**-12, 2.0**-11, 1.0, 300.0, -1.0, -40.0, -torch.inf])
    numbers = torch.empty(8, dtype=torch.int16)
    to_stored_kernel[(1,)](above, numbers, N=8)
    assert values(numbers).tolist() == [*[0.0] * 5, -1.0, -40.0, -torch.inf]


@pytest.mark.parametrize("retain, again", [(20, []), (128, []), (0, [20])])
def test_logits_of_saved_rows_are_not_made_again(retain, again, monkeypatch):
    args, made = operands((20, 24, 131), torch.float32, {}), []
    rows = launch_forward(*args, retain=retain)
    own = backends.BACKENDS[-1]

    def logits(*operands, **options):
        made.append(operands[0].shape[0])
        own.logits(*operands, **options)

    monkeypatch.setattr(backends, "BACKENDS", [own._replace(logits=logits)])
    launch_backward(*torch.randn(2, 20), None, *args, rows[1], retained=rows[8], output_mask=[True, True, False])
    assert made == again


def test_entries_far_below_their_maximum_keep_their_gradient(poisoned_memory):
    """e^-60 of the largest in their tile. float16's bits hold such a logit within 2^-6, in base 2."""
    args = operands((20, 24, 300), torch.float32, {"bias": True})
    args[3].zero_()
    args[3][[5, 290]] = -60.0
    args[2].clamp_(min=6, max=280)  # neither class is a target
    rows, truth = launch_forward(*args, retain=20), aten.forward(*double(*args))
    ones, options = torch.ones(20), {"output_mask": [True, True, True]}
    found = launch_backward(-ones, ones, None, *args, rows[1], retained=rows[8], **options)
    exact = aten.backward(-ones, ones, None, *double(*args), truth[1], **options)
    for ours, right in zip(found[1:3], exact[1:3], strict=True):
        far = right[[5, 290]]
        assert (far != 0.0).any() and error(ours[[5, 290]], far) <= 2.0**-6


@pytest.mark.parametrize("case", CASES)
def test_rows_far_above_their_reference(case, poisoned_memory):
    """A rescue leaves saved logits unchanged, because they are stored relative to the largest logit of a tile."""
    args = rescued_operands(case)
    rows = launch_forward(*args, expected_log_prob=True, retain=128)
    truth = aten.forward(*double(*args), expected_log_prob=True)
    valid = args[2] != -100
    cotangents = [torch.randn(len(valid)).masked_fill(~valid, torch.nan) for _ in range(2)]
    mask = {"output_mask": [True, True, case != CASES[0]]}
    found = launch_backward(*cotangents, None, *args, rows[1], retained=rows[8], **mask)
    right = aten.backward(*double(*cotangents), None, *double(*args), truth[1], **mask)
    for ours, exact in zip(found, right, strict=True):
        assert ours.isfinite().all()
        assert error(ours, exact) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("cut", [0, 290])
def test_a_shard_of_the_vocabulary(cut, poisoned_memory):
    """Most rows have no target in this shard."""
    x, w, _, bias, _ = operands(RAGGED, torch.float32, {"bias": True})
    args = (x, w, torch.randint(0, 600, RAGGED[:1]), bias, None)
    shard = {"vocab_start": cut, "vocab_size": 600}
    rows, truth = launch_forward(*args, retain=128, **shard), aten.forward(*double(*args), **shard)
    cotangents = [-torch.rand(RAGGED[0]), torch.rand(RAGGED[0]), None]
    options = {"vocab_start": cut, "output_mask": MASK}
    found = launch_backward(*cotangents, *args, rows[1], retained=rows[8], **options)
    right = aten.backward(*double(*cotangents), *double(*args), truth[1], **options)
    for ours, exact in zip(found, right, strict=True):
        assert error(ours, exact) <= TOLERANCE[torch.float32]


@pytest.mark.exhaustive
def test_nan_in_a_row_stays_in_that_rows_gradient():
    args, cotangents, _ = case(RAGGED, torch.float32, "al", ignored=0.0)
    args[0][3] = torch.nan
    rows = launch_forward(*args, retain=RAGGED[0])
    grad_input, grad_weight, *_ = gradients(launch_backward, rows, args, cotangents, retained=rows[8])
    of_row = grad_input.isnan().any(1)
    assert of_row[3] and of_row.sum() == 1 and grad_weight.isnan().all()


def test_the_slope_of_a_softcap_is_not_saved():
    x, w, target, bias, weight = operands((37, 35, 131), torch.float32, {})
    with pytest.raises(NotImplementedError, match="expected retain=0 under a softcap.* got 32"):
        launch_forward(x, w, target, bias, weight, softcap=torch.tensor(5.0), retain=32)


def test_operands_with_features_of_zeros_leave_saved_logits_whole(monkeypatch, poisoned_memory):
    """V features of zeros, whatever D is."""
    monkeypatch.setattr("flce_ops.triton.rows.copy_rows.on_tma_device", lambda tensor: True)
    args, cotangents, truth = case((150, 21, 300), torch.float16, "al")
    rows = launch_forward(*args, retain=150)
    assert "11 features of zeros added" in flce_ops.last_path().reason
    found = gradients(launch_backward, rows, args, cotangents, retained=rows[8])
    for ours, right in zip(found, truth, strict=True):
        assert error(ours, right) <= TOLERANCE[torch.float16]


def test_what_holds_no_logit_is_zeros(poisoned_memory):
    """An operator's result must not depend on former contents of memory."""
    x, w, target, _, _ = operands((70, 20, 301), torch.float32, {})
    target[:] = torch.where(torch.arange(70) % 2 == 0, -100, 5)
    *_, retained = launch_forward(x, w, target, None, None, retain=64)
    tiles = -(-301 // EPILOGUE_N.value)
    assert (retained[35:] == 0).all() and (retained[:35, :301] != 0).any(1).all()
    assert (retained[:35, 301:304] == 0).all() and (retained[:35, 304 + 2 * tiles :] == 0).all()
