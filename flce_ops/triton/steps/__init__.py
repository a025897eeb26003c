"""The operators of a linear head: what is launched for a call, chunk by chunk.

forward.py               the logits GEMM against a reference per row, and the rescue; the operator of forward
backward.py              the operator of backward
with_grad.py             gradients made in forward: any row objective, also with a shared vocabulary
    one_pass_step.py     the stages of a chunk
chunks.py                how tokens are divided into chunks that fit the workspace
gradients.py             which gradients are made; the loop over chunks of every step that makes some
"""
