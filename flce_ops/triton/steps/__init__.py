"""The operators of a head: what is launched for a call, in which chunks.

forward.py, backward.py          one operator each
with_grad.py                     those of one pass: any row objective, also on ranks that share the vocabulary
    one_pass_step.py             their chunks
    recompute.py                 tokens in a small workspace
chunks.py                        rows at a time
chunking.py, overlay.py          which tokens go how; the first chunk in grad_linear_weight
exponentials.py                  the logits GEMM against a reference per row, and the rescue
gradients.py                     which gradients are made
saved_gradient.py                G of logits that forward saved; quantized_logits.py: their 16 bits
low_rank_with_grad.py            with_grad of a frozen head with a low-rank pair: its chunks, and the pair's gradients
    low_rank_pair.py             the pair in the kernels that make logits
    class_scale_gradient.py      the gradient by DoRA's number a class
"""
