"""Kernels over rows of tokens, before and after a GEMM.

valid_tokens.py          the valid tokens and their number, on the device
copy_rows.py             copies rows of valid tokens side by side, and to rows of another length: a D padded with zeros
gather_tokens.py         gathers the rows of valid tokens and their target logits, K for a soft target
logit_numbers.py         logits from the GEMM's products, by logit_scale and softcap; their lse_pair
finish_rows.py           after the logits GEMM: losses and row factors, by the functions of an objective
row_numbers.py           lse, entropy and other numbers of rows; those that a function of one token reads
gradient_factors.py      in backward, where lse is known: the factors of G, and its entries at the targets
target_rows.py           exact weight gradients of classes that are the target of few tokens
smoothing.py             label smoothing's part of the logit gradient
bias_and_tile_sums.py    sums over tokens, the gradient of the bias among them, and over the tiles of a row
after_chunks.py          the scalar loss, and rows of grad_input at their tokens' places; the scalar that backward
                         receives
"""
