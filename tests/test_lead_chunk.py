"""The first chunk's exponentials wait in grad_linear_weight: results as without it. Kernels in Triton's interpreter.

The workspace is small; the gradient is there anyway.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch

pytest.importorskip("triton")

from reference_loss import error
from test_triton_interpreter import assert_close, assert_one_pass, double, operands

import flce_ops
from flce_ops import aten
from flce_ops.triton.cut import cut_tokens
from flce_ops.triton.lead import lead_chunk

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU here: tests/test_numerics.py", allow_module_level=True)

WAITS = "exponentials wait in grad_linear_weight"
MiB = 2**20

# (N, D, V), bytes of workspace, chunks, why
CASES = [
    ((200, 256, 1100), MiB, 1, "all tokens fit: N <= D"),
    ((300, 256, 1100), MiB, 2, "the rest takes one chunk"),
    ((520, 256, 1531), MiB, 4, "c input waits in later rows of grad_input; a ragged last slice"),
    ((400, 256, 1100), MiB, 2, "the rest recomputes"),
]


EVERYTHING = {"bias": True, "class_weight": True, "softcap": 4.0, "z_loss": 1e-2}


# plain only where it is quick: a case takes up to 20 s of the interpreter
@pytest.mark.parametrize(
    "shape, workspace, chunks, why, options",
    [(*case, EVERYTHING) for case in CASES] + [(*case, {}) for case in CASES[:2]],
    ids=lambda value: value if isinstance(value, str) else "plain" if value == {} else "",
)
def test_gradients_agree_with_float64(shape, workspace, chunks, why, options, poisoned_memory, monkeypatch):
    if "recomputes" not in why:
        monkeypatch.setattr("flce_ops.triton.cut.RECOMPUTE_BELOW", 0)
    args = operands(shape, torch.float32, options)
    reason = f"{WAITS}, recomputing" if "recomputes" in why else WAITS
    with flce_ops.workspace(workspace):
        assert_one_pass(args, options, [True, True, args[3] is not None], chunks=chunks, reason=reason)


@pytest.mark.parametrize("wanted", [False, True], ids=["dW only", "argmax too"])
def test_outputs_asked_for(wanted, poisoned_memory):
    args = operands((300, 256, 1100), torch.float32, {})
    row_scale = torch.rand(300)
    options = {"output_mask": [wanted, True, False], "argmax": wanted}
    with flce_ops.workspace(MiB):
        found = flce_ops.triton.launch_with_grad(*args, row_scale, **options)
        assert WAITS in flce_ops.last_path().reason
    assert_close(found, aten.with_grad(*double(*args, row_scale), **options), torch.float32)


def test_rows_far_above_their_reference_are_rescued_in_every_slice():
    """Losses of hundreds of nats, the largest logit in another slice than the target."""
    args = operands((200, 256, 1100), torch.float32, {})
    args = (args[0] * 30, *args[1:])
    row_scale = torch.rand(200)
    mask = [True, True, False]
    whole = flce_ops.triton.launch_with_grad(*args, row_scale, output_mask=mask)
    assert flce_ops.last_path().chunks == 1 and WAITS not in flce_ops.last_path().reason
    with flce_ops.workspace(MiB):
        found = flce_ops.triton.launch_with_grad(*args, row_scale, output_mask=mask)
        assert WAITS in flce_ops.last_path().reason
    truth = aten.with_grad(*double(*args, row_scale), output_mask=mask)
    assert truth[1].max() > 100
    for ours, in_one_piece, exact in zip(found[1:4], whole[1:4], truth[1:4], strict=True):
        assert error(ours, exact) <= 1.1 * error(in_one_piece, exact) + 1e-7


@pytest.mark.parametrize("workspace", [48 * MiB, 64 * MiB, 128 * MiB, 512 * MiB])
@pytest.mark.parametrize("tokens", [3000, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize("hidden, vocab", [(2304, 256000), (4096, 128256), (4096, 128257), (8192, 50257)])
@pytest.mark.parametrize("more", [0, 384, 1024], ids="D + {}".format)
def test_slices_stay_inside_their_places(workspace, tokens, hidden, vocab, more):
    size, rows = 2, min(tokens, hidden + more)
    with flce_ops.workspace(workspace):
        lead = lead_chunk(rows, tokens, hidden, vocab, size, sum_bytes=0, argmax=False, want_input=True)
    if lead is None:
        # the tokens themselves take 128 MiB at 8192 x 8192
        assert workspace < 128 * MiB or tokens < 2 * rows or more * 2 * vocab > workspace / 4
        return
    assert lead.rows == rows
    assert lead.columns[0].start == 0 and lead.columns[-1].stop == vocab
    assert len(lead.columns) >= 2
    for before, cols in zip(lead.columns, lead.columns[1:]):
        assert cols.start == before.stop and cols.start % 256 == 0
        padded = -(-(cols.stop - cols.start) // 8) * 8
        assert lead.rows * padded <= (before.stop - before.start) * hidden  # E of a slice in the place before it
    first = lead.columns[0].stop
    assert lead.rows * first == lead.workspace_numbers
    assert lead.workspace_numbers * size <= workspace
    if not lead.rows_apart:
        assert 2 * lead.rows <= tokens


@pytest.mark.parametrize("tokens, hidden, vocab, waits", [(8192, 896, 151936, False), (8192, 4096, 128256, True)])
def test_a_chunk_no_larger_than_the_ordinary_ones_is_not_worth_it(tokens, hidden, vocab, waits):
    input, weight = (torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta") for rows in (tokens, vocab))
    lead = cut_tokens(input, weight, [True, True, False]).lead
    assert (lead is not None) is waits
