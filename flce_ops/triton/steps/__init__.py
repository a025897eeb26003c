"""The operators of a linear head: what is launched for a call, chunk by chunk.

forward.py, backward.py          one operator each
with_grad.py                     gradients made in forward: any row objective, also with a shared vocabulary
    one_pass_step.py             the stages of a chunk
chunks.py                        chunk sizes that fit the workspace
chunking.py                      how tokens are divided
exponentials.py                  the logits GEMM against a reference per row, and the rescue
gradients.py                     which gradients are made
saved_gradient.py                G from logits that forward saved; quantized_logits.py: their 16-bit format
"""
