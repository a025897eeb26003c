"""Logits in memory: stored in 16 bits between a GEMM and the kernels that read them, or given by the user.

stored.py                the 16-bit format of stored logits, for saved logits and for divergences
stored_tiles.py          the kernel that reads stored logits: G, or sums of rows, by a function that is passed
divergence_rows.py       that function for a divergence, and what its rows need
kl_div.py                the operators of linear_kl_div
cross_entropy.py         the operators of given logits: how a row is tiled, and its kernel
row_blocks.py            how the kernel reads and writes a row
"""
