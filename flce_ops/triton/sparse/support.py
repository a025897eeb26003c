"""CUDA kernels of linear_support_forward and linear_support_backward: they gather rows and run no GEMM.

             classes of i            D                        V classes                D
    i   │ 3 │ 7 │ 9 │         ┌───────────┐            3  │ i │ k │            ┌───────────┐
          └───┴───┴───────────│  row 7    │ · input_i        └───┴────────────│  row i    │
                              └───────────┘                                   └───────────┘
                              linear_weight                                       input
    forward    u = input_i . row, one program per token; then the numbers of its row, in nats
    backward   g of each entry, from u; grad_input_i = sum g row, over the token's list
                                        grad_linear_weight_j = sum g row, over the class's list

class_order.py makes the lists of the classes, and gather_sums.py adds up the lists, as for a sparse gradient. The sums
have the same bits in every run. A token's list is never split, so that the bits of the token's grad_input do not depend
on other tokens. The lists take a place for each id of padded ids, since only the device knows how many are padding; no
kernel reads or writes the rest.

If a token's support is one class, lse and the target's logit are the same number, so the log-probability is exactly 0.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ... import meta
from ...math.options import changed
from ...meta.all_classes import NOTE, gradients_of_all_classes, with_all_classes
from ...meta.arguments import SupportBackward, SupportForward
from ...meta.call import takes
from ...support.integers import cdiv, next_power_of_2
from ...support.path import record_run
from ...support.target_range import assert_in_range, in_range
from ..gemm.logits_gemm import base2_logits
from ..gemm.tma import load_tile, matrix_of
from ..kernel import Kernel
from ..rows.gradient_factors import KnownRows
from ..rows.logit_numbers import loaded, numbers_in_kernel
from ..rows.two_sum import in_two_float32
from ..steps.chunks import contiguous
from .class_order import launch_class_order
from .gather_sums import CLASS_COLUMNS, TOKEN_COLUMNS, Lists, bounds, launch_gather_lists

# N tokens, E entries (classes of tokens), D hidden, V vocabulary

ENTRIES = 8  # rows of linear_weight that a program reads at a time: 64 products for each thread
NUMBERS = 64  # entries that a program reads at a time when u is known
SPLITS = 256  # the most splits of all classes together; their float32 sums take 4 MiB at D = 4096
TABLE_BYTES = 20 << 20  # of the table of counts: at V = 128256 a program walks 205 of 8192 tokens


@Kernel
def support_products_kernel(
    operands,  # RowOperands
    support,  # Support
    products_ptr,  # (E,) out
    D,
    input_stride,  # strides along tokens and features
    linear_weight,  # Matrix, (V, D)
    ENTRIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(support.begins + token), tl.load(support.ends + token)
    for first in range(begin, end, ENTRIES):
        place = first + tl.arange(0, ENTRIES)
        here = place < end
        column = tl.load(support.classes + place, mask=here, other=0)
        acc = tl.zeros((ENTRIES, BLOCK_D), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            x = tl.load(operands.input + token * input_stride[0] + d * input_stride[1], mask=d < D, other=0.0)
            w = load_tile(linear_weight, column, d, here, d < D)
            acc += x.to(tl.float32)[None, :] * w.to(tl.float32)
        product = tl.sum(acc, 1)
        if operands.linear_bias is not None:
            product += tl.load(operands.linear_bias + column, mask=here, other=0.0).to(tl.float32)
        tl.store(products_ptr + place, product, mask=here)


@triton.jit
def logits_in_nats(product, logit_numbers, numbers):
    """z, and dz/du; `numbers` are the token's."""
    if logit_numbers.softcap is not None:
        z, slope = base2_logits(product, None, logit_numbers, numbers, 1.0)
        return z, slope * numbers.logit_scale
    else:
        # fma(..., 0) rounds the product. With a plain one, z - max would be an FMA, and not 0 for the largest logit.
        scale = tl.full(product.shape, 1.0, tl.float32) * numbers.logit_scale
        return tl.fma(product, scale, tl.zeros_like(product)), scale


