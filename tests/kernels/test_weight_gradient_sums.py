"""Sums of grad_linear_weight over chunks have a separate scale for each row: they are as accurate as one rounding."""

# N tokens, n rows of a chunk, D hidden, V vocabulary, S splits of V

from dataclasses import replace

import pytest
import torch
from interpreter import let_tensor_maps_add
from reference_loss import error
from test_gradient_gemms import interpreter, valid_tokens_of

pytest.importorskip("triton")


from flce_ops.triton.gemm.tiles import EVERY_BLOCK, WEIGHT_TILES, ClassBlocks
from flce_ops.triton.gemm.weight_gradient import WeightGradient


def summed_over_chunks(e, x, chunks, dtype, valid=None, blocks=EVERY_BLOCK):  # (N, V), (N, D)
    """The sum by WeightGradient, and the exact sum."""
    tokens, valid = e.shape[0], e.shape[0] if valid is None else valid
    out = torch.full((e.shape[1], x.shape[1]), torch.nan, dtype=dtype, device=e.device)
    gradient = WeightGradient(out, tokens, chunks, blocks=blocks)
    size = tokens // chunks
    for start in range(0, tokens, size):
        rows = slice(start, start + size)
        here = valid_tokens_of(valid, size, start, e.device)
        gradient.add(e[rows], x[rows], here)
    return out, e.double().T @ x.double()


def row_errors(found, exact):
    return (found.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-300)


def cut_off(exact):
    """Rounds to bfloat16 as the interpreter does, towards zero."""
    return (exact.float().view(torch.int32) & -(1 << 16)).view(torch.float32)


@interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunks", [2, 16])
def test_sums_over_chunks_are_as_exact_as_one_rounding(chunks, dtype):
    e, x = torch.rand(32 * chunks, 67), torch.randn(32 * chunks, 70)
    found, exact = summed_over_chunks(e, x, chunks, dtype)
    once = cut_off(exact) if dtype == torch.bfloat16 else exact.to(dtype)
    assert error(found, exact) <= 1.02 * error(once, exact) + 2e-4 * chunks**0.5


@interpreter
@pytest.mark.parametrize("growth", [1e-15, 1e-9, 1.0, 1e9, 1e20])
def test_rows_of_any_size_are_summed_in_units_of_their_own(growth):
    """One class is improbable for all tokens of the first chunks, another one only for the rest."""
    e = torch.rand(160, 67) * torch.logspace(-20, 12, 67)
    e[64:] *= torch.where(torch.arange(67) % 2 == 0, growth, 1.0)
    e[:, 3], e[:96, 4] = 0.0, 0.0
    x = torch.randn(160, 70)
    found, exact = summed_over_chunks(e, x, 5, torch.bfloat16)
    of_rows = row_errors(found, exact)
    assert of_rows.max() <= 6e-3, of_rows  # truncated to the 8 bits of bfloat16


@interpreter
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 5e-3), (torch.float16, 1.5e-3)], ids=str)
def test_a_large_feature_takes_no_digits_from_the_others(dtype, bound):
    """Without tensor maps. With tensor maps, memory adds the sums, and the range that this needs costs digits of small
    features.
    """
    e, x = torch.rand(640, 67), torch.randn(640, 70)
    x[:, 7] *= 1e4 if dtype == torch.bfloat16 else 1e2
    found, exact = summed_over_chunks(e, x, 20, dtype)
    others = torch.arange(70) != 7
    assert error(found[:, others], exact[:, others]) <= bound


@interpreter
@pytest.mark.parametrize("valid", [1, 32, 64])
def test_a_first_chunk_with_all_valid_tokens_is_the_result(valid):
    e, x = torch.rand(192, 67), torch.randn(192, 70)
    e[valid:] = 0.0
    found, exact = summed_over_chunks(e, x, 3, torch.bfloat16, valid)
    assert torch.equal(found, summed_over_chunks(e[:64], x[:64], 1, torch.bfloat16, valid)[0])
    assert error(found, exact) <= 1.02 * error(cut_off(exact), exact)


@interpreter
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_and_leaves_the_rest_alone(number):
    e, x = torch.rand(96, 67), torch.randn(96, 70)
    x[40, 5] = number
    found, exact = summed_over_chunks(e, x, 3, torch.bfloat16)
    others = torch.arange(70) != 5
    assert not found[:, 5].isfinite().any() and error(found[:, others], exact[:, others]) <= 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the memory adds where tensor maps are")
