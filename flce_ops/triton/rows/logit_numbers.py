"""logit_scale and softcap in a kernel."""

import triton
import triton.language as tl  # noqa: F401  Triton's interpreter looks for it beside each function

from ...math.options import LogitOptions
from ...objectives.in_triton import number


@triton.jit
def loaded(logit_options):
    """LogitOptions with numbers in place of pointers, 1 in place of None."""
    return LogitOptions(number(logit_options.softcap, 1.0), number(logit_options.logit_scale, 1.0))
