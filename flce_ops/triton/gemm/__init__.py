"""The three GEMMs: logits, the gradient of the weight, the gradient of the input.

backends.py              who makes them
logits_gemm.py           a chunk of logits, consumed tile by tile in an epilogue: epilogues.py
tile_sums.py             numbers of a row for each tile, added up
weight_gradient.py       E.T @ (c input), summed over chunks
    sum_scales.py        with which scales
    overflow_rows.py     rows that overflow theirs
    transposed_tiles.py  where the last block of features is at most half full
input_gradient.py        E @ linear_weight
    split_k.py           how many ways the vocabulary is split
tma.py                   matrices as tensor maps
device.py, tiles.py      the device; tile shapes
padded_features.py       a D that is no multiple of 16: copies with zeros behind, where they fit
"""
