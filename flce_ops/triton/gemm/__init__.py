"""The three GEMMs: logits, the gradient of the weight, the gradient of the input.

backends.py              which implementation makes them
logits_gemm.py           a chunk of logits; an epilogue consumes each tile: epilogues.py
weight_gradient.py       E.T @ (c input), summed over chunks; the scales of that sum, and rows that overflow them
input_gradient.py        E @ linear_weight; how many ways the vocabulary is split
matmul.py                all three by torch.matmul
tiles.py                 tile shapes, which of them a device takes, which blocks of classes are visited, and how tiles
                         are read: by tensor maps or by pointers
"""
