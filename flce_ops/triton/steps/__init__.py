"""The operators of a linear head: what is launched for a call, chunk by chunk.

forward.py, backward.py          one operator each
with_grad.py                     gradients made in forward: any row objective, also with a shared vocabulary
    one_pass_step.py             the stages of a chunk
    recompute.py                 what runs if the workspace is too small for one pass
chunks.py                        chunk sizes that fit the workspace
chunking.py, overlay.py          how tokens are divided; a first chunk that is stored in grad_linear_weight
exponentials.py                  the logits GEMM against a reference per row, and the rescue
gradients.py                     which gradients are made
saved_gradient.py                G from logits that forward saved; quantized_logits.py: their 16-bit format
low_rank_with_grad.py            a frozen head with a low-rank pair: its chunks, and the pair's gradients
    low_rank_pair.py             the pair inside the kernels that make logits
"""
