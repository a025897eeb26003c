"""The first chunk's exponentials are stored in grad_linear_weight: same results. The kernels run in Triton's
interpreter.

The workspace is small, but the gradient is allocated anyway.
"""

# N tokens, D hidden, V vocabulary

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from flce_ops.triton.steps.overlay import overlay_chunk, scratch_of, slice_tiles
from reference_loss import error
from test_triton_interpreter import assert_close, assert_one_pass, double, operands
from torch.utils._python_dispatch import TorchDispatchMode

import flce_ops
from flce_ops import aten
from flce_ops.triton.gemm import device
from flce_ops.triton.steps import backward, chunking, chunks, forward, gradients, one_pass_step, overlay
from flce_ops.triton.steps.chunking import best_chunking, problem_of

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU here: tests/objectives/test_numerics.py", allow_module_level=True)

WAITS = "exponentials wait in grad_linear_weight"
MiB = 2**20
WORKSPACE = MiB // 16

# (N, D, V), number of chunks, reason
CASES = [
    ((50, 64, 275), 1, "all tokens fit: N <= D"),
    ((75, 64, 275), 2, "the rest takes one chunk"),
    ((130, 64, 383), 4, "c input waits in later rows of grad_input; a ragged last slice"),
    ((100, 64, 275), 2, "the rest recomputes"),
]


EVERYTHING = {"bias": True, "class_weight": True, "softcap": 4.0, "z_loss": 1e-2}


