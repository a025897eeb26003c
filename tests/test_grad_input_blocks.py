"""Blocks of the float32 product that becomes grad_input: what they cover, how large they are, where they wait."""

# n tokens, D hidden, V vocabulary

import os

import pytest
import torch
from reference_loss import error

pytest.importorskip("triton")

from flce_ops.triton import grad_input
from flce_ops.triton.chunks import product_bytes, rows_that_fit
from flce_ops.triton.grad_input import float32_memory, product_blocks, write_grad_input

MiB = 2**20


def numbers_of(block, features):
    return (block.stop - block.start) * (features.stop - features.start)


def read(blocks):
    """Numbers read per class of the vocabulary."""
    return sum(block.stop - block.start + features.stop - features.start for block, features in blocks)


@pytest.mark.parametrize("numbers", [2**16, 2**21, 3 * 2**22], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 16), (300, 2304), (2048, 4096), (1664, 896), (1536, 5120), (130, 10000)], ids=str
)
def test_blocks_cover_the_product_once_and_fit_their_memory(shape, numbers):
    blocks = product_blocks(*shape, numbers)
    covered = torch.zeros(shape, dtype=torch.int8)
    for block, features in blocks:
        covered[block, features] += 1
        fits = numbers >= 128 * max(128, -(-shape[1] // 8 // 128) * 128)
        assert numbers_of(block, features) <= numbers or not fits and block.stop - block.start <= 128
    assert (covered == 1).all()


def test_blocks_read_no_more_than_whole_rows_or_whole_columns_would():
    blocks = product_blocks(2048, 4096, 2 * MiB)
    whole_rows = 4 * (512 + 4096)
    whole_columns = 4 * (2048 + 1024)
    assert read(blocks) <= min(whole_rows, whole_columns)
    assert product_blocks(2048, 4096, 2048 * 4096) == [(slice(0, 2048), slice(0, 4096))]


@pytest.mark.parametrize("start", range(8))  # offsets that are odd, rows too few, none
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


def test_what_chunks_leave_of_the_workspace_goes_to_the_product():
    fitting = rows_that_fit(8192, 32000, 2, 0)
    assert product_bytes(fitting, fitting, 32000, 2) == 8 * MiB
    assert product_bytes(fitting, 4096, 32000, 2) == 8 * MiB + (fitting - 4096) * 64000
    assert 4096 * 64000 + product_bytes(fitting, 4096, 32000, 2) <= 512 * MiB


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel runs for real on this machine")
@pytest.mark.parametrize("memory_numbers", [0, 100, 128 * 24, 300 * 24])
def test_the_product_waits_in_the_memory_it_is_given(memory_numbers, monkeypatch):
    n, d, v = 300, 24, 67
    e, w = torch.rand(n, v), torch.randn(v, d)
    target, factor, residual = torch.randint(v, (n,)), torch.randn(n), torch.randn(n)
    u, b = torch.randn(n), torch.randn(d)
    memory = torch.full((memory_numbers,), float("nan"))
    out = torch.full((n, d), float("nan"))
    made = []
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: made.append(args) or allocate(*args, **options))
    pieces = [(slice(0, 40), e[:, :40]), (slice(40, v), e[:, 40:])]
    write_grad_input(out, pieces, w, target, factor, residual, nbytes=0, memory=memory, copies=0, outer=(u, b))
    expected = factor[:, None].double() * (e.double() @ w.double()) + residual[:, None] * w[target].double()
    assert error(out, expected + u[:, None].double() * b) <= 5e-7
    fits = memory_numbers >= 128 * 24
    assert bool(made) is not fits
    if fits:
        assert not memory.isnan().all()


def test_workspace_or_memory_whichever_is_larger_bounds_a_block(monkeypatch):
    asked = []
    monkeypatch.setattr(grad_input, "product_blocks", lambda rows, hidden, numbers: asked.append(numbers) or [])
    out = torch.empty(4, 8)
    for numbers in (10, 30):
        write_grad_input(out, [], out, out, out, out, nbytes=80, memory=torch.empty(numbers), copies=0)
    assert asked == [20, 30]
