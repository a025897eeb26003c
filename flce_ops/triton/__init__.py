"""Triton kernels, each followed by its launcher, and the CUDA implementations of the operators.

    steps/            the operators of a linear head, chunk by chunk
    gemm/             the three GEMMs
    rows/             kernels over rows of tokens, before and after the GEMMs
    sparse/           sparse gradients: the entries that are kept
    logits/           logits in memory: saved for backward, of both models in linear_kl_div, given to cross_entropy
    kernel.py         the decorator of every kernel
    first_call.py     the first call of a head compiles its kernels in parallel

This package is imported only when a CUDA kernel of an operator runs.
"""

import triton

from ..support import check_version

check_version("triton", getattr(triton, "__version__", ""))  # before its names are missed

from .rows.after_chunks import launch_scale_in_place  # noqa: E402
from .steps.backward import launch_backward, launch_backward_in_place  # noqa: E402
from .steps.forward import launch_forward  # noqa: E402
from .steps.with_grad import launch_with_grad  # noqa: E402

__all__ = ["launch_backward", "launch_backward_in_place", "launch_forward", "launch_scale_in_place", "launch_with_grad"]
