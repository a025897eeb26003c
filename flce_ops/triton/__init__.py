"""Triton kernels, each followed by its launcher, and the CUDA kernels of the operators made of them.

    forward.py, backward.py                   one operator each
    with_grad.py                              those of one pass: any row objective, also on ranks that share the
                                              vocabulary
        even_features.py                      a D that is no multiple of 16: copies with zeros behind, where they fit
        one_pass_step.py                      their chunks
        chunks.py                             rows at a time
        cut.py, lead.py                       which tokens of with_grad go how; the first chunk in grad_linear_weight
        recompute.py                          tokens of with_grad in a small workspace
        kept_tokens.py                        the tokens that count, and how many, on the device
        gather_tokens.py                      their rows and target logits
        copy_rows.py                          their rows alone; gradient rows back to where tokens are
        exponentials.py                       the logits GEMM against a reference per row, and the rescue
            logits_gemm.py, epilogues.py      the GEMM, and what it does with a tile of logits
            tile_sums.py                      numbers of a row for each tile, added up
        finish_rows.py                        per row, after that GEMM: the functions of an objective
        row_statistics.py                     by-products of rows
        two_sum.py                            a number in two float32
        gradient_factors.py                   per row, before the GEMM of backward, where lse is known
        retained_gradient.py                  G of logits that forward retained, in place of that GEMM
            logit_codes.py                    their 16 bits
        weight_gradient.py                    E.T @ (c input), summed over chunks
            sum_units.py                      in which units
            outgrown_rows.py                  rows that call for another unit
            turned_tiles.py                   where the last block of features is at most half full
        input_gradient.py                     E @ linear_weight
            parts.py                          in how many parts of the vocabulary
        gradients.py                          which of them are made
        smoothing.py, columns.py              rank-1 terms, column sums
        scale_rows.py, target_rows.py         c input, and what its rounding took, for rows of few targets
        gather_slots.py                       of soft targets: K logits a token,
        slot_entries.py                       and K entries of the recomputing gradient
            slots.py                          equal classes of a token; the largest entry
        set_entries.py                        the target's entries of a gradient
            gemm_operands.py                  matrices as tensor maps
            target.py, tiles.py               the device; tile shapes
    sparse_step.py                            the chunks of a step whose logit gradient is sparse
        sparse_lists.py                       the entries that are kept, token by token
        sparse_or_dense.py                    the classes of which these are many, and have GEMMs
        class_order.py                        class by class
        gather_sums.py                        sums of gathered rows, long lists in pieces: both gradients
    sparse_run.py                             lists, or all but tiles of small entries
        live_tiles.py                         the tiles that the gradients' GEMMs multiply
    sparse_backward.py                        rows whose slopes backward brings
    kl_div.py                                 the operators of linear_kl_div
        kl_div_step.py                        their chunks
            kl_div_cut.py                     how they take the tokens, in chunks and parts
        softmax_rows.py                       stored logits of a model, and the shift that makes them log-probabilities
        divergence_rows.py                    sums of rows, divergences and G from those of both models
            fixed_point.py                    16 bits for logits of float16 operands
    cross_entropy.py                          of given logits: one program a row
        cross_entropy_kernels.py
        logit_rows.py                         a row in groups of 16 bytes
        logit_gradient.py                     its gradient, written once
    low_rank_with_grad.py                     with_grad of a frozen head with a low-rank pair
        low_rank_step.py                      its chunks: one_pass_step.py's, and the pair's gradients
        low_rank_pair.py                      the pair in the kernels that make logits
        class_scale_gradient.py               the gradient by DoRA's number a class
    sum_losses.py, upstream.py                the scalar loss; the scalar that arrives in backward
    replay.py, driver_launch.py               a step's launches, repeated
        launch_graphs.py                      at the addresses of an earlier call: as one

Imported only when a CUDA kernel of an operator runs.
"""

from flce_ops.triton.backward import launch_backward, launch_backward_in_place
from flce_ops.triton.forward import launch_forward
from flce_ops.triton.upstream import launch_scale_in_place
from flce_ops.triton.with_grad import launch_with_grad

__all__ = [
    "launch_backward",
    "launch_backward_in_place",
    "launch_forward",
    "launch_scale_in_place",
    "launch_with_grad",
]
