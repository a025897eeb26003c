"""The CUDA implementation of linear_cross_entropy_backward. lse is known, so the GEMM's epilogue finishes the logit
gradient G.

    for each chunk:     rows = its valid tokens                                                  gather_tokens.py
                        G                                                                        logits_gemm.py
                            or, if forward saved logits,                                  logits/stored_tiles.py
                            or both: batch_invariant rounds all logits alike
                        G's GEMMs                                                                   gradients.py

A sparse gradient is made from exponentials (sparse_step.py), which backward computes again, as a one-pass step does.
Such a backward does not read lse, and forward saves no logits for it.
"""

import torch
from torch import Tensor

from ... import meta
from ...math.options import Cotangents
from ...meta.arguments import Backward, BackwardInPlace
from ...meta.call import takes
from ...objectives.cross_entropy import GivenSlopes
from ...support.sizes import cdiv
from ..gemm.backends import backend_for
from ..gemm.epilogues import ExpSum, Gradient, ReferenceClass
from ..gemm.input_gradient import Finish
from ..gemm.tiles import EPILOGUE_N
from ..logits.stored import saved_logits, stored_logits
from ..logits.stored_tiles import launch_stored_gradient
from ..rows.copy_rows import with_padded_features
from ..rows.gather_tokens import AtTarget, launch_gather_targets
from ..rows.gradient_factors import KnownRows, launch_gradient_factors, launch_set_entries
from ..rows.valid_tokens import ValidTokens, compact_tokens
from ..sparse.sparse_or_dense import is_sparse, sparse_notes
from ..sparse.sparse_step import run_spans
from .chunks import best_chunking, contiguous, make_vectors_contiguous, padded, problem_of, record_chunks
from .gradients import (
    ChunkGradient,
    GradientGemms,
    Gradients,
    RowPowers,
    finish_step,
    powers_for_float16,
    wanted_gradients,
)
from .one_pass_step import StepTokens

# N tokens, n rows of a chunk, D hidden, V vocabulary


@takes(Backward)
@with_padded_features
def launch_backward(call: Backward) -> meta.Gradients:
    return run_over_tokens(call)


@takes(BackwardInPlace)
def launch_backward_in_place(call: BackwardInPlace) -> meta.Gradients:
    outputs = run_over_tokens(call)
    torch.autograd.graph.increment_version(call.main_grad)
    return outputs


def run_over_tokens(call: Backward) -> meta.Gradients:
    outputs, (input, linear_weight) = meta.outputs(call), call.operands[:2]
    make_vectors_contiguous(call)
    call.cotangents = Cotangents(*contiguous(*call.cotangents))
    call.lse_pair, call.expected_log_prob, call.grad_expected_log_prob = contiguous(
        call.lse_pair, call.expected_log_prob, call.grad_expected_log_prob
    )
    with torch.cuda.device_of(input):
        valid_tokens, place = compact_tokens(call.operands.target, call.ignore_index, linear_weight.shape[0])
        gradients = wanted_gradients(outputs, call)
        if is_sparse(call):
            slopes = StepTokens(GivenSlopes(tokens=call.cotangents), reduction=None, losses=None)
            chunks = run_spans(call, valid_tokens, slopes, gradients)
        else:
            if isinstance(call, BackwardInPlace):
                gradients = gradients._replace(linear_weight=call.main_grad)
            chunks = run_backward(call, valid_tokens, gradients)
        finish_step(outputs, gradients, valid_tokens, place, call)
    record_chunks(call, linear_weight, chunks, *sparse_notes(call))
    return outputs


