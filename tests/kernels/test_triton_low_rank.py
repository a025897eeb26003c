"""A frozen head with a low-rank pair in the Triton kernels, against float64, in the interpreter or on a GPU."""

# N tokens, D hidden, V vocabulary, r rank of the pair

import pytest
import torch
from reference_loss import error
from test_low_rank import OPTIONS, Call, results

import flce_ops
from flce_ops.meta.arguments import LowRankWithGrad

pytest.importorskip("triton")

from flce_ops.triton.steps.low_rank_with_grad import LowRankStep, launch_low_rank_with_grad

from flce_ops.triton.steps.chunks import small_bytes

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter's bfloat16 dots are wrong
UNSMOOTHED = [{key: value for key, value in options.items() if key != "label_smoothing"} for options in OPTIONS[:4]]


def launched(call, mask=(True, True, True, True)):
    """Returns the loss and the requested gradients, for a mean or a sum over the tokens."""
    options = dict(call.options)
    weight, reduction = options.pop("weight", None), options.pop("reduction", "mean")
    numbers = {name: torch.tensor(value, device=call.input.device) for name, value in options.items()}
    normalizer = numbers.pop("normalizer", None)
    valid = call.target != -100
    scale, denominator = None, normalizer
    if reduction == "sum":
        scale = valid.float()
    elif normalizer is None:
        denominator = valid.sum(dtype=torch.float32)
    operands = [None if value is None else value.detach() for value in (*call.args, weight)]
    found = launch_low_rank_with_grad(*operands, scale, denominator, **numbers, output_mask=list(mask))
    assert LowRankWithGrad.index["low_rank_input"] == 2
    return [found[0], *(grad for grad, wanted in zip(found[2:], mask) if wanted)]


@pytest.mark.skipif(ON_GPU, reason="the interpreter shows it")
def test_products_of_the_pair_take_no_more_memory_than_sums_did(monkeypatch):
    asked, make = [], LowRankStep.float32
    monkeypatch.setattr(LowRankStep, "float32", lambda step, numbers: asked.append(numbers) or make(step, numbers))
    with flce_ops.workspace(1 << 16):
        launched(Call((140, 24, 131), 3, DTYPE, "cpu"), [True, True, True, False])
        room = small_bytes() // 4
    assert asked and max(asked) <= room, (asked, room)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [((37, 40, 131), 3), ((300, 24, 517), 16), ((40, 33, 257), 70)],
    ids=["rank of zeros behind", "several chunks, bare", "odd features, two steps of rank"],
)
@pytest.mark.parametrize("options", UNSMOOTHED, ids=str)
def test_loss_and_gradients_are_those_of_float64(shape, rank, options, poisoned_memory):
    device = "cuda" if ON_GPU else "cpu"
    call = Call(shape, rank, DTYPE, device, bias=shape[0] != 300, options=options)
    exact = results(call.in_dtype(torch.float64), Call.dense)
    plain = results(call, Call.dense)
    with torch.no_grad():  # the contents of an ignored token do not matter
        for rows in (call.input, call.pair_input):
            rows[call.target == -100] = torch.nan
    with flce_ops.workspace(1 if shape[0] == 300 else 512 << 20):
        found = launched(call, [True, True, True, call.linear_bias is not None])
    for name, ours, theirs, truth in zip(("loss", *call.names), found, plain, exact, strict=True):
        assert error(ours, truth) <= 2 * error(theirs, truth) + 5e-7, name


@pytest.mark.parametrize(
    "mask",
    [(True, False, False, False), (False, True, True, False), (False, False, False, True)],
    ids=["x", "the pair", "bias"],
)
def test_only_the_gradients_asked_for(mask, poisoned_memory):
    call = Call((37, 24, 131), 16, DTYPE, "cuda" if ON_GPU else "cpu")
    every = launched(call, [True] * 4)
    some = launched(call, mask)
    assert torch.equal(some[0], every[0])
    wanted = [grad for grad, want in zip(every[1:], mask) if want]
    for grad, other in zip(some[1:], wanted, strict=True):
        assert error(grad, other) <= 1e-6


def test_rows_whose_target_is_unlikely_are_rescued(poisoned_memory):
    """With losses above 41 nats the largest exp(z - z_y) would exceed float32."""
    call = Call((37, 24, 131), 16, DTYPE, "cuda" if ON_GPU else "cpu")
    with torch.no_grad():
        call.pair_input *= 100
    exact, plain = results(call.in_dtype(torch.float64), Call.dense), results(call, Call.dense)
    assert exact[0] > 60
    for name, ours, theirs, truth in zip(("loss", *call.names), launched(call, [True] * 4), plain, exact, strict=True):
        assert error(ours, truth) <= 2 * error(theirs, truth) + 5e-6, name


def test_no_token_at_all_counts(poisoned_memory):
    call = Call((37, 24, 131), 16, DTYPE, "cuda" if ON_GPU else "cpu", options={"reduction": "sum"})
    call.target.fill_(-100)
    found = launched(call, [True] * 4)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in found)