@pytest.fixture
def quarter(monkeypatch):
    """Tiles, and what depends on them, are a quarter as wide: the same slices, chunks and places need a sixteenth of
    the room.
    """
    for module in (backward, chunks, chunking, forward, gradients):
        monkeypatch.setattr(module, "MULTIPLE", module.MULTIPLE // 4)
    monkeypatch.setattr(device, "INTERPRETER", replace(device.INTERPRETER, block_n=64))
    for module in (overlay, backward):
        monkeypatch.setattr(module, "BLOCK_V", module.BLOCK_V // 4)
    monkeypatch.setattr(chunking, "RECOMPUTE_BELOW", chunking.RECOMPUTE_BELOW // 4)
    forget_chunkings()
    yield
    forget_chunkings()


def forget_chunkings():
    # clear what was cached with the original constants
    for remembered in (chunking.best_chunking, chunking.fewest_steps):
        remembered.cache_clear()


@pytest.mark.usefixtures("quarter")
@pytest.mark.parametrize("options", [EVERYTHING, {}], ids=["everything", "plain"])
@pytest.mark.parametrize("shape, count, why", CASES, ids=[why for *_, why in CASES])
def test_gradients_agree_with_float64(shape, count, why, options, poisoned_memory, monkeypatch):
    if "recomputes" not in why:
        monkeypatch.setattr(chunking, "RECOMPUTE_BELOW", 0)
    args = operands(shape, torch.float32, options)
    reason = f"{WAITS}, recomputing" if "recomputes" in why else WAITS
    with flce_ops.workspace(WORKSPACE):
        assert_one_pass(args, options, [True, True, args[3] is not None], chunks=count, reason=reason)


@pytest.mark.usefixtures("quarter")
@pytest.mark.parametrize("wanted", [False, True], ids=["dW only", "statistics too"])
def test_outputs_asked_for(wanted, poisoned_memory):
    args = operands((75, 64, 275), torch.float32, {})
    row_scale = torch.rand(75)
    statistics = dict.fromkeys(("argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit"), wanted)
    options = {"output_mask": [wanted, True, False], **statistics}
    with flce_ops.workspace(WORKSPACE):
        found = flce_ops.triton.launch_with_grad(*args, row_scale, **options)
        assert WAITS in flce_ops.last_path().reason
    assert_close(found, aten.with_grad(*double(*args, row_scale), **options), torch.float32)


class Allocated(TorchDispatchMode):
    """The shapes that new_empty was asked for."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.new_empty.default:
            self.shapes.append(tuple(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("quarter")
def test_chunks_behind_it_have_memory_for_their_own_tokens_only():
    args = operands((75, 64, 275), torch.float32, {})
    with flce_ops.workspace(WORKSPACE):
        chosen = best_chunking(problem_of(75, args[1], [True, True, False]))
        with Allocated() as allocated:
            flce_ops.triton.launch_with_grad(*args, torch.rand(75), output_mask=[True, True, False])
    assert chosen.overlay is not None and len(chosen.chunks) == 1
    rows = chosen.chunks[0].stop - chosen.chunks[0].start
    columns = chunks.padded(275, 4)
    assert {shape for shape in allocated.shapes if shape[1:] == (columns,)} == {(rows, columns)}


@pytest.mark.parametrize(
    "tokens, hidden, vocab, nbytes",
    [(16384, 1024, 151936, 128 * MiB), (4096, 2048, 128256, 128 * MiB), (4096, 768, 256000, 128 * MiB)],
)
def test_its_rows_take_the_fewest_steps_of_the_gemms(tokens, hidden, vocab, nbytes):
    """With the memory that its products really have."""
    linear_weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    with flce_ops.workspace(nbytes):
        problem = problem_of(tokens, linear_weight, [True, True, False])
        chosen, _ = chunking.fewest_steps(problem)

        def steps(rows):
            found = overlay_chunk(problem, rows)
            if found is None:
                return math.inf
            return problem.steps(rows, scratch_of(found, linear_weight).numel()) + problem.chunks(rows)[0]

        others = range(problem.fitting() + 128, min(tokens, hidden + problem.fitting()), chunking.OVERLAY_STEP)
        assert steps(chosen.rows) <= min(map(steps, others))


@pytest.mark.parametrize("tokens, hidden, vocab, size", [(18182, 1024, 32000, 128), (16390, 4096, 50257, 256)])
def test_tokens_take_few_chunks_more_than_fit(tokens, hidden, vocab, size):
    """Each chunk adds to all of grad_linear_weight."""
    linear_weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    with flce_ops.workspace(size * MiB):
        problem = problem_of(tokens, linear_weight, [True, True, False])
        fewest = math.ceil(tokens / problem.fitting())
        assert fewest <= len(problem.chunks(0)[1]) <= fewest + chunks.CHUNKS_MORE


@pytest.mark.parametrize("tokens", [8191, 100_003, 1_000_003])
def test_the_host_compares_as_few_divisions_of_many_tokens_as_of_few(tokens, monkeypatch):
    """The number of tokens may be new in every step."""
    costs, steps = [], chunks.Problem.steps
    monkeypatch.setattr(chunks.Problem, "steps", lambda self, *sizes: costs.append(sizes) or steps(self, *sizes))
    problem = problem_of(tokens, torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta"), [True, True, False])
    best_chunking.cache_clear()
    chunking.fewest_steps.cache_clear()
    assert len(best_chunking(problem).chunks) >= tokens // 5000
    assert len(costs) <= 110  # 12 overlay chunks and none; up to 3 numbers of chunks after each, of 2 sizes


@pytest.mark.usefixtures("quarter")
def test_rows_far_above_their_reference_are_rescued_in_every_slice():
    """Losses of hundreds of nats, with the largest logit in another slice than the target."""
    args = operands((50, 64, 275), torch.float32, {})
    args = (args[0] * 30, *args[1:])
    row_scale = torch.rand(50)
    mask = [True, True, False]
    whole = flce_ops.triton.launch_with_grad(*args, row_scale, output_mask=mask)
    assert flce_ops.last_path().chunks == 1 and WAITS not in flce_ops.last_path().reason
    with flce_ops.workspace(WORKSPACE):
        found = flce_ops.triton.launch_with_grad(*args, row_scale, output_mask=mask)
        assert WAITS in flce_ops.last_path().reason
    truth = aten.with_grad(*double(*args, row_scale), output_mask=mask)
    assert truth[1].max() > 100
    for ours, in_one_piece, exact in zip(found[1:4], whole[1:4], truth[1:4], strict=True):
        assert error(ours, exact) <= 1.1 * error(in_one_piece, exact) + 1e-7


@pytest.mark.usefixtures("quarter")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("more", [None, -1, 0, 1, 20])
def test_few_valid_tokens_take_one_chunk(more, smoothing, poisoned_memory, monkeypatch):
    """From no valid token to more than the chunk holds. Checks gradients and statistics, also of ignored tokens."""
    n, *_ = shape = 75, 64, 275
    launched = []

    def choose(valid_tokens, rows):
        launched.append((int(valid_tokens.total), rows))
        return choose_chunking(valid_tokens, rows)

    monkeypatch.setattr(one_pass_step, "choose_chunking", choose)
    args = operands(shape, torch.float32, {"bias": True})
    with flce_ops.workspace(WORKSPACE):
        few = best_chunking(problem_of(n, args[1], [True] * 3, smoothed=bool(smoothing))).few
        count = 0 if more is None else few + more
        assert 0 < few and count < n
        args[2].copy_(torch.where(torch.randperm(n) < count, args[2].clamp(min=0), -100))
        options = {"output_mask": [True] * 3, "label_smoothing": smoothing}
        options |= dict.fromkeys(("argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit"), True)
        row_scale = torch.rand(n)
        found = flce_ops.triton.launch_with_grad(*args, row_scale, **options)
        assert f"up to {few} valid tokens in one chunk" in flce_ops.last_path().reason
    assert launched == [(count, few)]
    assert_close(found, aten.with_grad(*double(*args, row_scale), **options), torch.float32)


@pytest.mark.parametrize("workspace", [48 * MiB, 64 * MiB, 128 * MiB, 512 * MiB])
@pytest.mark.parametrize("tokens", [3000, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize("hidden, vocab", [(2304, 256000), (4096, 128256), (4096, 128257), (8192, 50257)])
@pytest.mark.parametrize("more", [0, 384, 1024], ids="D + {}".format)
def test_slices_stay_inside_their_places(workspace, tokens, hidden, vocab, more):
    size, rows = 2, min(tokens, hidden + more)
    with flce_ops.workspace(workspace):
        weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
        problem = problem_of(tokens, weight, [True, False, False])
        found = overlay_chunk(problem, rows)
    if found is None:
        # at 8192 x 8192 the tokens themselves take 128 MiB
        assert workspace < 128 * MiB or tokens < 2 * rows or more * 2 * vocab > workspace / 4
        return
    assert found.rows == rows
    assert found.columns[0].start == 0 and found.columns[-1].stop == vocab
    assert len(found.columns) >= 2
    for before, cols in zip(found.columns, found.columns[1:]):
        assert cols.start == before.stop and cols.start % 256 == 0
        padded = -(-(cols.stop - cols.start) // 8) * 8
        # E of a slice fits in the part of the gradient before it
        assert found.rows * padded <= (before.stop - before.start) * hidden
    first = found.columns[0].stop
    # of one size, as far as the tokens allow: a smaller first slice would take more of them
    assert len(slice_tiles(-(-vocab // 256), first // 256 - 1, rows, hidden)) != len(found.columns)
    assert found.rows * first == found.workspace_numbers
    assert found.workspace_numbers * size <= workspace
    if not found.rows_apart:
        assert 2 * found.rows <= tokens


@pytest.mark.parametrize("tokens, hidden, vocab, waits", [(8192, 896, 151936, False), (8192, 4096, 128256, True)])
def test_a_chunk_no_larger_than_the_ordinary_ones_is_not_worth_it(tokens, hidden, vocab, waits):
    weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    assert (best_chunking(problem_of(tokens, weight, [True, True, False])).overlay is not None) is waits
