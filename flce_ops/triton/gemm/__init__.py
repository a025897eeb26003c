"""The three GEMMs: logits, the gradient of the weight, the gradient of the input.

backends.py              who makes them
logits_gemm.py           a chunk of logits, consumed tile by tile in an epilogue: epilogues.py
tile_sums.py             numbers of a row for each tile, added up
weight_gradient.py       E.T @ (c input), summed over chunks
    sum_units.py         in which units
    outgrown_rows.py     rows that call for another unit
    turned_tiles.py      where the last block of features is at most half full
input_gradient.py        E @ linear_weight
    parts.py             in how many parts of the vocabulary
gemm_operands.py         matrices as tensor maps
target.py, tiles.py      the device; tile shapes
even_features.py         a D that is no multiple of 16: copies with zeros behind, where they fit
"""
