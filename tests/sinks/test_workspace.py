"""Which workspace applies: nested blocks, overlapping blocks in threads, blocks left open, and set_workspace between
them.
"""

# N tokens, D hidden, V vocabulary

import gc
import itertools
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from inputs import make_inputs
from reference_loss import error

import flce_ops
from flce_ops import get_workspace, set_workspace, workspace
from flce_ops.support import Chip
from flce_ops.support import workspace as budgets

DEFAULT = 512 * 2**20
SHAPE = (300, 8, 2000)  # 5 chunks with the smallest workspace


@pytest.fixture(autouse=True)
def nothing_left_behind():
    assert get_workspace() == DEFAULT
    yield
    left = get_workspace()
    budgets.temporary.set(budgets.AUTO)
    assert left == DEFAULT


@pytest.fixture
def threads():
    """Three threads that run one task at a time."""
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    yield [lambda function, pool=pool: pool.submit(function).result() for pool in pools]
    for pool in pools:
        pool.shutdown()


@pytest.mark.parametrize("leaving", list(itertools.permutations(range(3))), ids=str)
def test_the_block_entered_last_decides_whatever_the_order_of_leaving(leaving, threads):
    blocks = [workspace(2**20 + number) for number in range(3)]
    for number, (in_thread, block) in enumerate(zip(threads, blocks, strict=True)):
        in_thread(block.__enter__)
        assert {get_workspace(), *(other(get_workspace) for other in threads)} == {2**20 + number}
    still_open = list(range(3))
    for number in leaving:
        threads[number](lambda block=blocks[number]: block.__exit__(None, None, None))
        still_open.remove(number)
        assert get_workspace() == (2**20 + still_open[-1] if still_open else DEFAULT)


def test_blocks_of_one_size_are_not_taken_for_each_other():
    first, second, third = workspace(2**20), workspace(2**21), workspace(2**20)
    for block in (first, second, third):
        block.__enter__()
    third.__exit__(None, None, None)
    assert get_workspace() == 2**21
    first.__exit__(None, None, None)
    assert get_workspace() == 2**21
    second.__exit__(None, None, None)


def test_a_block_acts_on_calls_and_backward_in_other_threads(device, threads):
    """On CUDA, backward runs in a thread of autograd's, which does not inherit the caller's context."""
    inputs = make_inputs(SHAPE, device=device, dtype=torch.float32)
    losses = flce_ops.linear_cross_entropy(*inputs.args, reduction="none")
    with workspace(1):
        threads[0](losses.sum().backward)
        assert flce_ops.last_path().op == "linear_cross_entropy_backward" and flce_ops.last_path().chunks > 1
        threads[1](lambda: flce_ops.linear_cross_entropy(*inputs.args))
        assert flce_ops.last_path().op == "linear_cross_entropy_with_grad" and flce_ops.last_path().chunks > 1


def test_blocks_of_many_threads_leave_the_set_value():
    def enter_and_leave(thread):
        for turn in range(200):
            with workspace(1 + thread), workspace(2**20 + turn):
                assert get_workspace() > 0

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(enter_and_leave, range(4)))
    finally:
        sys.setswitchinterval(switch)
    assert get_workspace() == DEFAULT


def test_a_block_left_by_an_exception_is_closed(threads):
    others = workspace(2**20)
    with workspace(2**22):
        with pytest.raises(ZeroDivisionError), workspace(2**21):
            threads[0](others.__enter__)
            raise ZeroDivisionError
        assert get_workspace() == 2**20
    others.__exit__(None, None, None)


def test_a_suspended_generator_keeps_its_block_open_until_it_is_collected():
    def steps():
        with workspace(2**20):
            yield

    suspended = steps()
    next(suspended)
    with workspace(2**21):
        assert get_workspace() == 2**21
    assert get_workspace() == 2**20
    del suspended
    gc.collect()
    assert get_workspace() == DEFAULT


def test_set_workspace_inside_a_block_holds_at_once_and_stays(threads):
    with workspace(2**20):
        threads[0](lambda: set_workspace(2**24))
        assert get_workspace() == 2**24
        with workspace(2**21):  # entered after the other block
            assert get_workspace() == 2**21
        assert get_workspace() == 2**24
    assert get_workspace() == 2**24
    set_workspace(DEFAULT)


def test_a_block_can_be_a_decorator():
    @workspace(2**20)
    def inside(depth):
        return get_workspace() if depth == 0 else inside(depth - 1)

    assert inside(3) == 2**20
    assert get_workspace() == DEFAULT


@pytest.mark.parametrize("bytes", [0, -1, 0.5, 2.0**20 + 0.5, float("nan"), float("inf"), "1GB", True, None])
@pytest.mark.parametrize("function", [set_workspace, lambda bytes: workspace(bytes).__enter__()], ids=["set", "block"])
def test_what_is_no_positive_number_of_bytes_is_refused(function, bytes):
    with pytest.raises(ValueError, match='workspace: expected "auto" or a positive number of bytes'):
        function(bytes)