@Kernel
def support_rows_kernel(
    operands,  # RowOperands
    support,  # Support
    products_ptr,  # (E,)
    results,  # eight of (N,), out; None for those not asked for
    logit_numbers,  # LogitNumbers
    V,  # classes here
    vocab_start,
    BLOCK: tl.constexpr,
):
    """One program per token: finds the largest logit, then sums exponentials relative to it. A token without a support
    gets 0, and an argmax of -1.
    """
    target_logit_out, lse_out, expected_out, max_logit_out, argmax_out, squares_out, mean_out, lse_rest_out = results
    token = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(support.begins + token), tl.load(support.ends + token)
    numbers = loaded(logit_numbers, token, token >= 0)
    size = tl.load(support.sizes + token)
    target = tl.load(operands.target + token).to(tl.int64) - vocab_start
    largest, first_largest = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int64)
    missing = tl.where((target >= 0) & (target < V), float("-inf"), 0.0)
    of_target, is_here = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        here = place < end
        column = tl.load(support.classes + place, mask=here, other=-1)
        z, _ = logits_in_nats(tl.load(products_ptr + place, mask=here, other=0.0), logit_numbers, numbers)
        z = tl.where(here, z, float("-inf"))
        of_block = tl.max(z, 0)
        column_of_block = tl.min(tl.where(here & (z == of_block), column, V), 0)
        first_largest = tl.where(of_block > largest, column_of_block, first_largest)
        largest = tl.maximum(largest, of_block, propagate_nan=tl.PropagateNan.ALL)
        at_target = here & (column == target)
        is_here = tl.maximum(is_here, tl.max(at_target.to(tl.int32), 0))
        of_target = tl.maximum(
            of_target, tl.max(tl.where(at_target, z, float("-inf")), 0), propagate_nan=tl.PropagateNan.ALL
        )
    reference = tl.where(largest == float("-inf"), 0.0, largest)  # all logits are -inf, or the list is empty
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        here = place < end
        z, _ = logits_in_nats(tl.load(products_ptr + place, mask=here, other=0.0), logit_numbers, numbers)
        exponential = tl.where(here, tl.exp(z - reference), 0.0)
        total += exponential
        moment += tl.where(exponential > 0.0, exponential * (z - reference), 0.0)
        squares += exponential * exponential
        summed += tl.where(here, z, 0.0)
    row_sum = tl.sum(total, 0)
    log_sum = tl.log(row_sum)
    lse, rest = in_two_float32(reference.to(tl.float64) + log_sum.to(tl.float64))
    counts = size > 0
    tl.store(target_logit_out + token, tl.where(counts, tl.where(is_here > 0, of_target, missing), 0.0))
    tl.store(lse_out + token, tl.where(counts, lse, 0.0))
    tl.store(lse_rest_out + token, tl.where(counts, rest.to(tl.float32), 0.0))
    if expected_out is not None:
        tl.store(expected_out + token, tl.where(counts, tl.sum(moment, 0) / row_sum - log_sum, 0.0))
    if argmax_out is not None:
        tl.store(max_logit_out + token, tl.where(counts, largest, 0.0))
        tl.store(argmax_out + token, tl.where(counts, first_largest, -1))
    if squares_out is not None:
        tl.store(squares_out + token, tl.where(counts, tl.log(tl.sum(squares, 0)) - 2.0 * log_sum, 0.0))
    if mean_out is not None:
        tl.store(mean_out + token, tl.where(counts, tl.sum(summed, 0) / size, 0.0))


@takes(SupportForward)
def launch_forward(call: SupportForward) -> meta.Outputs:
    results = meta.outputs(call)
    call.operands, call.logits = call.operands._replace(**vectors(call)), call.logits.contiguous()
    input, linear_weight, target, _ = call.operands
    tokens, hidden = input.shape
    num_classes = linear_weight.shape[0]
    *of_rows, products = results
    products.zero_()  # the buffer may be longer than the lists, and no kernel writes the rest of it
    with torch.cuda.device_of(input):
        inside = in_range(target, call.num_classes, call.ignore_index).all()
        assert_in_range(inside, target, call.num_classes, call.ignore_index)
        support_products_kernel[(tokens,)](
            call.operands,
            call.support,
            products,
            hidden,
            input.stride(),
            matrix_of(linear_weight),
            ENTRIES=ENTRIES,
            BLOCK_D=min(1024, next_power_of_2(hidden)),
            num_warps=4,
        )
        wanted = tuple(result if result.numel() else None for result in of_rows)
        support_rows_kernel[(tokens,)](
            call.operands,
            call.support,
            products,
            wanted,
            numbers_in_kernel(call.logits),
            num_classes,
            call.vocab_start,
            BLOCK=NUMBERS,
            num_warps=1,
        )
        with_all_classes(call, results)
    record_run(call, tokens, 1, NOTE)
    return results


def vectors(call: SupportForward | SupportBackward) -> dict[str, Tensor | None]:
    target, linear_bias = contiguous(*call.operands[2:])
    return {"target": target, "linear_bias": linear_bias}


