"""The Triton kernels of a sparse gradient on ranks that share the vocabulary, in Triton's interpreter."""

# N tokens, n rows, D hidden, V vocabulary, R ranks

import pytest
import torch
import torch.distributed as dist
from inputs import make_inputs
from process_pool import run_in_world
from reference_loss import error, rows_apart
from sharded_inputs import mesh_of

import flce_ops
from flce_ops import aten
from flce_ops.aten.with_grad import vocab_parallel_with_grad
from flce_ops.math.sparse_gradient import Shard, SparseGradient, room_of_row

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on hashes that wrap around
]

N = 3


def rows_of_lists(lists, start):
    """A dict for each token: class (numbered over all ranks) -> bits of the value."""
    rows = [entries[:count].tolist() for entries, count in zip(lists.entries, lists.lengths.tolist())]
    return [{(entry & 0xFFFFFFFF) + start: entry >> 32 for entry in row} for row in rows]


@pytest.mark.parametrize(
    "vocab, ranks, mode",
    [(4507, 3, "unbiased"), (2100, 4, "unbiased"), (4512, 3, "unbiased"), (4096, 2, "unbiased"), (4507, 2, "drop")],
    ids=["inside groups", "four of a tile", "at groups", "at tiles", "drop"],
)
@pytest.mark.parametrize("has_dense", [False, True], ids=["lists", "and dense"])
def test_lists_of_shards_are_those_of_one_device(vocab, ranks, mode, has_dense, poisoned_memory):
    from flce_ops.triton.gemm.class_blocks import LIVE
    from flce_ops.triton.gemm.tma import matrix_of
    from flce_ops.triton.rows.finish_rows import FinishedRows
    from flce_ops.triton.rows.valid_tokens import compact_tokens
    from flce_ops.triton.sparse.gather_sums import Lists
    from flce_ops.triton.sparse.sparse_lists import launch_carried, launch_lists
    from flce_ops.triton.sparse.sparse_or_dense import NONE_DENSE, DenseClasses, SparseRows

    if has_dense and mode == "drop":
        pytest.skip("what is dropped has no dense classes")
    sparse = SparseGradient(2.0**-7, mode, torch.tensor(11))
    whole = torch.randn(N, vocab).mul(2.0).exp()
    whole[:, 40:60] *= 300.0  # neighbours that are all kept: several entries in one group
    target = torch.randint(0, vocab, (N,))
    target[1] = -100
    valid_tokens, _ = compact_tokens(target, -100, vocab)
    row_sum, factor, residual = whole.sum(1), torch.rand(N) + 0.5, torch.rand(N) * 1e-3
    whole[torch.arange(N), 1900] -= row_sum  # the target's entry is negative

    def listed_rows(exponentials, dense):
        seed = sparse.gradient_seed if mode == "unbiased" else None
        of_rows = matrix_of(exponentials), row_sum, valid_tokens, dense
        return SparseRows(*of_rows, exponentials.shape[1], 2.0**-7, seed)

    def lists_of(exponentials, column, dense=NONE_DENSE, start=0, carried=None):
        finished = FinishedRows(exponentials[:, 0], factor, factor, residual)
        room = room_of_row(2.0**-7, vocab)
        lists = Lists(torch.empty(N, room, dtype=torch.int64), torch.empty(N, dtype=torch.int32), room)
        column = torch.full((N,), column)
        launch_lists(listed_rows(exponentials, dense), finished, column, lists, start, carried)
        return rows_of_lists(lists, start)

    rows, shards = -(-vocab // ranks), []
    for rank in range(ranks):
        own = whole[:, rank * rows : (rank + 1) * rows]
        exponentials = torch.full((N, -(-own.shape[1] // 4) * 4), torch.nan)[:, : own.shape[1]].copy_(own)
        dense = NONE_DENSE
        if has_dense:
            is_dense = (torch.rand(-(-own.shape[1] // LIVE.value)) < 0.3).int()
            is_dense[0] = rank % 2
            dense = DenseClasses(is_dense, None, is_dense.sum().int())
            # dense classes have no entries
            own.masked_fill_(is_dense.repeat_interleave(LIVE.value)[: own.shape[1]] > 0, 0.0)
        shards.append((rank * rows, exponentials, dense))

    def carried_of(gather):
        return [launch_carried(listed_rows(e, dense), Shard(start, rows, gather)) for start, e, dense in shards]

    carried = [None] * ranks
    if mode == "unbiased":
        lasts = []
        carried_of(lambda last: lasts.append(last) or torch.zeros(ranks, N, dtype=torch.int64))
        carried = carried_of(lambda _: torch.stack(lasts))
        assert all(bool(numbers.any()) == (rank > 0 and rows % 2048 > 0) for rank, numbers in enumerate(carried))
    found = [{} for _ in range(N)]
    for (start, exponentials, dense), before in zip(shards, carried):
        column = 1900 - start if start <= 1900 < start + rows else -1
        for row, part in zip(found, lists_of(exponentials, column, dense, start, before)):
            row.update(part)
    assert found == lists_of(whole, 1900)
    assert sum(map(len, found)) > (8 if mode == "drop" else 30)


@pytest.mark.parametrize("world", [pytest.param(("cpu", 2), id="interpreter2")])
def test_a_sparse_step_of_shards_equals_the_aten_one_and_one_device(world):
    run_in_world(world, sparse_steps)


def sparse_steps(device):
    from flce_ops.triton.sparse import sparse_or_dense
    from flce_ops.triton.steps.with_grad import launch_vocab_parallel_with_grad

    mesh = mesh_of(device, dist.get_world_size())
    before = sparse_or_dense.CLASSES_PER_ENTRY, sparse_or_dense.LISTS_COST
    # otherwise GEMMs would be faster for so few classes
    sparse_or_dense.CLASSES_PER_ENTRY, sparse_or_dense.LISTS_COST = 1, 0
    try:
        for chosen in (
            {},
            {"gradient_mode": "drop", "softcap": torch.tensor(4.0), "logit_scale": torch.tensor(-0.7)},
            {
                "gradient_sparse": "input",
                "z_loss": torch.tensor(1e-2),
                "ignored": 125,
            },  # two chunks
        ):
            sparse_step(mesh, launch_vocab_parallel_with_grad, **chosen)
    finally:
        sparse_or_dense.CLASSES_PER_ENTRY, sparse_or_dense.LISTS_COST = before


def sparse_step(mesh, launch, ignored=0, **chosen):
    tokens = 15 + ignored
    inputs = make_inputs((tokens, 35, 131), bias=True, weight=True, requires_grad=False)
    inputs.target[torch.randperm(tokens)[:ignored]] = -100
    start = 66 * mesh.get_local_rank()
    own = slice(start, min(start + 66, 131))
    row_scale = torch.linspace(-0.2, 1.0, tokens)
    sparse = {"gradient_threshold": 2.0**-4, "gradient_seed": torch.tensor(2**40 + 5), "output_mask": [True] * 3}
    arguments = sparse | chosen
    sharing = {"group": mesh.get_group().group_name, "ranks": 2, "vocab_start": start, "vocab_size": 131}
    operands = (inputs.input, inputs.linear_weight[own], inputs.target, inputs.linear_bias[own], inputs.weight)
    with flce_ops.workspace(1):
        found = launch(*operands, row_scale, **sharing, **arguments)
        expected = vocab_parallel_with_grad(*operands, row_scale, **sharing, **arguments)
    whole = aten.with_grad(*inputs.args, inputs.weight, row_scale, None, **arguments)
    exact = {name: value for name, value in arguments.items() if not name.startswith("gradient_")}
    dense = aten.with_grad(*inputs.args, inputs.weight, row_scale, None, **exact)
    for name, ours, aten_s in zip(("loss", "losses", "input", "weight", "bias"), found, expected):
        assert rows_apart(ours, aten_s) <= 2, (name, chosen)
    grad_input = found[2].clone()
    dist.all_reduce(grad_input)
    for name, ours, truth, gemms in zip(
        ("input", "weight"), (grad_input, found[3]), (whole[2], whole[3][own]), (dense[2], dense[3][own])
    ):
        assert rows_apart(ours, truth) <= 2, (name, chosen)
        sparse_one = chosen.get("gradient_sparse", "both") in ("both", {"weight": "linear_weight"}.get(name, name))
        assert (error(ours, gemms) > 1e-2) == sparse_one, (name, chosen)