@pytest.mark.parametrize("growth", [1e-15, 1e-9, 1.0, 1e9, 1e20])
@pytest.mark.parametrize("d", [512, 520, 640])  # whole blocks of features, and a ragged last one
def test_rows_that_overflow_their_scale_are_made_again(growth, d):
    """Where memory adds the sums: only these rows of these tiles are computed again."""
    e = torch.rand(1280, 600, device="cuda") * torch.logspace(-15, 9, 600, device="cuda")
    e[512:] *= torch.where(torch.arange(600, device="cuda") % 7 == 0, growth, 1.0)
    e[:, 3], e[:768, 4] = 0.0, 0.0
    e, x = e.bfloat16(), torch.randn(1280, d, device="cuda").bfloat16()
    x[700, 9], others = torch.nan, torch.arange(d, device="cuda") != 9
    found, exact = summed_over_chunks(e, x, 5, torch.bfloat16)
    assert found[:, 9].isnan().all()
    found, exact = found.double()[:, others], exact[:, others]
    of_rows = row_errors(found, exact)
    assert of_rows.max() <= 2.2e-3, of_rows
    assert torch.equal(found, summed_over_chunks(e, x, 5, torch.bfloat16)[0].double()[:, others])


@pytest.fixture
def by_tensor_maps(monkeypatch):
    """Makes the weight gradient's GEMM use tensor maps."""
    let_tensor_maps_add(monkeypatch)
    tiles = replace(WEIGHT_TILES["interpreter"], block_m=32, tma=True)
    monkeypatch.setitem(WEIGHT_TILES, "interpreter", tiles)


@interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("valid", [0, 1, 32, 33, 160])
def test_sums_that_the_memory_adds_are_as_exact_as_one_rounding(valid, dtype, by_tensor_maps):
    e, x = torch.rand(160, 72), torch.randn(160, 80)
    e[valid:], x[valid:] = 0.0, 0.0
    found, exact = summed_over_chunks(e, x, 5, dtype, valid)
    once = cut_off(exact) if dtype == torch.bfloat16 else exact.to(dtype)
    assert error(found, exact) <= 1.02 * error(once, exact) + 5e-4


@interpreter
@pytest.mark.parametrize("first", [0.0, 1e-36, 1e-9, 1.0])
@pytest.mark.parametrize("later", [1e-9, 1.0, 1e9, 1e12, 1e30])  # 1e9 is inf in 2^-100, the unit of a row of zeros
def test_what_exceeds_its_unit_is_made_again(first, later, by_tensor_maps):
    e, x = torch.rand(160, 72), torch.randn(160, 80)
    e[:32, 5], e[32:, 5] = e[:32, 5] * first, e[32:, 5] * later
    found, exact = summed_over_chunks(e, x, 5, torch.bfloat16)
    of_rows = row_errors(found, exact)
    assert of_rows.max() <= 6e-3, of_rows  # truncated to the 8 bits of bfloat16


@interpreter
def test_rows_that_exceed_their_unit_are_found_wherever_they_are(by_tensor_maps):
    """In the first block of classes, in the last, and beside others, in more blocks than a program reads at once."""
    e, x = torch.rand(96, 2008), torch.randn(96, 80)
    overflow = torch.tensor([0, 31, 32, 1100, 1101, 2007])
    e[:32, overflow] *= 1e-9
    found, exact = summed_over_chunks(e, x, 3, torch.bfloat16)
    of_rows = row_errors(found, exact)
    assert of_rows.max() <= 6e-3, of_rows  # truncated to the 8 bits of bfloat16


@interpreter
def test_rows_that_exceed_their_unit_are_found_in_a_list_of_blocks(by_tensor_maps):
    """Blocks of 128 classes, as sparse gradients list them, in tiles of 32: every tile of a listed block is looked at,
    and no other.
    """
    e, x = torch.rand(96, 520), torch.randn(96, 80)
    e[:32] *= 1e-9
    which = torch.tensor([0, 2, 4, 0], dtype=torch.int32)
    listed = torch.isin(torch.arange(520) // 128, which)
    blocks = ClassBlocks(torch.tensor(3, dtype=torch.int32), which)
    found, exact = summed_over_chunks(e, x, 3, torch.bfloat16, blocks=blocks)
    assert found[~listed].isnan().all()  # as it was
    of_rows = row_errors(found, exact)
    assert of_rows[listed].max() <= 6e-3, of_rows  # truncated to the 8 bits of bfloat16


@interpreter
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_what_is_not_finite_does_not_exceed_its_unit(number, by_tensor_maps):
    """Checked where the rest of the row exceeds its unit, in another row, and in a chunk whose rows fit."""
    e, x = torch.rand(160, 72), torch.randn(160, 80)
    x[70, 5], x[130, 6] = number, number
    e[:64, 5], e[64:, 5] = 0.0, 1e9
    found, exact = summed_over_chunks(e, x, 5, torch.bfloat16)
    others = (torch.arange(80) < 5) | (torch.arange(80) > 6)
    assert not found[:, 5:7].isfinite().any()
    of_rows = row_errors(found[:, others], exact[:, others])
    assert of_rows.max() <= 6e-3, of_rows  # truncated to the 8 bits of bfloat16
