"""Triton kernels, each followed by its launcher, and the CUDA implementations of the operators.

    steps/            the operators of a linear head, chunk by chunk
    gemm/             the three GEMMs
    rows/             kernels over rows of tokens, before and after the GEMMs
    sparse/           sparse gradients: the entries that are kept
    divergence/       linear_kl_div
    given_logits/     cross_entropy of given logits
    launch/           captures the kernel launches of a step and repeats them

This package is imported only when a CUDA kernel of an operator runs.
"""

from .launch import once  # noqa: F401, I001 - first, because its threads run beside the other imports

import triton

from ..support.versions import check_version
from .launch import launchers, sources

check_version("triton", getattr(triton, "__version__", ""))  # before its names are missed; the planner has a stand-in
sources.read_by_positions()  # before the kernels are defined
launchers.load_one_at_a_time()

from .rows.grad_output import launch_scale_in_place  # noqa: E402
from .steps.backward import launch_backward, launch_backward_in_place  # noqa: E402
from .steps.forward import launch_forward  # noqa: E402
from .steps.with_grad import launch_with_grad  # noqa: E402

__all__ = [
    "launch_backward",
    "launch_backward_in_place",
    "launch_forward",
    "launch_scale_in_place",
    "launch_with_grad",
]
