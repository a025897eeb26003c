"""Keeps the GPU busy for a given time, while the host continues.

One program reads the GPU's nanosecond clock until the time is over:

    start = clock()
    repeat  now = clock()  until now - start >= duration
"""

import torch
import triton
import triton.language as tl


@triton.jit
def clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["nanoseconds"])  # one compiled kernel for all durations
def wait_kernel(end_ptr, nanoseconds):
    start = clock()
    now = start
    while now - start < nanoseconds:
        now = clock()
    tl.store(end_ptr, now)


def keep_busy(ms: float) -> None:
    """Delays the next work of the current stream by `ms` milliseconds, without waiting."""
    wait_kernel[(1,)](torch.empty((), dtype=torch.int64, device="cuda"), round(1e6 * ms), num_warps=1)