@pytest.mark.parametrize("bytes", [1e9, numpy.int64(10**9), numpy.float64(1e9)])
def test_a_whole_number_of_any_type_is_a_number_of_bytes(bytes):
    with workspace(bytes, retained=bytes):
        assert get_workspace() == budgets.get_retained() == 10**9 and type(get_workspace()) is int


@pytest.mark.parametrize("argument", ["nbytes", "retained"])
@pytest.mark.parametrize(
    "function", [set_workspace, lambda **bytes: workspace(**bytes).__enter__()], ids=["set", "block"]
)
def test_so_few_bytes_that_mib_are_meant_are_warned_of(function, argument, monkeypatch):
    monkeypatch.setattr(budgets, "_retained", budgets.Budget(None))
    with pytest.warns(UserWarning, match="workspace: 512 bytes hold no row .* for 512 MiB pass 512 << 20"):
        function(**{argument: 512})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_workspace(DEFAULT, retained=0)


class ChangesAtEachReading(list):
    """Replaces the open blocks: every time a kernel asks, the workspace is different."""

    def __getitem__(self, index):
        self.append(None)
        return [type("Block", (), {"nbytes": (1, 2**14, 2**29, 2**17)[len(self) % 4]})]


@pytest.mark.parametrize("function", ["loss", "losses", "divergence"])
def test_results_are_right_when_another_thread_changes_the_workspace_during_a_call(function, monkeypatch):
    def call(*args):
        if function == "divergence":
            x, w, *_ = args
            return flce_ops.linear_kl_div(x, w, x.detach().flip(0), w.detach().flip(0))
        return flce_ops.linear_cross_entropy(*args, reduction="mean" if function == "loss" else "none").sum()

    inputs = make_inputs(SHAPE, dtype=torch.float64)
    exact = torch.autograd.grad(call(*inputs.args), inputs.args[:2])
    readings = ChangesAtEachReading()
    with monkeypatch.context() as patched:  # undone before nothing_left_behind looks
        patched.setattr(sys.modules["flce_ops.support.workspace"].temporary, "blocks", readings)
        found = torch.autograd.grad(call(*inputs.args), inputs.args[:2])
    assert readings
    for ours, truth in zip(found, exact, strict=True):
        assert error(ours, truth) < 1e-13


@pytest.mark.parametrize("block", [lambda: workspace(1), flce_ops.gradients_in_backward])
def test_a_block_inside_a_compiled_function_is_a_graph_break(block):
    """A graph would silently use the setting that applies outside."""
    inputs = make_inputs(SHAPE, dtype=torch.float32)

    def inside(*args):
        with block():
            return flce_ops.linear_cross_entropy(*args)

    torch.compile(inside, backend="eager")(*inputs.args)
    path = flce_ops.last_path()
    assert path.chunks > 1 or path.op == "linear_cross_entropy_forward"
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it outside the compiled function"):
        torch.compile(inside, backend="eager", fullgraph=True)(*inputs.args)


def test_gradients_are_left_to_backward_until_the_last_block_ends():
    inputs = make_inputs(SHAPE, dtype=torch.float32)

    def made_in_forward():
        flce_ops.linear_cross_entropy(*inputs.args)
        return flce_ops.last_path().op == "linear_cross_entropy_with_grad"

    with pytest.raises(ZeroDivisionError), flce_ops.gradients_in_backward():
        with flce_ops.gradients_in_backward():
            assert not made_in_forward()
        assert not made_in_forward()
        raise ZeroDivisionError
    assert made_in_forward()


def test_a_chunk_holds_2048_rows_by_default_and_512_at_least(monkeypatch):
    pytest.importorskip("triton")
    from flce_ops.triton.steps.chunks import best_chunking, problem_of

    head = torch.empty(256000, 2304, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr("flce_ops.triton.steps.chunks.multiprocessors", lambda matrix: 132)
    monkeypatch.setattr("flce_ops.triton.gemm.tiles.chip_of", lambda device: Chip(90, 132))

    def rows() -> int:
        return best_chunking(problem_of(16384, head, [True, True, False])).chunks[0].stop

    assert 1024 < rows() <= 2048  # 1000 MiB of logits; the chunks may be smaller if they fill the device better
    with workspace(512 << 20):
        assert 512 < rows() <= 1024
    with workspace(64 << 20):
        assert rows() == 512  # 250 MiB
        with workspace("auto"):
            assert rows() > 1024


def test_auto_is_the_name_of_the_default_and_the_path_tells_the_setting():
    def setting() -> int | str:
        flce_ops.linear_cross_entropy(torch.randn(4, 8), torch.randn(9, 8), torch.arange(4))
        return flce_ops.last_path().workspace

    set_workspace(1 << 20)
    assert setting() == 1 << 20
    with workspace("auto"):
        assert setting() == "auto" and get_workspace() == DEFAULT
    set_workspace("auto")
    assert setting() == "auto" and get_workspace() == DEFAULT
    with pytest.raises(ValueError, match="got 'all'"):
        set_workspace("all")
