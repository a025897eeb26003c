"""The Triton kernels of a sparse gradient, in Triton's interpreter: float32, against the ATen path and torch."""

# N tokens, n rows, D hidden, V vocabulary, R room of a row's list

import inputs
import pytest
import torch
from marks import IN_INTERPRETER
from reference_loss import as_pair, dense_logits, error, rows_apart

import flce_ops
from flce_ops import aten
from flce_ops.math.sparse_gradient import SparseGradient, keep_entries, room_of_row
from flce_ops.triton import launch_backward, launch_with_grad
from flce_ops.triton.gemm.input_gradient import Finish
from flce_ops.triton.gemm.tiles import matrix_of
from flce_ops.triton.rows.valid_tokens import compact_tokens
from flce_ops.triton.sparse import gather_sums, sparse_or_dense
from flce_ops.triton.sparse.gather_sums import Lists, cut_lists, launch_gather_lists
from flce_ops.triton.sparse.sparse_lists import launch_lists
from flce_ops.triton.sparse.sparse_or_dense import (
    NONE_DENSE,
    DenseClasses,
    SparseRows,
    launch_class_order,
    lists_may_pay,
)
from flce_ops.triton.steps.chunks import slices

pytestmark = IN_INTERPRETER


@pytest.fixture
def short_lists(monkeypatch):
    """Allows lists although GEMMs would be faster for the few classes of a test."""
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.CLASSES_PER_ENTRY", 1)
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.LISTS_COST", 0)


def options(threshold, mode="unbiased", seed=2**40 + 5, of="both"):
    chosen = {"gradient_threshold": threshold, "gradient_mode": mode, "gradient_sparse": of}
    return chosen | {"gradient_seed": torch.tensor(seed)}


def dense_lists(lists, num_classes):
    """The lists as a matrix (n, V)."""
    out = torch.zeros(len(lists.lengths), num_classes)
    for row, (entries, count) in enumerate(zip(lists.entries, lists.lengths)):
        out[row, entries[:count] & 0xFFFFFFFF] = (entries[:count] >> 32).int().view(torch.float32)
        assert len(set((entries[:count] & 0xFFFFFFFF).tolist())) == count
    return out


def random_lists(n, num_classes, room):
    count = torch.randint(0, room + 1, (n,), dtype=torch.int32)
    entries = torch.full((n, room), -1)
    for row in range(n):
        frequent = 1.0 / torch.arange(1, num_classes + 1)
        classes = torch.multinomial(frequent, max(int(count[row]), 1))[: count[row]]
        values = torch.randn(len(classes)).view(torch.int32).long()
        entries[row, : count[row]] = values << 32 | classes
    return Lists(entries, count, room)


