"""The CUDA implementation of linear_cross_entropy_backward. lse is known, so the GEMM's epilogue finishes the logit
gradient G.

    for each chunk:     rows = its valid tokens                                                  gather_tokens.py
                        G                                                                        logits_gemm.py
                            or, if forward saved logits,                                         saved_gradient.py
                            or both: batch_invariant rounds all logits alike
                        grad_linear_weight += G.T @ rows                                         weight_gradient.py
                        grad_input[rows] = G @ linear_weight                                     input_gradient.py

A sparse gradient is made from exponentials (sparse_step.py), which backward computes again, as a one-pass step does.
Such a backward does not read lse, and forward saves no logits for it.
"""

import torch
from torch import Tensor

from ... import meta
from ...math.options import Cotangents, LogitOptions, Operands
from ...meta.arguments import Backward, BackwardInPlace
from ...meta.call import takes
from ...objectives.given_slopes import GivenSlopes
from ...support.integers import cdiv
from ..gemm.backends import backend_for
from ..gemm.device import tiles_for
from ..gemm.epilogues import ExpSum, Gradient, ReferenceClass
from ..gemm.input_gradient import Finish
from ..gemm.padded_features import with_padded_features
from ..rows.column_sums import weighted_column_sum
from ..rows.gather_tokens import launch_gather_targets
from ..rows.gradient_factors import KnownRows, launch_gradient_factors
from ..rows.set_entries import launch_set_entries
from ..rows.valid_tokens import ValidTokens, compact_tokens
from ..sparse.sparse_or_dense import is_sparse, sparse_notes
from ..sparse.sparse_step import run_spans
from .chunking import best_chunking, problem_of
from .chunks import contiguous, make_vectors_contiguous, padded, record_chunks
from .gradients import Gradients, finish_gradients, wanted_gradients, write_input_gradient
from .one_pass_step import StepTokens
from .quantized_logits import QuantizedLogits, quantized, quantized_of
from .saved_gradient import launch_saved_gradient

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
    call.lse, call.lse_rest, call.expected_log_prob, call.grad_expected_log_prob = contiguous(
        call.lse, call.lse_rest, call.expected_log_prob, call.grad_expected_log_prob
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
        finish_gradients(outputs, gradients, valid_tokens, place, call)
    record_chunks(call, linear_weight, chunks, *sparse_notes(call))
    return outputs


def run_backward(call: Backward, valid_tokens: ValidTokens, gradients: Gradients) -> list[slice]:
    """Runs over the valid tokens and returns the chunks. grad_input gets one row for each of them, in their order."""
    operands, logit_options, backend = call.operands, call.logits, backend_for(call.operands.input)
    input, linear_weight, _, _, weight = operands
    grad_input, grad_weight, bias_sum, _ = gradients
    (tokens, hidden), num_classes = input.shape, linear_weight.shape[0]
    size, count = input.dtype.itemsize, valid_tokens.order.shape[0]
    problem = problem_of(count, linear_weight, call.output_mask, batch_invariant=call.batch_invariant)
    chunking = best_chunking(problem)
    chunks, most_rows, weight_gradient = chunking.chunks, chunking.chunks[0].stop, None
    if grad_weight is not None:
        adds = isinstance(call, BackwardInPlace)
        weight_gradient = backend.weight_gradient(grad_weight, tokens, 1 if adds else len(chunks), adds)
    class_weight = weight.float() if weight is not None and call.cotangents.grad_logit_sum is not None else None
    known = KnownRows(call.lse, call.lse_rest, call.expected_log_prob, *call.cotangents, call.grad_expected_log_prob)
    memory = input.new_empty(most_rows, padded(num_classes, size))
    apart = input.new_empty(most_rows, hidden) if grad_input is None else None
    for chunk in chunks:
        n, here = chunk.stop - chunk.start, valid_tokens.of(chunk)
        rows = grad_input[chunk] if apart is None else apart[:n]
        at_target = launch_gather_targets(call, here, rows)
        factors, entry, residual, largest = launch_gradient_factors(
            known, at_target, class_weight, input.dtype, here, logit_options=logit_options
        )
        saved, rounded, gradient = None, None, memory[:n, :num_classes]
        if call.batch_invariant and logit_options.softcap is None:  # under a softcap forward saves none
            replaced = at_target.reference_class if call.expected_log_prob is not None else None
            rounded = ExpSum(at_target.reference, None, None, reference_class=replaced)
        if call.retained is not None:
            saved = quantized_of(call.retained, num_classes, input.dtype).of(slice(here.start, here.start + n))
        launch_logit_gradient(rows, operands, factors, saved, logit_options, here, out=gradient, rounded=rounded)
        launch_set_entries(gradient, at_target.column, entry, here)
        if bias_sum is not None:
            bias_sum += weighted_column_sum(gradient, None, here)
        if weight_gradient is not None:
            weight_gradient.add(gradient, rows, here)
        if grad_input is not None:
            products = torch.empty(chunking.product_bytes // 4, dtype=torch.float32, device=input.device)
            finish = gradients.summed(Finish(None, largest, residual), chunk, input)
            of_rows = grad_input[chunk], linear_weight, gradient, finish, here, products
            write_input_gradient(*of_rows, by_ranges=call.batch_invariant)
    return chunks


def launch_logit_gradient(
    rows: Tensor,  # (n, D)
    operands: Operands,
    factors: Gradient,  # of the rows
    saved: QuantizedLogits | None,  # of the first rows; None if there are none
    logit_options: LogitOptions,
    valid_tokens: ValidTokens,
    *,
    out: Tensor,  # (n, v)
    rounded: ExpSum | None,  # forward's epilogue, for which the logits GEMM rounds the others' logits as saved ones are
) -> None:
    """Writes G of rows x classes: from saved logits for the first rows, and by the logits GEMM for the others."""
    count, classes = out.shape
    first_new = 0 if saved is None else saved.numbers.shape[0]
    if first_new:
        given, tile = slice(0, first_new), tiles_for(rows).block_n
        launch_saved_gradient(saved, factors.of(given), valid_tokens.of(given), out=out[given], tile=tile)
    if first_new < count:
        others = slice(first_new, count)
        operands_of_gemm, factors = (rows[others], operands.linear_weight, operands.linear_bias), factors.of(others)
        valid_tokens, out = valid_tokens.of(others), out[others]
        if rounded is None:
            backend_for(rows).logits(*operands_of_gemm, factors, logit_options, valid_tokens, out=out)
            return
        # in the memory of G, if it has 16 bits: a program reads a tile before it writes one
        numbers = out.view(torch.int16) if out.itemsize == 2 else torch.empty_like(out, dtype=torch.int16)
        tile = tiles_for(rows).block_n
        largest = torch.empty(out.shape[0], cdiv(classes, tile), device=out.device)
        made = quantized(numbers, largest, out.dtype)
        own, reference = rounded.reference_class, rounded.reference_logit[others]
        if own is not None:
            own = ReferenceClass(own.column[others], own.logit[others])
        epilogue = ExpSum(reference, None, None, quantized=made, reference_class=own)
        backend_for(rows).logits(*operands_of_gemm, epilogue, logit_options, valid_tokens, out=numbers)
        launch_saved_gradient(made, factors, valid_tokens, out=out, tile=tile)
