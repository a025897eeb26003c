"""Tile shapes of the logits GEMM: a table by architecture, the measurement beside each line; no run-time autotuning."""

from dataclasses import dataclass

# n rows, D hidden, V vocabulary


@dataclass(frozen=True)
class Tiles:
    block_n: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    group: int = 8  # row blocks that sweep the vocabulary together
    tma: bool = True
    flatten: bool = True
    warp_specialize: bool = False
    programs_per_sm: int = 1
    store_halves: bool = False


# H200, exponentials stored, TFLOP/s at 1664x4096x128256 / 1024x2304x256000 / 2048x896x151936 (cuBLAS 658 / 643 / 605):
#   686 / 639 / 572   these tiles
#   655 / 617 / 587   the tile stored whole
#   660 / 625 / 579   four stages (room for them only with halves)
#   671 / 636 / 548   warp-specialised, not flattened
#   508 / 477 / 403   128x128, two programs a multiprocessor
HOPPER = Tiles(128, 256, 64, num_warps=8, num_stages=3, group=16, store_halves=True)
HOPPER_SHALLOW = Tiles(128, 256, 64, num_warps=8, num_stages=3, group=16)  # D <= 1024
AMPERE = Tiles(128, 128, 32, num_warps=4, num_stages=3, tma=False, flatten=False)
INTERPRETER = Tiles(32, 64, 32, num_warps=1, num_stages=1, flatten=False, tma=False)


def tiles_of_architecture(capability: int, hidden: int) -> Tiles:
    """`capability` as 90 for sm_90. Only data-centre chips since Hopper have 227 KiB of shared memory beside TMA."""
    if capability // 10 not in (9, 10):
        return AMPERE
    return HOPPER if hidden > 1024 else HOPPER_SHALLOW