@pytest.mark.parametrize("num_classes", [2053, 4096], ids=["ragged", "even"])
@pytest.mark.parametrize("mode", ["unbiased", "drop"])
def test_lists_hold_what_the_aten_path_keeps(mode, num_classes, poisoned_memory):
    n, threshold, padded = 4, 2.0**-7, -(-num_classes // 4) * 4
    exponentials = torch.full((n, padded), torch.nan)[:, :num_classes]
    exponentials.copy_(torch.randn(n, num_classes).mul(2.0).exp())
    exponentials[:, 40:60] *= 300.0  # neighbours that are all kept: several entries in one group
    target = torch.randint(0, num_classes, (n,))
    target[1] = -100
    valid_tokens, _ = compact_tokens(target, -100, num_classes)
    order = valid_tokens.order[: valid_tokens.total].long()
    row_sum = exponentials.sum(1)
    exponentials[torch.arange(n), 7] -= row_sum  # the target's entry is negative
    column, factor = torch.full((n,), 7), torch.rand(n) + 0.5
    residual = torch.rand(n) * 1e-3
    finish = Finish(factor, column, residual)
    room = room_of_row(threshold, num_classes)
    lists = Lists(torch.empty(n, room, dtype=torch.int64), torch.empty(n, dtype=torch.int32), room)
    sparse = SparseGradient(threshold, mode, torch.tensor(11))
    seed = sparse.gradient_seed if mode == "unbiased" else None
    of_rows = matrix_of(exponentials), row_sum, valid_tokens, NONE_DENSE
    launch_lists(SparseRows(*of_rows, num_classes, threshold, seed), finish, lists)
    count = len(order)
    expected = exponentials[:count] * factor[:count, None]
    keep_entries(expected, row_sum[:count] * factor[:count], sparse, order)
    expected[:, 7] += residual[:count]
    found = dense_lists(lists, num_classes)
    assert not found[count:].any()
    assert (found != 0.0).sum() > (20 if mode == "unbiased" else 6)
    # the two paths round their shares differently, so one in 10^5 entries may be another one
    assert ((found[:count] != 0.0) != (expected != 0.0)).sum() <= 2
    both = (found[:count] != 0.0) & (expected != 0.0)
    torch.testing.assert_close(found[:count][both], expected[both], rtol=1e-6, atol=0.0)


def test_several_programs_share_a_long_list():
    """A list has a program for each 1024 places; two take turns of 256 entries."""
    n, num_classes, room = 5, 2100, 2048
    count = torch.tensor([0, 1, 129, 700, room], dtype=torch.int32)
    entries = torch.full((n, room), -1)
    for row in range(n):
        values = torch.randn(int(count[row])).view(torch.int32).long()
        entries[row, : count[row]] = values << 32 | torch.randperm(num_classes)[: count[row]]
    lists = Lists(entries, count, room)
    assert lists.walkers == 2
    matrix = dense_lists(lists, num_classes)
    valid_tokens, _ = compact_tokens(torch.zeros(n, dtype=torch.int64), -100, num_classes)
    classes = launch_class_order(lists, num_classes, rows=2, splits=30, order=valid_tokens.order)
    assert torch.equal(classes.behind, (matrix != 0.0).sum(0).cumsum(0).int())
    column, token = matrix.T.nonzero().unbind(1)
    found = classes.entries[: classes.behind[-1]]
    assert torch.equal(found & 0xFFFFFFFF, token)
    assert torch.equal((found >> 32).int().view(torch.float32), matrix[token, column])


@pytest.mark.parametrize("add", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("rows", [1, 32, 300], ids="{} tokens a block".format)
def test_lists_by_class_and_their_sums(rows, add, poisoned_memory, monkeypatch):
    monkeypatch.setattr(gather_sums, "SPLIT", 30)
    n, num_classes, hidden, room = 261, 17, 70, 3
    lists = random_lists(n, num_classes, room)
    matrix = dense_lists(lists, num_classes)
    target = torch.zeros(n, dtype=torch.int64)
    valid_tokens, _ = compact_tokens(target, -100, num_classes)
    classes = launch_class_order(lists, num_classes, rows=rows, splits=30, order=valid_tokens.order)
    entries, total = classes.entries[: classes.behind[-1]], (matrix != 0.0).sum(0)
    assert torch.equal(classes.behind, total.cumsum(0).int())
    token, column = matrix.T.nonzero()[:, 1], matrix.T.nonzero()[:, 0]
    assert torch.equal(entries & 0xFFFFFFFF, token)
    assert torch.equal((entries >> 32).int().view(torch.float32), matrix[token, column])
    assert (total > classes.split).any() and (total <= classes.split).any()
    assert 1 < classes.splits[-1] <= 30

    table, out = torch.randn(n, hidden), torch.randn(num_classes, hidden)
    expected = matrix.double().T @ table.double() + (out if add else 0.0)
    launch_gather_lists(classes, table, out, add=add, columns=1024, splits=30)
    assert error(out, expected) < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("add", [False, True], ids=["written", "added"])
def test_sums_of_token_lists_of_which_some_are_cut(add, poisoned_memory, monkeypatch):
    n, num_classes, hidden, room = 23, 40, 300, 37
    lists = random_lists(n, num_classes, room)
    whole = n // 2
    lists.entries[whole] = torch.randn(room).view(torch.int32).long() << 32 | torch.randperm(num_classes)[:room]
    lists.lengths[[0, whole]] = torch.tensor([0, room], dtype=torch.int32)
    monkeypatch.setattr(gather_sums, "SPLIT", 8)
    cut = cut_lists(lists, 1000)
    assert cut.split == 8 and cut.splits[whole] - cut.splits[whole - 1] == -(-room // 8)
    weight, rows = torch.randn(hidden, num_classes).T, torch.randn(n, hidden)
    expected = dense_lists(lists, num_classes).double() @ weight.double() + (rows if add else 0.0)
    launch_gather_lists(cut, weight, rows, add=add, columns=256, splits=1000)
    assert error(rows, expected) < 1e-6


@pytest.mark.parametrize("mode, bias", [("unbiased", False), ("drop", True)])
def test_a_step_agrees_with_the_aten_path(mode, bias, short_lists, poisoned_memory):
    made = inputs.make_inputs((15, 35, 67), bias=bias, weight=True, requires_grad=False)
    args = (*made.args, made.weight, torch.rand(15), None)
    chosen = options(2.0**-4, mode) | {"output_mask": [True, True, bias], "z_loss": torch.tensor(1e-2)}
    for ours, expected in zip(launch_with_grad(*args, **chosen), aten.with_grad(*args, **chosen), strict=True):
        assert rows_apart(ours, expected) <= 2
    exact = launch_with_grad(*args, output_mask=[True, True, bias], z_loss=chosen["z_loss"])
    assert error(launch_with_grad(*args, **chosen)[2], exact[2]) > 1e-2


CAPPED = {"softcap": torch.tensor(1.5), "logit_scale": torch.tensor(-0.7)}


@pytest.mark.parametrize("of, dense, mode", [("input", 3, "unbiased"), ("linear_weight", 2, "drop")])
def test_a_gradient_that_is_not_chosen_is_made_by_gemms(of, dense, mode, short_lists, poisoned_memory):
    made = inputs.make_inputs((15, 35, 67), bias=True, requires_grad=False)
    made.target[made.target >= 0] %= 60
    args = (*made.args, None, torch.rand(15), None)
    chosen = options(2.0**-4, mode, of=of) | {"output_mask": [True] * 3} | CAPPED
    found, both = launch_with_grad(*args, **chosen), launch_with_grad(*args, **chosen | {"gradient_sparse": "both"})
    exact = launch_with_grad(*args, output_mask=[True] * 3, **CAPPED)
    for index, (ours, lists, gemms) in enumerate(zip(found, both, exact)):
        assert error(ours, gemms if index == dense else lists) < 1e-6
    assert error(found[5 - dense], exact[5 - dense]) > 1e-2


def test_soft_targets_have_several_entries_of_their_own(short_lists, poisoned_memory):
    made = inputs.make_inputs((15, 20, 67), requires_grad=False)
    target = torch.randint(0, 67, (15, 5))
    target[3], target[4, 2:], target[5, 1] = -100, -100, target[5, 0]
    args = (*made.args[:2], target, None, None, None, None)
    chosen = options(2.0**-4) | {"output_mask": [True, True, False], "target_weight": torch.rand(15, 5) / 5}
    for ours, expected in zip(launch_with_grad(*args, **chosen), aten.with_grad(*args, **chosen), strict=True):
        assert rows_apart(ours, expected) <= 2


def cotangents(kind):
    """Cotangents of target logit and lse; in one case the second is far smaller, in another it is absent."""
    a, l = torch.randn(2, 15)
    return {"loss": (-l, l), "any": (a, l), "no lse": (a, None), "no target": (None, l), "few": (a, 1e-20 * l)}[kind]


KINDS = {"loss": {}, "any": CAPPED, "no lse": {}, "no target": CAPPED, "few": {}}


@pytest.mark.parametrize("kind, logits", KINDS.items(), ids=KINDS)
def test_backward_agrees_with_the_aten_path(kind, logits, short_lists, poisoned_memory):
    made = inputs.make_inputs((15, 20, 67), bias=True, requires_grad=False)
    lse = dense_logits(made.input, made.linear_weight, made.linear_bias, **logits).logsumexp(1)
    args = (*cotangents(kind), None, *made.args, None, as_pair(lse))
    chosen = options(2.0**-4) | {"output_mask": [True] * 3} | logits
    found = launch_backward(*args, **chosen)
    assert "a sparse gradient" in flce_ops.last_path().reason
    exact = aten.backward(*args, output_mask=[True] * 3, **logits)
    for ours, expected in zip(found, aten.backward(*args, **chosen), strict=True):
        assert rows_apart(ours, expected) <= 2
    assert kind in ("no lse", "few") or error(found[1], exact[1]) > 1e-2


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False]], ids=["dX only", "dW only"])
def test_a_step_makes_only_the_gradient_asked_for(mask, short_lists, poisoned_memory):
    args = (*inputs.make_inputs((11, 20, 67), requires_grad=False).args, None, None)
    both = launch_with_grad(*args, output_mask=[True, True, False], **options(2.0**-5))
    found = launch_with_grad(*args, output_mask=mask, **options(2.0**-5))
    for ours, expected, wanted in zip(found[2:4], both[2:4], mask):
        assert torch.equal(ours, expected) if wanted else not ours.numel()


