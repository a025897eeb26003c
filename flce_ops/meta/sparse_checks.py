"""Checks of a sparse gradient's options. Errors name the argument."""

import torch
from torch import Tensor

from ..math.sparse_gradient import MODES, OPERANDS, SparseGradient
from ..support.holes import refuse_hole
from .checks import check_device


def check_sparse_options(op: str, sparse: SparseGradient) -> None:
    """Checks the options, whether a gradient is wanted or not."""
    threshold = sparse.gradient_threshold
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"{op}: expected gradient_threshold in [0, 1), got {threshold}")
    for name, known in (("gradient_mode", MODES), ("gradient_sparse", OPERANDS)):
        value = getattr(sparse, name)
        if value not in known:
            raise ValueError(f"{op}: expected {name} to be one of {', '.join(known)}, got {value!r}")


def check_sparse(op: str, sparse: SparseGradient, input: Tensor) -> None:
    """Checks the options for an operator that makes gradients."""
    check_sparse_options(op, sparse)
    if not sparse.gradient_threshold:
        return
    seed = sparse.gradient_seed
    if sparse.gradient_mode == "unbiased":
        if seed is None:
            raise ValueError(
                f"{op}: gradient_mode='unbiased' expects gradient_seed, a 0-d int64 tensor on input's device that is "
                "another one in every step; got None"
            )
        if seed.dim() != 0 or seed.dtype != torch.int64:
            raise ValueError(
                f"{op}: expected gradient_seed to be a 0-d tensor in torch.int64, got {tuple(seed.shape)} in "
                f"{seed.dtype}"
            )
        check_device(op, input, gradient_seed=seed)
    if input.dtype == torch.float16:
        refuse_hole(op, "float16")
