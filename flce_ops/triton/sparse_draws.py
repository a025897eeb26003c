"""The random numbers of a sparse gradient in a kernel: those of `uniforms` in flce_ops/math/sparse_gradient.py.

One for a token and tile of classes, of the seed, the token's place in the call and the tile's number alone, so that
forward, a checkpoint's second forward and every rank draw the same.
"""

import triton
import triton.language as tl

from flce_ops.math import sparse_gradient

ONE = tl.constexpr(sparse_gradient.ONE)
BITS = tl.constexpr(sparse_gradient.BITS)
GOLDEN = tl.constexpr(sparse_gradient.GOLDEN)


@triton.jit
def mix(x):
    """`mix` there, in uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def key_of_row(seed_ptr, token, first_tile):
    """To which a tile's number behind the first one adds its multiple of GOLDEN."""
    seed = tl.load(seed_ptr).to(tl.int64)
    key = mix((token * GOLDEN).to(tl.uint32) ^ seed.to(tl.uint32))
    return mix(key ^ (seed >> 32).to(tl.uint32)) + tl.full((), first_tile, tl.uint32) * GOLDEN


@triton.jit
def uniforms(key, tile):
    """u in units of 1 / ONE, and the dither in [0, 1)."""
    u = mix(key + tl.full((), tile, tl.uint32) * GOLDEN)
    return (u >> (32 - BITS)).to(tl.int64), (mix(u ^ GOLDEN) >> 8).to(tl.float32) * 2.0**-24
