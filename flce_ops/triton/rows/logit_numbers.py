"""logit_scale and softcap in a kernel: one number for all rows, or one number for each token if each token has a
temperature of its own.

by_token    (N,): a kernel loads the numbers of a row where it computes the row's logits
otherwise   (): one load for all rows
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...objectives.in_triton import number

# N tokens


class LogitNumbers(NamedTuple):
    """LogitOptions as one argument of a kernel."""

    softcap: Tensor | None  # () or (N,)
    logit_scale: Tensor | None  # () or (N,)
    by_token: Tensor | None  # softcap or logit_scale if they are (N,), else None: a flag that is known at compile time


def numbers_in_kernel(options: LogitOptions) -> LogitNumbers:
    one = options.softcap if options.logit_scale is None else options.logit_scale
    return LogitNumbers(*options, one if options.by_token else None)


@triton.jit
def number_of(pointer, token, mask, BY_TOKEN: tl.constexpr):
    """Loads the number: a vector in the shape of `token`, or a scalar. Returns 1 if the pointer is None, because
    functions cannot return None in Triton 3.6.
    """
    if pointer is None:
        return 1.0
    elif BY_TOKEN:
        return tl.load(pointer + token, mask=mask, other=1.0).to(tl.float32)
    else:
        return number(pointer)


@triton.jit
def scale_of(logit_numbers, token, mask):
    """logit_scale of rows."""
    return number_of(logit_numbers.logit_scale, token, mask, logit_numbers.by_token is not None)


@triton.jit
def loaded(logit_numbers, token, mask):
    """LogitOptions of rows, with numbers in place of pointers."""
    softcap = number_of(logit_numbers.softcap, token, mask, logit_numbers.by_token is not None)
    return LogitOptions(softcap, scale_of(logit_numbers, token, mask))
