"""logit_scale and softcap in a kernel: one number for all rows, or one for each token if each has its temperature.

by_token    the numbers of a row are at its token's place, and are loaded where the row's logits are made
otherwise   one load for all rows
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
    by_token: Tensor | None  # one of the two if they are (N,). A kernel knows when it is compiled whether it is None


def numbers_in_kernel(options: LogitOptions) -> LogitNumbers:
    one = options.softcap if options.logit_scale is None else options.logit_scale
    return LogitNumbers(*options, one if options.by_token else None)


@triton.jit
def number_of(pointer, token, mask, BY_TOKEN: tl.constexpr):
    """In the shape of `token`, or a scalar; 1 for None, which Triton 3.6 cannot return."""
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
