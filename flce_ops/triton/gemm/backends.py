"""The table BACKENDS: each row is one implementation of the three matrix products of a head. The steps call GEMMs only
through this table.

    logits             epilogue(rows @ linear_weight.T), a tile at a time           logits_gemm.py, epilogues.py
    weight_gradient    the sum of E.T @ rows over chunks of tokens                  weight_gradient.py
    input_gradient     finish(E @ linear_weight)                                    input_gradient.py

The first row that takes an operand makes all three products. An epilogue is named by the tuple it reads and writes,
such as ExpSum. How tokens are chunked follows from the tile shapes in tiles.py.

matmul.py is a second row: torch.matmul for bfloat16, if the environment has FLCE_GEMM=torch when this file is imported.

A backend in FP8 would need three things more. E, which the step allocates in the input's dtype, would have a dtype of
the backend's own: a field beside the three products. The scales of input and linear_weight would come with the
matrices: the gathered tokens are scaled by row, so their scale is a row factor, and that of linear_weight a number that
multiplies logit_scale. The gradients keep the dtype of their operands: both products are float32 before they are
finished.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import matmul
from .input_gradient import launch_input_gradient
from .logits_gemm import launch_logits_gemm
from .weight_gradient import WeightGradient


class Backend(NamedTuple):
    takes: Callable[[Tensor], bool]
    logits: Callable[..., list]  # returns what the next call on the same operands may reuse
    weight_gradient: Callable[..., WeightGradient | matmul.MatmulWeightGradient]
    input_gradient: Callable[..., None]


TORCH_IS_ASKED_FOR = os.environ.get("FLCE_GEMM") == "torch"  # read once: every product of a chunk asks


def torch_is_asked_for(matrix: Tensor) -> bool:
    return TORCH_IS_ASKED_FOR and matrix.dtype == torch.bfloat16


BACKENDS = [
    Backend(torch_is_asked_for, matmul.launch_logits, matmul.MatmulWeightGradient, matmul.launch_input_gradient),
    Backend(lambda matrix: True, launch_logits_gemm, WeightGradient, launch_input_gradient),
]


def backend_for(matrix: Tensor) -> Backend:
    for backend in BACKENDS:
        if backend.takes(matrix):
            return backend
    raise AssertionError("the last row takes every matrix")
