"""Kernels of linear_support_forward and linear_support_backward: each token has logits only for the classes of its
support, from gathered rows of linear_weight, without a GEMM.

u_e = input_row(e) . linear_weight_class(e) + linear_bias_class(e) e: one class of one token

    grad_input_i = sum_(e of i) g_e linear_weight_class(e)      grad_linear_weight_j = sum_(e of j) g_e input_row(e)

The numbers of a row and the gradient g are defined as in logits.py, with sums over a token's entries instead of all
classes. Entries are gathered in parts that fit the workspace. The sums have the same bits in every run: a CPU adds in
order, and other devices use index_put_, which sorts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import meta
from ..math.options import accumulation_dtype
from ..math.statistics import two_sum
from ..math.support import Support
from ..meta.all_classes import NOTE, gradients_of_all_classes, with_all_classes
from ..meta.arguments import SupportBackward, SupportForward
from ..meta.call import takes
from ..meta.outputs import Gradients
from ..support.path import record_run
from ..support.workspace import matrix_bytes
from .chunks import CPU_CHUNK_BYTES
from .logits import activate, activate_with_slope, apply_slope, softmax_factors, softmax_gradient
from .row_statistics import at_least_finite
from .valid_tokens import check_target_range

# N tokens, E entries (classes of tokens), D hidden, V vocabulary, L lists of entries

MATRICES = 3  # gathered rows of both operands and their product


class Entries(NamedTuple):
    """(E,) each, one list after another. There are fewer than places; a CPU leaves the rest out, elsewhere it belongs
    to no token.
    """

    place: Tensor  # in the support's classes; 0 if the entry belongs to no token, as are the next two
    row: Tensor  # the token
    column: Tensor  # the class
    counts: Tensor  # bool
    at_target: Tensor  # bool


def entries_of(call: SupportForward | SupportBackward) -> Entries:
    classes, begins, *_ = call.support
    offsets, target = offsets_of(call.support), call.operands.target.long() - call.vocab_start
    if offsets.device.type == "cpu":
        count = int(offsets[-1])
    else:  # the host does not wait; a rank without tokens may hold the classes of others
        count = classes.shape[0] if target.shape[0] else 0
    entry = torch.arange(count, device=offsets.device)
    row = torch.searchsorted(offsets, entry, right=True) - 1
    counts = row < target.shape[0]
    row = torch.where(counts, row, 0)
    place = torch.where(counts, begins[row] + entry - offsets[row], 0)
    column = torch.where(counts, classes[place].long(), 0)
    return Entries(place, row, column, counts, counts & (column == target[row]))


def offsets_of(support: Support) -> Tensor:  # (N + 1,), the lists among the entries
    return pad((support.ends - support.begins).cumsum(0), (1, 0))


def entries_at_once(input: Tensor) -> int:
    nbytes = matrix_bytes(input.shape[0])
    if input.device.type == "cpu":
        nbytes = min(nbytes, CPU_CHUNK_BYTES)
    return max(nbytes // (MATRICES * max(input.shape[1], 1) * accumulation_dtype(input.dtype).itemsize), 1)


def parts(call: SupportForward | SupportBackward, entries: int) -> list[slice]:
    at_once = entries_at_once(call.operands.input)
    return [slice(start, min(start + at_once, entries)) for start in range(0, entries, at_once)]


@takes(SupportForward)
def forward(call: SupportForward) -> meta.Outputs:
    results = meta.outputs(call)
    check_target_range(call.operands.target, call.num_classes, call.ignore_index)
    entries, products = entries_of(call), results[-1].fill_(0.0)
    chunks = parts(call, entries.row.shape[0])
    for part in chunks:
        product = torch.where(entries.counts[part], product_of(call, entries, part), 0.0)
        add_at(products, entries.place[part], product)
    rows_of_entries(call, entries, products, results)
    with_all_classes(call, results)
    record_run(call, call.operands.input.shape[0], len(chunks), NOTE)
    return results


def product_of(call: SupportForward, entries: Entries, part: slice) -> Tensor:  # u, (e,)
    input, linear_weight, _, linear_bias = call.operands
    dtype = accumulation_dtype(input.dtype)
    of_input = input[entries.row[part]].to(dtype)
    product = of_input.mul_(linear_weight[entries.column[part]]).sum(1)
    return product if linear_bias is None else product + linear_bias[entries.column[part]].to(dtype)


def rows_of_entries(call: SupportForward, entries: Entries, products: Tensor, results: Sequence[Tensor]) -> None:
    target_logit, lse, expected, max_logit, argmax, squares, mean_logit, lse_rest, _ = results
    target, sizes, offsets = call.operands.target, call.support.sizes, offsets_of(call.support)
    logits = activate(products[entries.place].unsqueeze(1), call.logits.of(entries.row)).squeeze(1)

    def over_rows(values: Tensor, reduce: str, initial: float) -> Tensor:  # (E,) -> (N,)
        return torch.segment_reduce(values, reduce, offsets=offsets, initial=initial, unsafe=True)

    row_max = over_rows(logits, "max", -torch.inf)
    finite = row_max.clamp(min=torch.finfo(row_max.dtype).min)  # finite also if all logits are -inf
    shifted = logits - finite[entries.row]
    exponentials = shifted.exp()
    row_sum = over_rows(exponentials, "sum", 0.0)
    log_sum = row_sum.log()
    has_target = over_rows(entries.at_target.to(logits.dtype), "max", 0.0) > 0.0
    of_target = over_rows(torch.where(entries.at_target, logits, -torch.inf), "max", -torch.inf)
    column = target.long() - call.vocab_start
    here = (column >= 0) & (column < call.operands.linear_weight.shape[0])
    total, rest = two_sum(finite, log_sum)
    counts = sizes > 0
    fill(target_logit, counts, torch.where(has_target, of_target, torch.where(here, -torch.inf, 0.0)))
    fill(lse, counts, total)
    fill(lse_rest, counts, rest)
    if call.expected_log_prob:
        moment = over_rows(at_least_finite(shifted.clone()) * exponentials, "sum", 0.0)
        fill(expected, counts, moment / row_sum - log_sum)
    if call.argmax:
        num_classes = call.operands.linear_weight.shape[0]
        is_largest = logits == row_max[entries.row]
        first = over_rows(torch.where(is_largest, entries.column, num_classes).double(), "min", num_classes)
        fill(max_logit, counts, row_max)
        fill(argmax, counts, torch.where(first < num_classes, first, 0.0).long(), -1)
    if call.log_sum_sq_probs:
        fill(squares, counts, over_rows(exponentials.square(), "sum", 0.0).log() - 2.0 * log_sum)
    if call.mean_logit:
        fill(mean_logit, counts, over_rows(logits, "sum", 0.0) / sizes)


def fill(result: Tensor, counts: Tensor, values: Tensor, otherwise: float = 0.0) -> None:
    """(N,) each; ignored tokens have no entries."""
    result.copy_(torch.where(counts, values, otherwise))


@takes(SupportBackward)
def backward(call: SupportBackward) -> Gradients:
    results, holds = gradients_of_all_classes(call)
    if not holds:
        for result in results:
            result.zero_()
    entries = entries_of(call)
    chunks = parts(call, entries.row.shape[0])
    grad = gradient_of_entries(call, entries)
    input, linear_weight, *_ = call.operands
    want_input, want_weight, want_bias = call.output_mask
    if want_input:
        add_lists(results[0], entries.row, entries.column, grad, linear_weight, chunks)
    if want_weight or want_bias:
        order = torch.where(entries.counts, entries.column, linear_weight.shape[0]).sort(stable=True).indices
        if want_weight:
            add_lists(results[1], entries.column[order], entries.row[order], grad[order], input, chunks)
        if want_bias:
            total = results[2].to(grad.dtype)
            add_at(total, entries.column[order], grad[order])
            results[2].copy_(total)
    record_run(call, input.shape[0], len(chunks), NOTE)
    return results


def gradient_of_entries(call: SupportBackward, entries: Entries) -> Tensor:  # g, (E,)
    row, counts = entries.row, entries.counts
    valid = call.support.sizes > 0
    cotangents = call.cotangents.masked(valid, valid, call.lse.dtype)
    factors = softmax_factors(call, valid, cotangents.grad_lse)
    products = call.products[entries.place].unsqueeze(1)
    logits, slope = activate_with_slope(products, call.logits.of(row))
    grad = softmax_gradient(logits, factors.of(row))
    if cotangents.grad_target_logit is not None:
        grad += torch.where(entries.at_target, cotangents.grad_target_logit[row], 0.0).unsqueeze(1)
    return torch.where(counts, apply_slope(grad, slope).squeeze(1), 0.0)


def add_lists(
    out: Tensor,  # (L, D)
    to: Tensor,  # (E,) of `out`, in order
    of: Tensor,  # (E,) of `table`
    factor: Tensor,  # (E,)
    table: Tensor,
    chunks: Sequence[slice],
) -> None:
    """out_to += factor_e table_of, in the accumulation dtype. A CPU rounds each sum of a chunk once."""
    total = out
    if out.device.type != "cpu" and out.dtype != factor.dtype:
        total = out.to(factor.dtype)
    for part in chunks:
        rows = table[of[part]].to(factor.dtype).mul_(factor[part].unsqueeze(1))
        if out.device.type == "cpu":
            lists, place = torch.unique_consecutive(to[part], return_inverse=True)
            sums = out[lists].to(factor.dtype).index_add_(0, place, rows)
            out[lists] = sums.to(out.dtype)
        else:
            add_at(total, to[part], rows)
    if total is not out:
        out.copy_(total)


def add_at(out: Tensor, to: Tensor, values: Tensor) -> None:
    """Adds in the same order in every run."""
    if out.device.type == "cpu":
        out.index_add_(0, to, values)
    else:
        out.index_put_((to,), values, accumulate=True)