class EntriesProblem(NamedTuple):
    """What the gradients of entries are made of."""

    target: Tensor  # (N,)
    products: Tensor  # (E,)
    rows: KnownRows
    logits: Any  # LogitNumbers
    vocab_start: int


@triton.jit
def gradients_of_entries(lists, problem, token, place, here):
    """Returns the classes at some places of the token's list, and each entry's float32 gradient (upper 32 bits) above
    32 bits of 0.
    """
    rows = problem.rows
    numbers = loaded(problem.logits, token, token >= 0)
    target = tl.load(problem.target + token).to(tl.int64) - problem.vocab_start
    lse = tl.load(rows.lse + token)
    share = tl.full((), 1.0, tl.float32)
    rest = tl.full((), 0.0, tl.float32)
    if rows.lse_rest is not None:
        rest = tl.load(rows.lse_rest + token)
        share = tl.exp(-rest)
    factor, of_log_p = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if rows.grad_lse is not None:
        factor = tl.load(rows.grad_lse + token).to(tl.float32)
    if rows.grad_expected_log_prob is not None:
        of_log_p = tl.load(rows.grad_expected_log_prob + token).to(tl.float32)
        factor -= of_log_p * (tl.load(rows.expected_log_prob + token) + rest)
    of_target = tl.full((), 0.0, tl.float32)
    if rows.grad_target_logit is not None:
        of_target = tl.load(rows.grad_target_logit + token).to(tl.float32)
    column = tl.load(lists.entries + place, mask=here, other=-1)
    z, slope = logits_in_nats(tl.load(problem.products + place, mask=here, other=0.0), problem.logits, numbers)
    p = tl.exp(z - lse) * share
    grad = p * factor
    if rows.grad_expected_log_prob is not None:
        grad += tl.where(p > 0.0, p * (z - lse), 0.0) * of_log_p
    grad += tl.where(column == target, of_target, 0.0)
    grad *= slope
    return column, grad.to(tl.int32, bitcast=True).to(tl.int64) << 32


@Kernel
def support_gradient_kernel(
    classes,  # Lists of each token's classes
    problem,  # EntriesProblem
    entries_ptr,  # (E,) int64, out: the entry's gradient and its class, for gather_sums.py
    BLOCK: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    begin, end = bounds(classes, token)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        column, grad = gradients_of_entries(classes, problem, token, place, place < end)
        tl.store(entries_ptr + place, grad | column, mask=place < end)


@takes(SupportBackward)
def launch_backward(call: SupportBackward) -> meta.Gradients:
    results, add = gradients_of_all_classes(call)
    call.operands, call.logits = call.operands._replace(**vectors(call)), call.logits.contiguous()
    input, linear_weight, target, _ = call.operands
    tokens, num_classes = input.shape[0], linear_weight.shape[0]
    known = KnownRows(call.lse, call.lse_rest, call.expected_log_prob, *call.cotangents, call.grad_expected_log_prob)
    numbers, (classes, begins, ends, _) = numbers_in_kernel(call.logits), call.support
    problem = EntriesProblem(target, call.products, changed(known, Tensor.contiguous), numbers, call.vocab_start)
    of_tokens = Lists(classes, ends - begins, behind=ends)
    want_input, want_weight, want_bias = call.output_mask
    with torch.cuda.device_of(input):
        if want_input:
            entries = torch.empty_like(classes, dtype=torch.int64)
            support_gradient_kernel[(tokens,)](of_tokens, problem, entries, BLOCK=NUMBERS, num_warps=1)
            lists = of_tokens._replace(entries=entries)
            launch_gather_lists(lists, linear_weight, results[0], add=add, columns=TOKEN_COLUMNS)
            del entries, lists
        if want_weight or want_bias:
            rows = cdiv(tokens, max(min(TABLE_BYTES // (4 * num_classes), tokens), 1))
            lists = launch_class_order(
                of_tokens, num_classes, rows=rows, splits=SPLITS, entries=gradients_of_entries, source=problem
            )
            if want_weight:
                launch_gather_lists(lists, input, results[1], add=add, columns=CLASS_COLUMNS, splits=SPLITS)
            if want_bias:
                grad, offsets = lists.entries.view(torch.float32).view(-1, 2)[:, 1], pad(lists.behind.long(), (1, 0))
                total = torch.segment_reduce(grad, "sum", offsets=offsets, initial=0.0, unsafe=True)
                results[2].copy_(total + results[2] if add else total)
    record_run(call, tokens, 1, NOTE)
    return results