def test_the_entries_of_a_span_are_counted_in_int32():
    from flce_ops.triton.sparse.sparse_step import span_at_most

    with flce_ops.workspace(64 << 30):
        assert span_at_most(1 << 20, 128256, room=8320) == (2**31 - 1) // 8320 // 128 * 128


@pytest.mark.exhaustive
@pytest.mark.parametrize("classes_per_entry", [1, 96], ids=["lists", "GEMMs"])
def test_several_spans_of_several_chunks(classes_per_entry, monkeypatch, poisoned_memory):
    """Where lists are too long, the GEMMs of an exact step replace them."""
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.CLASSES_PER_ENTRY", classes_per_entry)
    # the device decides between lists and GEMMs
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.USUAL_SHARE", 0.0)
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.LISTS_COST", 0)
    args = (*inputs.make_inputs((28, 16, 67), requires_grad=False).args, None, None)
    chosen = options(2.0**-4) | {"output_mask": [True, True, False]}
    whole = launch_with_grad(*args, **chosen)
    assert flce_ops.last_path().chunks == 1
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_step.span_at_most", lambda *_: 16)
    monkeypatch.setattr("flce_ops.triton.steps.chunks.Problem.chunks", lambda self: slices(self.tokens, 12, 4))
    cut = launch_with_grad(*args, **chosen)
    assert flce_ops.last_path().chunks == 3  # 12 and 4 of a span of 16, and 12
    for ours, expected in zip(cut, whole, strict=True):
        assert error(ours, expected) < 1e-6
    exact = launch_with_grad(*args, output_mask=[True, True, False])
    errors = [error(ours, expected) for ours, expected in zip(whole[2:4], exact[2:4])]
    assert max(errors) < 1e-6 if classes_per_entry == 96 else min(errors) > 1e-2


