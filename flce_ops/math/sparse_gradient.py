"""A sparse logit gradient: which entries of a row are kept, and what values they get.

h_i is the user's threshold times |l_i s|, where s is the logit scale. Without z-loss and softcap this compares p_ij -
q_ij with the threshold, q being the target's distribution, for any token weight and any grad_output.

    "unbiased"    if |G_ij| >= h_i: unchanged     else sign(G_ij) h_i with probability |G_ij| / h_i, or 0
    "drop"        if |G_ij| >= h_i: unchanged     else 0

Over seeds, "unbiased" has the mean G. An entry below h_i has the variance |G_ij| (h_i - |G_ij|). One random number
decides for all classes of a tile, TILE classes of a row (systematic sampling). With u uniform in [0, 1):

    q_ij = min(|G_ij| / h_i, 1)            the expected number of times that the entry is kept
    C_ij = u + sum_k q_ik                  over the classes k <= j of the tile
    kept if floor(C_ij) > floor(C_ij - q_ij)

So a tile keeps as many entries as the sum of its q, rounded up or down. If the rows of linear_weight share a direction,
the error of grad_input along this direction is then small (docs/numerics.md compares other ways to draw). Different
tokens and tiles are independent. q is an integer in units of 2^-26. Sums of integers do not depend on their order, so
the kept entries do not depend on it either. Before a q is rounded down to an integer, a second random number of the
tile is added, so that a q far below one unit is kept as often as it should be.

u is a function of the seed, the token's place in the call and the tile. It does not depend on chunks, on the order of
execution, or on other tokens. A second forward with the same seed (a checkpoint's, a captured graph's) keeps the same
entries. u is computed by the finaliser of MurmurHash3, applied three times. In Triton there is one difference: blocks
of classes that many tokens keep get their exact gradient (triton/sparse/sparse_or_dense.py).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..support.sizes import cdiv

# N tokens, n rows, V vocabulary, T tiles along it

TILE = 2048  # classes that share a random number
BITS = 26  # fraction bits of q; a sum of sixteen q fits an int32
ONE = 1 << BITS
GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, odd: spreads neighbouring numbers before they are mixed
Mode = Literal["unbiased", "drop"]
Operand = Literal["both", "input", "linear_weight"]  # which gradients use only the kept entries
MODES, OPERANDS = get_args(Mode), get_args(Operand)


class SparseGradient(NamedTuple):
    gradient_threshold: float = 0.0  # 0: every entry is kept unchanged
    gradient_mode: str = MODES[0]
    gradient_seed: Tensor | None = None  # () int64, for "unbiased"
    gradient_sparse: str = OPERANDS[0]

    def products(self, output_mask: Sequence[bool]) -> tuple[bool, bool]:
        """Whether grad_input and grad_linear_weight are made from the kept entries."""
        chosen = self.gradient_threshold > 0.0
        of_input = chosen and self.gradient_sparse != "linear_weight" and output_mask[0]
        return of_input, chosen and self.gradient_sparse != "input" and output_mask[1]


def room_of_row(threshold: float, num_classes: int, topk: int = 1) -> int:
    """The most entries that a row can keep.

    The q of a row add up to at most 1 / threshold, times 1 + 2^-8 because the stored probabilities are rounded. Every
    target adds one entry, and every tile may round its number of entries up.
    """
    tiles = cdiv(num_classes, TILE)
    return min(num_classes, int((1.0 + 2.0**-8) / threshold) + 1 + topk + tiles)


def mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32), in int64. Products may overflow int64, but their low 32 bits, which are used, are
    right.
    """
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniforms(seed: Tensor, token: Tensor, tiles: range) -> tuple[Tensor, Tensor]:  # (), (n,) -> (n, T) each
    """Returns u (int64, units of 1 / ONE) and the dither (float32, in [0, 1)), added to q before rounding down."""
    seed, tile = seed.to(torch.int64), torch.arange(tiles.start, tiles.stop, device=token.device)
    key = mix((token * GOLDEN & 0xFFFFFFFF) ^ (seed & 0xFFFFFFFF))
    key = mix(key ^ (seed >> 32 & 0xFFFFFFFF))
    u = mix((key[:, None] + tile * GOLDEN) & 0xFFFFFFFF)
    return u >> 32 - BITS, (mix(u ^ GOLDEN) >> 8).float() * 2.0**-24


def keep_entries(
    grad_logits: Tensor,  # (n, V), in place
    slope: Tensor,  # (n,), l s
    sparse: SparseGradient,
    token: Tensor,  # (n,) int64, each token's place in the call
) -> None:
    seed = sparse.gradient_seed
    limit = (slope.abs() * sparse.gradient_threshold)[:, None]
    size = grad_logits.abs()
    below = size < limit  # nan is not below, so it is kept; if l is 0, every entry is kept
    if sparse.gradient_mode == "drop":
        grad_logits.masked_fill_(below, 0.0)
        return
    assert seed is not None
    share = size.div_(limit)
    n, num_classes = grad_logits.shape
    tiles = range(cdiv(num_classes, TILE))
    u, dither = uniforms(seed, token, tiles)
    q = torch.where(below, share * ONE, ONE)
    q = torch.nn.functional.pad(q, (0, len(tiles) * TILE - num_classes))
    q = (q.view(n, len(tiles), TILE) + dither[:, :, None]).clamp_(max=ONE).to(torch.int64)
    behind = q.cumsum(2) + u[:, :, None]
    kept = (behind >> BITS != behind - q >> BITS).view(n, -1)[:, :num_classes]
    raised = torch.where(below, torch.sign(grad_logits) * limit, grad_logits)
    grad_logits.copy_(torch.where(kept, raised, 0.0))
