"""The three GEMMs: logits, the gradient of the weight, the gradient of the input.

backends.py              which implementation makes them
logits_gemm.py           a chunk of logits; an epilogue consumes each tile: epilogues.py
tile_sums.py             adds up the numbers that epilogues store for each row and tile
weight_gradient.py       E.T @ (c input), summed over chunks
    sum_scales.py        the scales of that sum, and rows that overflow them
input_gradient.py        E @ linear_weight
    split_k.py           how many ways the vocabulary is split
matmul.py                all three by torch.matmul
class_blocks.py          which blocks of classes they visit
tma.py                   tensor maps of matrices, for TMA
tiles.py                 tile shapes, and which of them a device takes
padded_features.py       a D that is no multiple of 16: copies padded with zeros, if they fit the workspace
"""
