"""Refusals by name of what a sparse gradient does not do."""

import torch
from torch import Tensor

from flce_ops.math.sparse_gradient import MODES, SparseGradient
from flce_ops.meta.checks import check_device


def check_sparse_options(op: str, sparse: SparseGradient) -> None:
    """Whether a gradient is asked for or not."""
    threshold, mode, _ = sparse
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"{op}: expected gradient_threshold in [0, 1), got {threshold}")
    if mode not in MODES:
        raise ValueError(f"{op}: expected gradient_mode to be one of {', '.join(MODES)}, got {mode!r}")


def check_sparse(
    op: str,
    sparse: SparseGradient,
    input: Tensor,
    *,
    label_smoothing: float,
    softcap: object,
    target_weight: Tensor | None,
) -> None:
    """Of a gradient that is to be sparse."""
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
    unsupported = {
        "label_smoothing": label_smoothing != 0.0,
        "softcap": softcap is not None,
        "target_weight": target_weight is not None,
    }
    for name, given in unsupported.items():
        if given:
            raise NotImplementedError(f"{op}: {name} with gradient_threshold is not implemented; leave one of them out")
    if input.dtype == torch.float16:
        raise NotImplementedError(
            f"{op}: gradient_threshold in float16 is not implemented, as its gradients wait for the loss scale; use "
            "bfloat16"
        )
