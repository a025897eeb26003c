"""Kernel, the decorator of every kernel of this package, and what all launches have in common."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl

# Names of integer kernel arguments that depend on the number of tokens. Unless it is told not to, Triton compiles a
# kernel again if such an argument is 1 or a multiple of 16. If a distance between rows is among them, the kernel rounds
# it up to a multiple of 16 (valid_tokens.py).
VARIES_WITH_TOKENS = {
    *("N", "n", "rows", "rows_per_split", "first_rows", "numbers", "room"),
    *("B", "L", "P", "steps"),
}
# Whether a * b + c is rounded once. Errors and bits depend on it. Triton 3.10 changes the default, and 3.9 warns if a
# launch does not say which it wants.
OPTIONS = {"enable_fp_fusion": True}


class Launches(threading.local):
    """What the launches of this thread do."""

    only_compile = False  # a launch compiles its kernel and does not run it: first_call.py


launches = Launches()


class Kernel(triton.KernelInterface):
    """A Triton kernel that is compiled once for all numbers of tokens: `kernel[grid](*arguments, **options)`."""

    def __init__(self, function: Callable) -> None:
        self.jit = triton.jit(function, do_not_specialize=VARIES_WITH_TOKENS)
        self.__name__ = function.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.jit.run, grid=grid, warmup=launches.only_compile, **OPTIONS)


@triton.jit
def everywhere(condition, like):
    """A mask for a block `like` from a scalar condition. Triton's interpreter would broadcast the condition
    itself as integers, which are no mask since Triton 3.9.
    """
    return tl.full(like.shape, condition.to(tl.int32), tl.int32) > 0
