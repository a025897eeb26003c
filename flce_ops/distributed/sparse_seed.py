"""The draws of a sparse gradient on a mesh: a token's place is its place on its rank, so that rank's seed is its own.

Ranks that share the vocabulary have the same tokens, and the same seed: they keep what one device would.
"""

from flce_ops.distributed.layout import Layout, splits
from flce_ops.distributed.local import localize
from flce_ops.math.sparse_gradient import SparseGradient

BETWEEN_RANKS = 0x9E3779B97F  # seeds of steps that are counted do not meet: odd, and 2^23 ranks of it fit an int64


def sparse_of_rank(layout: Layout, sparse: SparseGradient) -> SparseGradient:
    if sparse.gradient_seed is None:
        return sparse
    part, coordinate = 0, layout.mesh.get_coordinate()
    for dim, token in enumerate(layout.tokens):
        if splits(token):
            part = part * layout.mesh.size(dim) + coordinate[dim]
    seed = localize(layout, sparse.gradient_seed, layout.replicated)
    return sparse._replace(gradient_seed=seed + part * BETWEEN_RANKS)
