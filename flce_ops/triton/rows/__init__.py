"""What is done to rows of tokens, before and after a GEMM.

valid_tokens.py          the tokens that count, and how many, on the device; one chunk for them where they are few
copy_rows.py             rows in their order and back; gradient rows back to where tokens are
gather_tokens.py         their rows and target logits, K of a soft target
logit_numbers.py         logit_scale and softcap of rows
topk.py                  K classes of a token: equal ones; the largest entry
finish_rows.py           after the logits GEMM: the functions of an objective
row_statistics.py        by-products of rows
gradient_factors.py      before the GEMM of backward, where lse is known
set_entries.py           the target's entries of a gradient
scale_rows.py            c input
target_rows.py           what its rounding took, for rows of few targets
smoothing.py, column_sums.py rank-1 terms, column sums
sum_losses.py            the scalar loss
grad_output.py           the scalar that arrives in backward
two_sum.py               a number in two float32
"""
