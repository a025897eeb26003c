"""Compiles the Triton kernels of a head into Triton's cache before any training step, for a container or a node's
image.

python -m flce_ops.warmup --hidden 4096 --vocab 128256 --arch sm_90
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..functional import cross_entropy, linear_cross_entropy, linear_kl_div, linear_log_probs, linear_policy_loss
from ..math.sparse_gradient import MODES
from ..support.vendor import H200, Chip

__all__ = ["FUNCTIONS", "warmup"]

TOKENS = 512  # tokens of the traced call; the kernels are compiled for any number of tokens
FUNCTIONS = {
    function.__name__: function
    for function in (linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_kl_div, cross_entropy)
}


def warmup(
    hidden: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    function: Callable = linear_cross_entropy,
    bias: bool = False,
    arch: int | None = None,
    multiprocessors: int | None = None,
    **options: Any,
) -> int:
    """Compiles all Triton kernels of a head's forward and backward, for any number of tokens, without launching them.

    The kernels go into Triton's cache (``TRITON_CACHE_DIR``), from which a training process loads them in milliseconds.
    Without warmup, the first call of a head compiles the same kernels.

    Args:
        hidden: D, features of the hidden states.
        vocab: V, classes.
        dtype: of hidden states and weight; Triton's paths take 16-bit dtypes.
        function: ``flce_ops.linear_cross_entropy``, ``linear_log_probs``, ``linear_policy_loss``, ``linear_kl_div``
            (of a teacher of the same size) or ``cross_entropy`` of given logits, where ``hidden`` does nothing.
        bias: whether the head has one.
        arch: compute capability of the GPU to compile for, 90 for H100 and H200; needed where no GPU is visible.
        multiprocessors: how many it has, 132 unless given; a constant of the kernels.
        **options: of the function, as training gives them; which are there decides on the kernels, not their values.

    Returns:
        The number of kernels that were compiled.

    Raises:
        ValueError: no GPU and no ``arch``, or another ``arch`` than the visible GPU's.
    """
    from ..triton.gemm.device import chip_of
    from ..triton.launch.ahead import compile_side_by_side

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    chip = Chip(arch or 0, multiprocessors or H200.multiprocessors) if device is None else chip_of(device)
    if device is None and arch is None:
        raise ValueError("warmup: expected arch, as no GPU is visible; pass 90 for an H100 or H200")
    if arch not in (None, chip.capability):
        raise ValueError(
            f"warmup: expected arch to be that of the visible GPU, {chip.capability}, got {arch}; compile for "
            'another in a process with CUDA_VISIBLE_DEVICES=""'
        )

    calls = [options]
    if options.get("support") is not None:
        calls.append(options | {"support": None})  # the kernels for tokens without a support

    def trace() -> None:
        for options_of_call in calls:  # the fake kernels of the inner operators compile
            result = call_on_meta(function, hidden, vocab, dtype, bias, options_of_call)
            found = result if isinstance(result, tuple) else (result,)
            wanted = [part for part in found if isinstance(part, Tensor) and part.requires_grad]
            torch.autograd.backward(wanted, [torch.empty_like(part) for part in wanted])

    with driver_of(chip, present=device is not None):
        what = f"{function.__name__}, {hidden} x {vocab} in {dtype}"
        count, failed = compile_side_by_side(chip, what, trace, device)
    if failed:
        names, errors = zip(*failed)
        raise RuntimeError(f"warmup: of {what} Triton could not compile {', '.join(names)}") from errors[0]
    return count


def call_on_meta(function: Callable, hidden: int, vocab: int, dtype: torch.dtype, bias: bool, options: dict) -> Any:
    def meta(*shape: int, dtype: torch.dtype = dtype, trained: bool = False) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)

    tokens, target = meta(TOKENS, hidden, trained=True), meta(TOKENS, dtype=torch.int64)
    weight = meta(vocab, hidden, trained=True)
    if bias:
        options = {"linear_bias": meta(vocab, trained=True), **options}
    if options.get("gradient_threshold") and options.get("gradient_mode", MODES[0]) == MODES[0]:
        options = {"gradient_seed": meta(dtype=torch.int64), **options}
    if function is cross_entropy:
        return function(meta(TOKENS, vocab, trained=True), target, **options)
    if function is linear_kl_div:
        return function(tokens, weight, meta(TOKENS, hidden), meta(vocab, hidden), **options)
    if function is linear_policy_loss:
        per_token = meta(TOKENS, dtype=torch.float32)
        return function(tokens, weight, target, per_token, per_token, **options)
    return function(tokens, weight, target, **options)


@contextmanager
def driver_of(chip: Chip, present: bool):
    """A driver that tells Triton for which GPU to compile."""
    if present:
        yield
        return
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Absent:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", chip.capability, 32)

        def get_current_device(self) -> int:
            return -chip.capability  # negative, so that kernels compiled for this GPU are not used on another device

        def get_current_stream(self, device: int) -> int:
            return 0

    before = driver._active  # reset_active() would look for a GPU
    driver.set_active(Absent())
    try:
        yield
    finally:
        driver._active = before
