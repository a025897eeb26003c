"""The two gradient GEMMs of the Triton path and the tokens they stop at, each alone, in Triton's interpreter."""

# N tokens, n rows of a chunk, D hidden, V vocabulary, S splits of it

import contextlib
import itertools

import pytest
import torch
from reference_loss import as_pair, error

pytest.importorskip("triton")

import flce_ops
from flce_ops import aten
from flce_ops.support import Chip
from flce_ops.triton import launch_with_grad
from flce_ops.triton.gemm import input_gradient, tiles
from flce_ops.triton.gemm.input_gradient import (
    Finish,
    fastest_tiles,
    float32_memory,
    launch_input_gradient,
    steps_and_splits,
)
from flce_ops.triton.gemm.tiles import INPUT_TILES, ClassBlocks, input_tiles_for
from flce_ops.triton.gemm.weight_gradient import WeightGradient
from flce_ops.triton.rows.after_chunks import launch_after_chunks
from flce_ops.triton.rows.target_rows import launch_target_rows
from flce_ops.triton.rows.valid_tokens import ValidTokens, compact_tokens
from flce_ops.triton.steps.chunks import CHUNKS_MORE, best_chunking, problem_of, slices

MiB = 2**20
interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine")


@pytest.fixture
def h200(monkeypatch):
    """The GPU for which the sizes of a plan on meta tensors are chosen."""
    monkeypatch.setattr(tiles, "chip_of", lambda of: Chip(90, 132))


def valid_tokens_of(count, n, start=0, device="cpu"):
    """The first `count` places over all chunks hold tokens. n of the places belong to this chunk."""
    order = torch.arange(n, dtype=torch.int32, device=device)
    total = torch.tensor(count, dtype=torch.int32, device=device)
    return ValidTokens(order, total, start)


@interpreter
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tokens", [1, 700, 4097])
def test_valid_tokens_come_first_in_their_order_and_the_ignored_ones_after_them(tokens, share, dtype):
    target = torch.where(torch.rand(tokens) < share, torch.randint(9, (tokens,)), -100).to(dtype)
    found, place = compact_tokens(target, -100, 9)
    valid = target != -100
    count = int(valid.sum())
    assert int(found.total) == count
    assert found.order[:count].tolist() == valid.nonzero().flatten().tolist()
    assert sorted(found.order.tolist()) == list(range(tokens))
    assert torch.equal(place >= 0, valid)
    assert place[valid].tolist() == list(range(count))


@interpreter
@pytest.mark.parametrize("ignore_index, expected", [(9, True), (-100, False)])
def test_a_target_outside_the_vocabulary_is_seen_unless_it_is_ignored(ignore_index, expected):
    in_range = torch.tensor(not expected)
    compact_tokens(torch.tensor([3, 9]), ignore_index, 9, in_range)
    assert bool(in_range) == expected


@interpreter
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_rows_are_spread_in_place(share):
    target = torch.where(torch.rand(1100) < share, 1, -100)
    found, place = compact_tokens(target, -100, 9)
    count, rows = int(found.total), torch.randn(1100, 70)
    expected = torch.zeros(1100, 70)
    expected[target == 1] = rows[:count]
    rows[count:] = torch.nan
    launch_after_chunks(found.total, None, rows, place)
    assert torch.equal(rows, expected)


@interpreter
@pytest.mark.parametrize("memory_numbers", [0, 300 * 24, 5 * 300 * 24], ids="{} numbers".format)
@pytest.mark.parametrize("count", [0, 1, 130, 300])
def test_the_input_gradient_of_the_valid_rows(count, memory_numbers):
    n, d, v = 300, 24, 67
    e, w = torch.rand(n, v), torch.randn(v, d)
    e[count:] = torch.nan
    column, factor, residual = torch.randint(-1, v, (n,)), torch.randn(n), torch.randn(n)
    out = torch.full((n, d), torch.inf)
    memory = torch.full((memory_numbers,), torch.nan)
    finish = Finish(factor, column, residual)
    launch_input_gradient(out, e, w, finish, valid_tokens_of(count, n), memory)
    exact = factor[:, None].double() * (e.double() @ w.double())
    exact += torch.where(column >= 0, residual, 0.0)[:, None].double() * w[column.clamp(min=0)]
    assert error(out[:count], exact[:count]) <= 5e-7
    assert out[count:].isinf().all()