def test_where_lists_cannot_pay_the_exact_step_runs_and_says_so(poisoned_memory):
    """With a small D, or a threshold that is low for V, no lists are made, because they would be too long."""
    args, mask = (*inputs.make_inputs((28, 16, 67), requires_grad=False).args, None, None), [True, True, False]
    exact = launch_with_grad(*args, output_mask=mask)
    for mode in ("unbiased", "drop"):
        found = launch_with_grad(*args, output_mask=mask, **options(2.0**-4, mode))
        is_exact = [torch.equal(ours, theirs) for ours, theirs in zip(found, exact, strict=True)]
        assert all(is_exact) if mode == "unbiased" else not any(is_exact[2:4])
        assert ("an exact gradient: so low a gradient_threshold" in flce_ops.last_path().reason) == (mode == "unbiased")
    lse = as_pair(dense_logits(*args[:2]).logsumexp(1))
    losses = torch.randn(28), torch.randn(28), None
    exact = launch_backward(*losses, *args[:5], lse, output_mask=mask)
    found = launch_backward(*losses, *args[:5], lse, output_mask=mask, **options(2.0**-4))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[:2], exact[:2]))
    assert "an exact gradient" in flce_ops.last_path().reason


@pytest.mark.parametrize(
    # the lowest threshold with lists, for the problems of sparse.csv, and for D = 320
    ("hidden", "num_classes", "lowest"),
    [(1024, 50304, 2.0**-11), (4096, 128256, 2.0**-13), (320, 128256, None)],
)
def test_the_threshold_from_which_lists_may_pay(hidden, num_classes, lowest):
    powers = [2.0**-k for k in range(6, 14)]
    paying = [threshold for threshold in powers if lists_may_pay(threshold, num_classes, hidden)]
    assert paying == [threshold for threshold in powers if lowest is not None and threshold >= lowest]


