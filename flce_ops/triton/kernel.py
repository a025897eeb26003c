"""A Triton kernel that is compiled once for all numbers of tokens."""

from functools import partial

import triton

# Names of integer kernel arguments that depend on the number of tokens. Unless it is told not to, Triton compiles a
# kernel again if such an argument is 1 or a multiple of 16. If a distance between rows is among them, the kernel rounds
# it up to a multiple of 16 (valid_tokens.py).
VARIES_WITH_TOKENS = {
    *("N", "n", "rows", "rows_per_split", "first_rows", "numbers", "room"),
    *("B", "L", "P", "depth_of_splits", "first_tile", "steps"),
}
Kernel = partial(triton.jit, do_not_specialize=VARIES_WITH_TOKENS)
