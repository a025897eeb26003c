"""Where grad_linear_weight's GEMM takes narrower tiles: on the features behind the last whole block of D.

    D = 896      ┌───────┬───────┬───────┬───┐     D = 960     ┌───────┬───────┬───────┬───────┐
                 │  256  │  256  │  256  │128│                 │  256  │  256  │  256  │  256 ▒│  ▒ padding
                 └───────┴───────┴───────┴───┘                 └───────┴───────┴───────┴───────┘

A launch for each width: all its tiles take as long, and programs share them out evenly. Two launches may end in a
round more, so the rounds decide.
"""

from collections.abc import Callable
from typing import NamedTuple

import triton
from torch import Tensor

from flce_ops.triton.target import multiprocessors
from flce_ops.triton.tiles import Tiles

# D hidden, V vocabulary


class FeatureRange(NamedTuple):
    """Features whose tiles have one shape."""

    features: slice
    blocks: slice  # of features, among those of all ranges
    tiles: Tiles


def feature_ranges(out: Tensor, tiles_of: Callable[[Tensor], Tiles]) -> list[FeatureRange]:  # (V, D)
    """One; or the whole blocks, and what is behind them where its narrower tiles save rounds."""
    (num_classes, hidden), tiles = out.shape, tiles_of(out)
    whole = hidden // tiles.block_n
    start = whole * tiles.block_n
    narrow = tiles_of(out[:, start:])
    class_blocks, programs = triton.cdiv(num_classes, tiles.block_m), multiprocessors(out)
    together, wide, rest = (triton.cdiv(class_blocks * count, programs) for count in (whole + 1, whole, 1))
    if 0 < start < hidden and wide + rest * narrow.block_n / tiles.block_n < together:
        blocks = slice(0, whole), slice(whole, whole + 1)
        return [FeatureRange(slice(0, start), blocks[0], tiles), FeatureRange(slice(start, hidden), blocks[1], narrow)]
    return [FeatureRange(slice(0, hidden), slice(0, triton.cdiv(hidden, tiles.block_n)), tiles)]
