"""A sparse logit gradient: which entries of a row are kept, and what they become.

h_i is the user's threshold times |l_i|: without z-loss it is p_ij - [j = y_i] that is compared with the threshold,
whatever the token's weight.

    "unbiased"    |G_ij| >= h_i: as it is       else sign(G_ij) h_i with probability |G_ij| / h_i, or 0
    "drop"        |G_ij| >= h_i: as it is       else 0
    "tiles"       0 where no entry of a tile is so large and no token has its target there, else all of it as it is

A tile is LIVE tokens, of those that are not ignored, in their order, by LIVE classes: Cut Cross-Entropy's filter
(Wijmans et al., 2024), whose threshold is 2^-12.

"unbiased" has the mean G over seeds, and the variance |G_ij| (h_i - |G_ij|) for an entry below h_i. One random number
serves a row's tile of TILE classes (systematic sampling): with u uniform in [0, 1)

    q_ij = min(|G_ij| / h_i, 1)            what the entry adds to the number of entries that are kept
    C_ij = u + sum_k q_ik                  over the classes k <= j of the tile
    kept where floor(C_ij) > floor(C_ij - q_ij)

so a tile keeps the sum of its q, rounded up or down. Different tokens and tiles are independent. q is counted in units
of 2^-26: sums of integers do not depend on their order, so neither do the entries that are kept. A second random number
of the tile is added before a q is cut to an integer, so that those far below one unit are kept as often as they should.

u is a function of the seed, the token's place in the call and the tile: not of chunks, of the order in which anything
runs, nor of other tokens. A second forward with the same seed (a checkpoint's, a captured graph's) keeps the same
entries. The function is the finaliser of MurmurHash3, applied three times.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# N tokens, n rows, V vocabulary, T tiles along it

TILE = 2048  # classes that share a random number
LIVE = 128  # tokens and classes of a tile that is made or left out
BITS = 26  # of q: the sum of sixteen fits an int32
ONE = 1 << BITS
GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, odd: sets neighbouring numbers apart before they are mixed
MODES = ("unbiased", "drop", "tiles")


class SparseGradient(NamedTuple):
    gradient_threshold: float = 0.0  # 0: every entry, as it is
    gradient_mode: str = MODES[0]
    gradient_seed: Tensor | None = None  # () int64, of "unbiased"


class Draws(NamedTuple):
    """What the random numbers of rows depend on beside the seed."""

    token: Tensor  # (N,) int64, each token's place in the call

    def of(self, rows: slice) -> "Draws":
        return Draws(self.token[rows])


def room_of_row(threshold: float, num_classes: int) -> int:
    """Entries that a row keeps at most.

    Probabilities, each rounded up by 2^-8 or less, count for at most 1 / threshold, the target's entry for 1; every
    tile may round its number up.
    """
    tiles = -(-num_classes // TILE)
    return min(num_classes, int((1.0 + 2.0**-8) / threshold) + 2 + tiles)


def mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32), in int64: products wrap, and their low 32 bits are right."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniforms(seed: Tensor, token: Tensor, tiles: int) -> tuple[Tensor, Tensor]:  # (), (n,) -> (n, T) each
    """u in units of 1 / ONE, int64, and what is added to q before it is cut, in [0, 1), float32."""
    seed, tile = seed.to(torch.int64), torch.arange(tiles, device=token.device)
    key = mix((token * GOLDEN & 0xFFFFFFFF) ^ (seed & 0xFFFFFFFF))
    key = mix(key ^ (seed >> 32 & 0xFFFFFFFF))
    u = mix((key[:, None] + tile * GOLDEN) & 0xFFFFFFFF)
    return u >> 32 - BITS, (mix(u ^ GOLDEN) >> 8).float() * 2.0**-24


def keep_tiles(
    grad_logits: Tensor,  # (n, V), in place: whole tiles of rows, but for the last
    slope: Tensor,  # (n,), l
    column: Tensor,  # (n,) int64, the target's
    threshold: float,
) -> None:
    n, num_classes = grad_logits.shape
    slope = slope.abs()[:, None]
    has_gradient = slope != 0.0
    live = ~(grad_logits.abs() < torch.where(has_gradient, slope * threshold, torch.inf))  # nan is
    live.scatter_(1, column[:, None], has_gradient | live.gather(1, column[:, None]))
    down, across = -(-n // LIVE), -(-num_classes // LIVE)
    live = torch.nn.functional.pad(live, (0, across * LIVE - num_classes, 0, down * LIVE - n))
    live = live.view(down, LIVE, across, LIVE).any(3).any(1)
    live = live.repeat_interleave(LIVE, 0)[:n].repeat_interleave(LIVE, 1)[:, :num_classes]
    grad_logits.masked_fill_(~live, 0.0)


def keep_entries(
    grad_logits: Tensor,  # (n, V), in place
    slope: Tensor,  # (n,), l
    sparse: SparseGradient,
    draws: Draws,  # of the rows
) -> None:
    threshold, mode, seed = sparse
    slope = slope.abs()
    # where l is 0 so is G, but for a token without a gradient nothing is to be kept, and nothing to be nan
    limit = torch.where(slope == 0.0, torch.inf, slope * threshold)[:, None]
    share = grad_logits.abs() / limit
    below = share < 1.0  # nan is not, and is kept
    if mode == "drop":
        grad_logits.masked_fill_(below, 0.0)
        return
    assert seed is not None
    n, num_classes = grad_logits.shape
    tiles = -(-num_classes // TILE)
    u, dither = uniforms(seed, draws.token, tiles)
    q = torch.nn.functional.pad(torch.where(below, share * ONE, ONE), (0, tiles * TILE - num_classes))
    q = (q.view(n, tiles, TILE) + dither[:, :, None]).clamp_(max=ONE).to(torch.int64)
    behind = q.cumsum(2) + u[:, :, None]
    kept = (behind >> BITS != behind - q >> BITS).view(n, -1)[:, :num_classes]
    raised = torch.where(below, torch.sign(grad_logits) * limit, grad_logits)
    grad_logits.copy_(torch.where(kept, raised, 0.0))
