"""The Triton kernels of given logits, in Triton's interpreter, against float64."""

# N tokens, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from inputs import scalars
from reference_loss import error, with_lse
from test_cross_entropy import OPTIONS, make_logits

import flce_ops
from flce_ops import aten

# ---------------------------------------------------------------- the Triton kernels, interpreted

# for the interpreter, which has no fused multiply-add: twice the error that was seen
TOLERANCE = {torch.float32: 3.4e-6, torch.float16: 7e-4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "padded", "options"),
    [  # a block has 32 numbers in float32, 64 in float16; without a softcap up to 2 blocks stay in registers
        ((3, 131), 0, {}),
        ((3, 203), 3, {"label_smoothing": 0.1}),
        ((3, 131), 3, OPTIONS[1]),
        ((3, 64), 0, OPTIONS[3]),
        ((4, 50), 3, {"logit_scale": -0.7}),
        ((4, 5), 0, OPTIONS[3]),
        ((3, 2), 1, OPTIONS[1]),
    ],
)
def test_kernels_agree_with_float64(shape, dtype, options, padded, poisoned_memory):
    triton = pytest.importorskip("flce_ops.triton.logits.cross_entropy")
    logits, target, made = make_logits(shape, dtype=dtype, options=options)
    for absent in ("token_weight", "temperature"):
        made.pop(absent, None)
    weight = made.pop("weight", None)
    memory = F.pad(logits, (0, padded), value=torch.nan)
    logits = memory[:, : shape[1]]
    exact, clean = logits.double(), logits.clone()
    logits[target < 0] = torch.nan
    numbers = scalars(made)
    of_logits = {name: numbers[name] for name in ("softcap", "logit_scale") if name in numbers}

    def same(found, right, plain):
        """Where the terms of a gradient cancel, ATen's error in the same dtype is the measure."""
        assert error(found, right) <= max(TOLERANCE[dtype], 2 * error(plain, right))

    asked = {"logit_sum": True, "argmax": True, **of_logits}
    found, right = (
        f(x, None, target, None, weight, **asked) for f, x in ((triton.launch_forward, logits), (aten.forward, exact))
    )
    for number, expected in zip(with_lse(found[:6]), with_lse(right[:6])):
        # the lse of two classes may be near 0
        number, expected = number.double(), expected.double()
        assert (number - expected).norm() <= TOLERANCE[torch.float32] * expected.norm().clamp(min=1.0)
    cotangents = [torch.randn(shape[0]) for _ in range(3)]
    of_row = (*cotangents, logits, None, target, None, weight, found[1])
    exact_row = (*cotangents, exact, None, target, None, weight, right[1])
    of_logits["output_mask"] = numbers["output_mask"] = [True, False, False]
    same(
        triton.launch_backward(*of_row, **of_logits)[0],
        aten.backward(*exact_row, **of_logits)[0],
        aten.backward(*of_row, **of_logits)[0],
    )
    scale = torch.rand(shape[0]).where(target >= 0, 0.0)
    for row_scale, divisor in ((None, None), (None, torch.tensor(2.5)), (scale, None)):
        factors = (None, target, None, weight, row_scale, divisor)
        in_double = (*factors[:4], *(None if factor is None else factor.double() for factor in factors[4:]))
        found = triton.launch_with_grad(logits, *factors, argmax=True, **numbers)
        right = aten.with_grad(exact, *in_double, argmax=True, **numbers)
        plain = aten.with_grad(logits, *factors, argmax=True, **numbers)
        for results in zip(found, right, plain, strict=True):
            if results[0].numel():
                same(*results)
    neighbours = memory[:, shape[1] :].clone()
    triton.launch_with_grad_in_place(logits, None, target, None, weight, scale, **numbers)
    assert torch.equal(logits, found[2]) and torch.equal(memory[:, shape[1] :].isnan(), neighbours.isnan())
    assert torch.equal(clean[target >= 0].isnan(), torch.zeros_like(clean[target >= 0], dtype=torch.bool))