def two_kinds_of_classes(tokens, hidden, num_classes, frequent):
    """Logits are 6 higher for the first classes. The operands need no gradients."""
    made = inputs.make_inputs((tokens, hidden, num_classes), requires_grad=False)
    made.input[:, 0] = 1.0
    made.linear_weight.mul_(0.3)[:frequent, 0] += 6.0
    return made


def test_a_block_of_classes_is_dense_if_its_lists_take_longer_than_its_gemms(monkeypatch):
    """128 classes cost as much as the lists of 128 / CLASSES_PER_ENTRY entries a token."""
    n, kept = 8, (64, 16, 40)
    monkeypatch.setattr(sparse_or_dense, "CLASSES_PER_ENTRY", 4)
    monkeypatch.setattr(sparse_or_dense, "worth", lambda classes, hidden: 1000.0)
    exponentials = torch.cat([(torch.arange(128) < number).float().expand(n, 128) for number in kept], 1).contiguous()
    valid_tokens, _ = compact_tokens(torch.zeros(n, dtype=torch.int64), -100, 384)
    dense = DenseClasses(*(torch.empty(size, dtype=torch.int32) for size in ((3,), (4,), ())))
    rows = SparseRows(matrix_of(exponentials), torch.ones(n), valid_tokens, dense, 384, 0.5, None)
    sparse_or_dense.launch_sparse_or_dense(rows, 16)
    assert dense.is_dense.tolist() == [1, 0, 1] and dense.number == 2 and dense.which[:2].tolist() == [0, 2]


@pytest.mark.parametrize("hidden, block", [(20, 256), (300, 512), (1100, 1024)])
def test_a_program_of_a_list_has_at_most_so_many_columns(hidden, block, monkeypatch):
    launched = []

    class Launcher:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(options["BLOCK_D"]) or self.kernel[grid](*args, **options)

    for name in ("sum_splits_kernel", "sum_lists_kernel"):
        monkeypatch.setattr(gather_sums, name, Launcher(getattr(gather_sums, name)))
    monkeypatch.setattr(gather_sums, "SPLIT", 8)
    cut = cut_lists(random_lists(3, 50, 20), 100)
    launch_gather_lists(cut, torch.randn(50, hidden), torch.empty(3, hidden), add=False, columns=1024, splits=100)
    assert launched == [block] * 2


def test_classes_that_many_tokens_keep_have_their_exact_gradient(monkeypatch, poisoned_memory):
    """The other classes have what the lists hold: the entries of the ATen path without these classes, since both are
    sums over rows.
    """
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.LISTS_COST", 0)
    tokens, num_classes, frequent = 40, 600, 128
    made = two_kinds_of_classes(tokens, 12, num_classes, frequent)
    args, mask = (*made.args, None, None), {"output_mask": [True, True, False]}
    chosen = options(2.0**-4)
    found = launch_with_grad(*args, **mask, **chosen)
    exact = launch_with_grad(*args, **mask)
    sampled = aten.with_grad(*args, **mask, **chosen)
    assert error(found[3][:frequent], exact[3][:frequent]) < 1e-6
    assert error(sampled[3][:frequent], exact[3][:frequent]) > 1e-2
    assert error(found[3][frequent:], exact[3][frequent:]) > 2e-3
    assert 1e-4 < error(found[2], exact[2]) < error(sampled[2], exact[2])
    g = found[3][frequent:]
    valid_tokens = g.abs().sum(1) > 0.0
    assert 0 < valid_tokens.sum() < valid_tokens.numel() // 2
