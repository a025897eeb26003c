"""logit_scale and softcap in a kernel: one number for all rows, or where each token has a temperature one for each.

by_token    the numbers of a row stand where its token stands, and are read where the row's logits are made
otherwise   one load for all rows, as without this file
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...objectives.in_triton import number

# N tokens


class LogitNumbers(NamedTuple):
    """One argument of a kernel."""

    softcap: Tensor | None  # () or (N,)
    logit_scale: Tensor | None  # () or (N,)
    by_token: Tensor | None  # one of the two where they are of tokens: that it is None is known to a kernel


def numbers_in_kernel(options: LogitOptions) -> LogitNumbers:
    one = options.softcap if options.logit_scale is None else options.logit_scale
    return LogitNumbers(*options, one if options.by_token else None)


@triton.jit
def number_of(pointer, token, mask, BY_TOKEN: tl.constexpr):
    """In the shape of `token`, or a scalar; 1 where there is None."""
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
def numbers_of(logit_numbers, token, mask):
    """(logit_scale, softcap) of rows."""
    softcap = number_of(logit_numbers.softcap, token, mask, logit_numbers.by_token is not None)
    return scale_of(logit_numbers, token, mask), softcap
