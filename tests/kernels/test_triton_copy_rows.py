"""Copies of rows to rows of another length are exact, on a GPU or in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from flce_ops.triton.rows.copy_rows import copied_rows, fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(37, 520, 524), (37, 1003, 1008), (37, 4, 8), (9, 1030, 1026), (9, 8, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, columns, wanted", SIZES)
def test_columns_are_copied_and_the_missing_ones_are_zeros(rows, columns, wanted, dtype):
    """Contiguous rows, every third row, a transposed matrix, and a matrix that starts inside its memory."""
    matrix = torch.randn(rows, columns, device=DEVICE, dtype=dtype)
    matrix[0, 0], matrix[1, 1] = torch.nan, -0.0
    wide = torch.randn(rows, columns + 8, device=DEVICE, dtype=dtype)
    kinds = [matrix, matrix[::3], matrix.T.contiguous().T, wide[:, 1 : 1 + columns]]
    for kind, found in zip(kinds, copied_rows(kinds, wanted)):
        expected = F.pad(kind, (0, wanted - columns))
        assert found.is_contiguous() and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), expected.signbit())


def test_rows_of_half_numbers_go_by_the_widest_integers_they_are_made_of():
    for columns, widest in ((2052, torch.int64), (2050, torch.int32), (2051, torch.int16)):
        matrix = torch.empty(4, columns, dtype=torch.bfloat16)
        found = [integer for integer in (torch.int64, torch.int32, torch.int16) if fits(matrix, integer)]
        assert found[0] == widest
    assert not fits(torch.empty(8, 8, dtype=torch.bfloat16).T, torch.int64)
