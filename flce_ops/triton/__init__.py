"""Triton kernels, each followed by its launcher, and the CUDA kernels of the operators made of them and cuBLAS.

    forward.py, with_grad.py, backward.py     one operator each
        one_pass_step.py                      the chunks of with_grad, and of ranks that share the vocabulary
        chunks.py, gemm.py                    rows at a time; the gradient GEMMs
        cut.py, lead.py                       which tokens of with_grad go how; the first chunk in grad_linear_weight
        recompute.py                          tokens of with_grad in a small workspace
        exponentials.py                       the logits GEMM against a reference per row, and the rescue
            logits_gemm.py, epilogues.py      the GEMM, and what it does with a tile of logits
            target.py, tiles.py               the device; tile shapes
        reference_logit.py, finish_rows.py    per row, before and after the GEMM
            row_loss.py                       the loss of a row and its derivatives
        finish_shard_rows.py                  the same where the vocabulary is sharded over ranks
        grad_input.py                         E @ linear_weight in float32 blocks, and where they wait
            finish_product.py                 a block to grad_input
        smoothing.py, columns.py              rank-1 terms, column sums
        scale_rows.py, split_product.py       c input; few rows in two half numbers
        set_entries.py                        the target's entry of a gradient
    upstream.py                               the scalar that arrives in backward

Imported only when a CUDA kernel of an operator runs.
"""

from flce_ops.triton.backward import launch_backward
from flce_ops.triton.forward import launch_forward
from flce_ops.triton.upstream import launch_scale_in_place
from flce_ops.triton.with_grad import launch_with_grad

__all__ = ["launch_backward", "launch_forward", "launch_scale_in_place", "launch_with_grad"]
