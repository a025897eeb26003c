"""The operators of a linear head: what is launched for a call, chunk by chunk.

forward.py, backward.py          one operator each
with_grad.py                     gradients made in forward: any row objective, also with a shared vocabulary
    one_pass_step.py             the stages of a chunk
chunks.py                        how tokens are divided into chunks that fit the workspace
exponentials.py                  the logits GEMM against a reference per row, and the rescue
gradients.py                     which gradients are made; the loop over chunks of every step that makes some
"""
