"""logit_scale and softcap in a kernel."""

import triton
import triton.language as tl

from ...math.options import LogitOptions
from ...objectives.in_triton import number


@triton.jit
def loaded(logit_options, otherwise: tl.constexpr = 1.0):
    """LogitOptions with numbers in place of pointers, `otherwise` in place of None."""
    return LogitOptions(number(logit_options.softcap, otherwise), number(logit_options.logit_scale, otherwise))
