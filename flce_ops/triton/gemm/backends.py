"""The table BACKENDS: each row is one implementation of the three matrix products of a head. The steps call GEMMs only
through this table.

    logits             epilogue(rows @ linear_weight.T), a tile at a time           logits_gemm.py, epilogues.py
    weight_gradient    the sum of E.T @ rows over chunks of tokens                  weight_gradient.py
    input_gradient     finish(E @ linear_weight)                                    input_gradient.py

The first row that takes the dtype and device of an operand makes all three products. An epilogue is named by the tuple
it reads and writes, such as ExpSum. How tokens are chunked follows from the tile shapes in tiles.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .input_gradient import launch_input_gradient
from .logits_gemm import launch_logits_gemm
from .weight_gradient import WeightGradient


class Backend(NamedTuple):
    takes: Callable[[Tensor], bool]
    logits: Callable[..., list | None]  # what the next call on the same operands may reuse
    weight_gradient: Callable[..., WeightGradient]
    input_gradient: Callable[..., None]


BACKENDS = [Backend(lambda matrix: True, launch_logits_gemm, WeightGradient, launch_input_gradient)]


def backend_for(matrix: Tensor) -> Backend:
    for backend in BACKENDS:
        if backend.takes(matrix):
            return backend
    raise AssertionError("the last row takes every matrix")
