"""Logits in memory: stored in 16 bits between a GEMM and the kernels that read them, or given by the user.

stored.py                the 16-bit format of stored logits, for saved logits and for divergences
stored_tiles.py          the kernel that reads stored logits: G, or sums of rows, by a function that is passed
divergence_rows.py       that function for a divergence, and what its rows need
kl_div.py                the operators of linear_kl_div
cross_entropy.py         the operators of given logits: how a row is tiled
given_rows.py            the kernel of a row of given logits, and how it reads and writes the row
"""