@interpreter
@pytest.mark.parametrize("missing", [0, 1])
def test_the_products_of_ranges_need_their_memory(missing, monkeypatch):
    """A range of V has a product of its own, however many rows hold a token."""
    n, d, v = 40, 24, 400
    monkeypatch.setattr(input_gradient, "steps_of_range", lambda tiles: 4)  # of 32 classes each
    memory = torch.empty(4 * n * d - missing)
    arguments = torch.empty(n, d), torch.rand(n, v), torch.randn(v, d), Finish(), valid_tokens_of(n, n), memory
    with pytest.raises(AssertionError) if missing else contextlib.nullcontext():
        launch_input_gradient(*arguments, by_ranges=True)


@interpreter
@pytest.mark.parametrize("numbers", [0, 4000, 40000])
@pytest.mark.parametrize("count", [1, 70, 200])
def test_v_is_split_as_the_model_of_rounds_says(count, numbers):
    """Shows which parts were written: memory that stays nan was not."""
    n, d, v = 200, 24, 400
    memory = torch.full((numbers,), torch.nan)
    finish = Finish(None, torch.full((n,), -1), torch.zeros(n))
    arguments = torch.empty(n, d), torch.rand(n, v), torch.randn(v, d), finish
    launch_input_gradient(*arguments, valid_tokens_of(count, n), memory)
    parts = max(int((~memory.isnan()).sum()) // (count * d), 1)
    tiles = -(-count // 32)
    steps = {s: -(-tiles * s // 4) * (-(-13 // s) + 8) for s in range(1, 17) if s == 1 or s * count * d <= numbers}
    assert steps[parts] == min(steps.values())
    assert (steps[parts], parts) == steps_and_splits(count, d, 13, numbers, 4, INPUT_TILES["interpreter"])


@interpreter
@pytest.mark.parametrize("count", [0, 1, 128, 200, 256])
def test_the_weight_gradient_over_two_chunks_stops_at_the_valid_rows(count):
    n, d, v = 128, 70, 67
    e, x = torch.rand(2 * n, v), torch.randn(2 * n, d)
    x[count:] = 0.0
    e[-(-count // 32) * 32 :] = torch.nan  # nothing is read after the last tile of valid rows
    e[count : -(-count // 32) * 32] = 0.0
    out = torch.full((v, d), torch.nan)
    gradient = WeightGradient(out, tokens=2 * n, chunks=2)
    for start in (0, n):
        rows = slice(start, start + n)
        gradient.add(e[rows], x[rows], valid_tokens_of(count, n, start))
    exact = e[:count].double().T @ x[:count].double()
    assert error(out, exact) <= 5e-7


@interpreter
def test_rows_of_targets_in_two_half_numbers_lose_nothing():
    """The part of c x lost to rounding is added separately. Rows of other classes stay unchanged."""
    n, d, v, count = 150, 70, 67, 140
    e, x = torch.rand(n, v).half(), torch.randn(n, d)
    high = x.half()
    low = (x - high.float()).half()
    low[count:] = high[count:] = torch.nan  # nothing is read after the valid tokens
    column = torch.randint(40, (n,))
    column[::7] = -1  # these targets are on other ranks
    out = torch.full((v, d), 7.0)
    launch_target_rows(out, e, high, low, column, valid_tokens_of(count, n))
    exact = e[:count].double().T @ x[:count].double()
    targets = column[:count][column[:count] >= 0].unique()
    assert error(out[targets], exact[targets]) <= 2.0**-21
    others = torch.ones(v, dtype=torch.bool)
    others[targets] = False
    assert (out[others] == 7.0).all() and others.any()


@pytest.mark.parametrize("start", range(8))  # odd offsets, too few rows, no rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float32_memory_lies_in_the_tensor(dtype, start):
    tensor = torch.zeros(7, 9, dtype=dtype)
    rows = tensor[start:]
    memory = float32_memory(rows)
    assert memory.dtype == torch.float32 and memory.dim() == 1
    assert memory.nbytes % 16 == 0 and rows.nbytes - memory.nbytes < 64
    memory.fill_(1.0)
    assert not tensor[:start].any()
    assert bool(rows.any()) is (memory.numel() > 0)


@pytest.mark.parametrize("rows", [4096, 6144])
def test_what_chunks_leave_of_the_workspace_goes_to_the_product(rows, h200):
    head = torch.empty(32000, 4096, dtype=torch.bfloat16, device="meta")
    problem = problem_of(20000, head, [True, True, False])
    of_matrix, taken = rows * 64000, 48 * 20000 + problem.sum_bytes()
    room = 512 * MiB - taken - of_matrix
    assert problem.product_bytes(rows) <= room
    _, parts = problem.input_steps(rows, room // 4)
    assert problem.product_bytes(rows) == 4 * 4096 * max(parts * rows * (parts > 1), 8 * 128)


def test_a_product_takes_no_more_memory_than_its_most_parts(h200):
    head = torch.empty(32000, 4096, dtype=torch.bfloat16, device="meta")
    assert problem_of(100, head, [True, True, False]).product_bytes(100) <= 16 * 100 * 4096 * 4


@pytest.mark.parametrize(
    "shape, rows, parts",
    [((8192, 4096, 128256), 512, 1), ((16384, 896, 151936), 512, 4), ((8192, 4096, 128256), 2048, 1)],
    ids=str,
)
def test_few_rows_get_smaller_tiles_of_which_more_run_at_a_time(shape, rows, parts, h200):
    tokens, hidden, vocab = shape
    head = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    assert len(input_tiles_for(head)) == 1  # without a workspace that was set no chunk has so few rows
    with flce_ops.workspace(128 * MiB):
        choice = input_tiles_for(head)
    steps, splits, best = fastest_tiles(choice, rows, hidden, vocab, 2 * MiB, 132)
    alone = [steps_and_splits(rows, hidden, -(-vocab // 64), 2 * MiB, 132, tiles)[0] for tiles in choice]
    assert splits == parts and (best is choice[1]) == (rows == 512)
    assert steps == min(time * tiles.step_time for time, tiles in zip(alone, choice))
    assert rows > 512 or steps <= 0.6 * alone[0]


@pytest.mark.parametrize("workspace", [64, 512], ids="{} MiB".format)
@pytest.mark.parametrize(
    "shape",
    [(8192, 4096, 128256), (16384, 896, 151936), (8192, 2304, 256000), (5000, 3072, 50257), (4500, 4096, 128256)],
    ids=str,
)
def test_a_cut_takes_every_token_once_in_chunks_that_fit(shape, workspace, h200):
    tokens, hidden, vocab = shape
    input, weight = (torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta") for rows in (tokens, vocab))
    with flce_ops.workspace(workspace * MiB):
        chunking = best_chunking(problem_of(input.shape[0], weight, [True, True, False]))
    assert chunking.chunks[0].start == 0 and chunking.chunks[-1].stop == tokens
    assert all(before.stop == after.start for before, after in itertools.pairwise(chunking.chunks))
    rows = chunking.chunks[0].stop
    assert rows * (vocab + 8) * 2 <= max(workspace * MiB, 128 * (vocab + 8) * 2)  # a chunk has at least 128 rows


@interpreter
@pytest.mark.parametrize("workspace, padded", [(512 * MiB, True), (4096, False)])
def test_features_that_tensor_maps_cannot_address_are_filled_up_where_the_copies_fit(workspace, padded, monkeypatch):
    """Pads as on a GPU with tensor maps. The results equal those of the unpadded operands."""
    x, w, target = torch.randn(40, 35), torch.randn(67, 35), torch.randint(67, (40,))
    args = (x, w, target, None, None, torch.rand(40))
    mask = {"output_mask": [True, True, False]}
    truth = aten.with_grad(*(t.double() if t is not None and t.is_floating_point() else t for t in args), **mask)
    monkeypatch.setattr("flce_ops.triton.rows.copy_rows.on_tma_device", lambda tensor: True)
    with flce_ops.workspace(workspace):
        found = launch_with_grad(*args, **mask)
    assert ("13 features of zeros added" in flce_ops.last_path().reason) is padded
    for ours, exact in zip(found[:4], truth[:4]):
        assert ours.shape == exact.shape and ours.is_contiguous()
        assert error(ours, exact) <= 2e-6


@interpreter
def test_a_backend_of_the_gemms_is_a_row(monkeypatch):
    """The steps take all products from the first table row that accepts the operands."""
    from flce_ops.triton import launch_backward, launch_forward
    from flce_ops.triton.gemm import backends
    from flce_ops.triton.logits.kl_div import launch_kl_div_with_grad

    own, made = backends.BACKENDS[-1], []

    def counted(name):
        def product(*args, **options):
            made.append(name)
            return getattr(own, name)(*args, **options)

        return product

    other = own._replace(takes=lambda matrix: False, logits=None, weight_gradient=None, input_gradient=None)
    row = own._replace(**{name: counted(name) for name in own._fields[1:]})
    monkeypatch.setattr(backends, "BACKENDS", [other, row, other])
    x, w, target, per_token = torch.randn(20, 16), torch.randn(67, 16), torch.arange(20), torch.rand(20)
    every, all_three = {"output_mask": [True, True, False]}, set(own._fields[1:])
    logits = x @ w.T
    lse = logits.logsumexp(1)

    _, _, grad_input, *_ = launch_with_grad(x, w, target, None, None, per_token, **every)
    dense = per_token[:, None] * (logits.softmax(1) - torch.eye(67)[:20])
    assert set(made) == all_three and error(grad_input, dense @ w) <= 1e-5
    made.clear()
    assert error(launch_forward(x, w, target, None, None)[1].sum(1), lse) <= 1e-5 and set(made) == {"logits"}
    made.clear()
    grad_input, *_ = launch_backward(-per_token, per_token, None, x, w, target, None, None, as_pair(lse), **every)
    assert set(made) == all_three and error(grad_input, dense @ w) <= 1e-5
    made.clear()
    launch_kl_div_with_grad(x, w, None, x, w, None, None, None, per_token, **every)
    assert set(made) == all_three


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("smoothed", [False, True])
def test_torch_matmul_makes_every_product_where_the_environment_asks_for_it(smoothed, device, monkeypatch):
    """Several chunks, ignored tokens, a row whose loss is above 40 nats: the numbers of the Triton GEMMs."""
    from flce_ops.triton import launch_backward, launch_forward
    from flce_ops.triton.gemm import backends
    from flce_ops.triton.logits.kl_div import launch_kl_div_with_grad

    n, d, v = 150, 40, 203
    x, w = torch.randn(n, d, device=device), torch.randn(v, d, device=device)
    x[1] *= 40.0
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter has no bfloat16
    x, w, bias = x.to(dtype), w.to(dtype), torch.randn(v, device=device, dtype=dtype)
    target, per_token = torch.randint(v, (n,), device=device), torch.rand(n, device=device)
    target[::7] = -100
    per_token[::7] = 0.0
    every = {"output_mask": [True, True, True]}
    options = {"label_smoothing": 0.1} if smoothed else {"softcap": torch.tensor(20.0, device=device)}

    def found():
        made = [*launch_with_grad(x, w, target, bias, None, per_token, **every, **options)[:5]]
        forward = launch_forward(x, w, target, bias, None)
        slopes = -per_token, per_token, None
        made += launch_backward(*slopes, x, w, target, bias, None, forward[1], **every)[:3]
        made += launch_kl_div_with_grad(x, w, bias, x.flip(0), w, None, None, None, per_token, **every)[:5]
        return [*made, *forward[:2]]

    with flce_ops.workspace(1 << 18):
        own = found()
        assert flce_ops.last_path().chunks > 1
        in_torch, in_triton = backends.BACKENDS
        assert backends.backend_for(x) is in_triton
        monkeypatch.setattr(backends, "TORCH_IS_ASKED_FOR", True)
        assert backends.backend_for(x.bfloat16()) is in_torch and backends.backend_for(x.half()) is in_triton
        monkeypatch.setattr(backends, "BACKENDS", [in_torch._replace(takes=lambda matrix: True)])
        by_torch = found()
    # on the CPU that of a divergence's stored logits
    rounding = 1e-4 if device == "cpu" else 8e-3  # bfloat16's, once or twice
    for ours, theirs in zip(own, by_torch, strict=True):
        assert error(theirs, ours.double()) <= rounding


@interpreter
def test_what_torch_matmul_does_not_make_is_refused_by_name(monkeypatch):
    from flce_ops.triton.gemm import backends

    monkeypatch.setattr(backends, "BACKENDS", [backends.BACKENDS[0]._replace(takes=lambda matrix: True)])
    x, w, target = torch.randn(40, 16), torch.randn(67, 16), torch.arange(40)
    call = x, w, target, None, None, torch.rand(40)
    mask = {"output_mask": [True, True, False]}
    with pytest.raises(NotImplementedError, match="batch_invariant needs the Triton GEMMs; unset FLCE_GEMM"):
        launch_with_grad(*call, **mask, batch_invariant=True)
    gradient = backends.BACKENDS[0].weight_gradient(torch.empty(67, 16), 40, 1)
    gradient.blocks = ClassBlocks(torch.tensor(1), torch.tensor([0, 0]))
    with pytest.raises(NotImplementedError, match="a sparse gradient needs the Triton GEMMs; unset FLCE_GEMM"):
        gradient.add(torch.rand(40, 67), x, valid_tokens_of(40, 40))


@pytest.mark.parametrize("tokens, hidden, vocab", [(8192, 896, 151936), (13000, 4096, 50257), (8192, 2304, 256000)])
def test_a_few_chunks_more_than_fit_are_taken_where_they_take_fewer_steps(tokens, hidden, vocab, h200):
    weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    problem = problem_of(tokens, weight, [True, True, False])

    def steps_of(cuts):
        return sum(problem.steps(c.stop - c.start, problem.product_bytes(cuts[0].stop) // 4) for c in cuts)

    chunks, fewest = problem.chunks(), slices(tokens, problem.fitting())
    assert len(fewest) < len(chunks) <= len(fewest) + CHUNKS_MORE and steps_of(chunks) < steps_of(fewest)
