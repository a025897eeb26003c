"""Triton kernels, each followed by its launcher. Imported only when a CUDA kernel of an operator runs."""

from flce_ops.triton.launch import launch_backward, launch_forward, launch_with_grad
from flce_ops.triton.upstream import launch_scale_in_place

__all__ = ["launch_backward", "launch_forward", "launch_scale_in_place", "launch_with_grad"]