@pytest.mark.parametrize("softcap", [None, 50.0, 300.0, 1e4, 1e8])
@pytest.mark.parametrize("shift", [0.0, 3000.0, -70000.0])
def test_large_logits_and_large_softcaps_leave_the_digits(shift, softcap, device):
    """The public function where CUDA is, the kernels in the interpreter where it is not."""
    rows, classes = (16, 509) if device == "cuda" else (5, 133)
    logits = 3.0 * torch.randn(rows, classes, device=device) + shift
    target, scale = torch.randint(classes, (rows,), device=device), torch.rand(rows, device=device) + 0.5
    options = {} if softcap is None else {"softcap": softcap}

    def plain(z):
        capped = z if softcap is None else softcap * torch.tanh(z / softcap)
        losses = F.cross_entropy(capped, target, reduction="none")
        return losses.detach(), *torch.autograd.grad((losses * scale).sum(), z)

    def ours(z):
        if device == "cuda":
            losses = flce_ops.cross_entropy(z, target, reduction="none", **options)
            in_one_pass = flce_ops.cross_entropy(z, target, token_weight=scale, reduction="sum", **options)
            by_lse, in_one_pass = (torch.autograd.grad(loss, z)[0] for loss in ((losses * scale).sum(), in_one_pass))
            return losses.detach(), by_lse, losses.detach(), in_one_pass
        triton = pytest.importorskip("flce_ops.triton.logits.cross_entropy")
        given, numbers = (z.detach(), None, target, None, None), scalars(options)
        target_logit, pair, *_ = triton.launch_forward(*given, **numbers)
        numbers["output_mask"] = [True, False, False]
        by_lse, *_ = triton.launch_backward(-scale, scale, None, *given, pair, **numbers)
        _, losses, in_one_pass, *_ = triton.launch_with_grad(*given, scale, **numbers)
        return (pair[:, 0] - target_logit) + pair[:, 1], by_lse, losses, in_one_pass

    exact, theirs = (plain(logits.to(dtype, copy=True).requires_grad_()) for dtype in (torch.float64, torch.float32))
    found = ours(logits.requires_grad_())
    for number, plainly, right in zip(found, (*theirs, *theirs), (*exact, *exact), strict=True):
        assert error(number, right) <= 3 * error(plainly, right) + 1e-7


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")
def test_bfloat16_logits_are_unpacked_as_they_are():
    triton = pytest.importorskip("flce_ops.triton.logits.cross_entropy")
    logits, target, _ = make_logits((4, 133), dtype=torch.bfloat16)
    found = triton.launch_forward(logits, None, target, logit_sum=True, argmax=True)
    right = aten.forward(logits.double(), None, target, logit_sum=True, argmax=True)
    for number, expected in zip(with_lse(found[:6]), with_lse(right[:6])):
        assert error(number, expected) <= TOLERANCE[torch.float32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")
@pytest.mark.parametrize(("blocks", "ahead"), [(2, 2), (12, 4)])
def test_no_more_of_the_next_row_is_read_ahead_than_there_is_room_for(blocks, ahead, monkeypatch):
    triton = pytest.importorskip("flce_ops.triton.logits.cross_entropy")
    asked, places, tile = [], [], triton.INTERPRETED

    def ask_for(row, groups, block):
        asked.append(int(groups.handle.data.item()))
        places.append(int(row.pointer.handle.data.item()) - logits.data_ptr())

    monkeypatch.setattr(triton, "INTERPRETED", tile._replace(programs=2))
    monkeypatch.setattr("flce_ops.triton.logits.row_blocks.ask_for", ask_for)
    rows = 2 * triton.multiprocessors(torch.empty(0)) + 1  # the first one's program runs the last one, too
    logits = torch.randn(rows, blocks * tile.block_g * 4)
    target = torch.zeros(rows, dtype=torch.int64)
    triton.launch_with_grad(logits, None, target, None, None, None, output_mask=[True, False, False])
    assert asked == [ahead * tile.block_g] + [0] * (rows - 1)
    assert 0 <= min(places) and max(places) < 4 * logits.numel()  # its target is read, too


@pytest.mark.parametrize(("blocks", "ahead"), [(3, 3), (8, 8), (12, 4), (16, 0), (20, 0)])
def test_the_next_row_is_read_ahead_where_the_l2_has_room(blocks, ahead):
    """8 blocks of a row stay in registers. Those behind them and those of the next row share room for 8."""
    kernels = pytest.importorskip("flce_ops.triton.logits.cross_entropy")
    tile = kernels.SHORT
    logits = torch.empty(1, blocks * tile.block_g * 4, device="meta")  # a group has 4 numbers
    assert kernels.blocks_ahead(logits, tile) == ahead