def run_backward(call: Backward, valid_tokens: ValidTokens, gradients: Gradients) -> list[slice]:
    """Runs over the valid tokens and returns the chunks. grad_input gets one row for each of them, in their order."""
    operands, logit_options = call.operands, call.logits
    input, linear_weight, _, _, weight = operands
    num_classes = linear_weight.shape[0]
    of_step = valid_tokens.order.shape[0], linear_weight, call.output_mask
    chunking = best_chunking(problem_of(*of_step, batch_invariant=call.batch_invariant))
    class_weight = weight.float() if weight is not None and call.cotangents.grad_logit_sum is not None else None
    known = KnownRows(call.lse_pair, call.expected_log_prob, *call.cotangents, call.grad_expected_log_prob)
    powers = None
    if input.dtype == torch.float16:
        known, powers = enlarged(known, class_weight, logit_options.logit_scale, valid_tokens)
    adds = isinstance(call, BackwardInPlace)
    gemms = GradientGemms(gradients, input, linear_weight, chunking.chunks, call.batch_invariant, adds, powers)
    memory = input.new_empty(chunking.chunks[0].stop, padded(num_classes, input.dtype.itemsize))

    def make_gradient(chunk: slice, here: ValidTokens, rows: Tensor) -> ChunkGradient:
        at_target = launch_gather_targets(call, here, rows)
        factors, entry, residual, largest = launch_gradient_factors(
            known, at_target, class_weight, input.dtype, here, logit_options=logit_options
        )
        saved, gradient = None, memory[: rows.shape[0], :num_classes]
        if call.retained is not None:
            saved = saved_logits(call.retained, num_classes).of(chunk)
        first_new = 0 if saved is None else saved.numbers.shape[0]
        if first_new:
            given = slice(0, first_new)
            launch_stored_gradient(saved, factors.of(given), here.of(given), out=gradient[given])
        if first_new < rows.shape[0]:
            others = slice(first_new, rows.shape[0])
            make_again(call, rows[others], factors.of(others), at_target, here.of(others), out=gradient[others])
        launch_set_entries(gradient, at_target.column, entry, here)
        return ChunkGradient(gradient, Finish(None, largest, residual))

    return gemms.run(chunking, valid_tokens, make_gradient)


def enlarged(
    known: KnownRows, class_weight: Tensor | None, logit_scale: Tensor | None, valid_tokens: ValidTokens
) -> tuple[KnownRows, RowPowers]:
    """Multiplies each token's cotangents by a power of two, so that float16 holds nearly all entries of its G."""
    names = *Cotangents._fields, "grad_expected_log_prob"
    grads = {name: grad for name in names if (grad := getattr(known, name)) is not None}
    sizes = {name: grad.abs().reshape(grad.shape[0], -1).sum(1) for name, grad in grads.items()}
    if class_weight is not None:  # G has grad_logit_sum times the weight of each class
        sizes["grad_logit_sum"] *= class_weight.abs().amax()
    bound = sum(sizes.values(), known.lse_pair.new_zeros(known.lse_pair.shape[0]))
    power, powers = powers_for_float16(bound, logit_scale, valid_tokens)
    multiplied = {name: grad * (power if grad.dim() == 1 else power[:, None]) for name, grad in grads.items()}
    return known._replace(**multiplied), powers


def make_again(
    call: Backward,
    rows: Tensor,  # (n, D), the last rows of a chunk, whose logits are not saved
    factors: Gradient,  # of the rows
    at_target: AtTarget,  # of the chunk
    valid_tokens: ValidTokens,
    *,
    out: Tensor,  # (n, V)
) -> None:
    """Writes G by the logits GEMM. With batch_invariant, the logits are rounded as saved ones are."""
    (n, classes), logits = out.shape, backend_for(rows).logits
    operands = rows, call.operands.linear_weight, call.operands.linear_bias
    if not call.batch_invariant or call.logits.softcap is not None:  # under a softcap forward saves none
        logits(*operands, factors, call.logits, valid_tokens, out=out)
        return
    # in the memory of G, if it has 16 bits: a program reads a tile before it writes one
    numbers = out.view(torch.int16) if out.itemsize == 2 else out.new_empty(n, padded(classes, 2), dtype=torch.int16)
    numbers = numbers[:, :classes]
    own, tiles = at_target.reference_class, cdiv(classes, EPILOGUE_N.value)
    stored = stored_logits(numbers, torch.empty(n, tiles, device=out.device))
    own = ReferenceClass(own.column[-n:], own.logit[-n:]) if call.expected_log_prob is not None else None
    epilogue = ExpSum(at_target.reference[-n:], None, None, stored=stored, reference_class=own)
    logits(*operands, epilogue, call.logits, valid_tokens, out=numbers)
    launch_stored_gradient(stored, factors, valid_tokens, out=out)
