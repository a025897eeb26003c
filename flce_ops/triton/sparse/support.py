"""CUDA kernels of linear_support_forward and linear_support_backward: they gather rows and run no GEMM.

             classes of i            D                        V classes                D
    i   │ 3 │ 7 │ 9 │         ┌───────────┐            3  │ i │ k │            ┌───────────┐
          └───┴───┴───────────│  row 7    │ · input_i        └───┴────────────│  row i    │
                              └───────────┘                                   └───────────┘
                              linear_weight                                       input
    forward    u = input_i . row, one program per token; then the numbers of its row, in nats
    backward   g of each entry, from u; grad_input_i = sum g row, over the token's list
                                        grad_linear_weight_j = sum g row, over the class's list, made by a sort

gather_sums.py adds up the lists, as for a sparse gradient. The sums have the same bits in every run. A token's list is
never split, so that the bits of the token's grad_input do not depend on other tokens.

If a token's support is one class, lse and the target's logit are the same number, so the log-probability is exactly 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import meta
from ...math.support import Support
from ...meta.all_classes import gradients_of_all_classes, with_all_classes
from ...meta.arguments import SupportBackward, SupportForward
from ...meta.call import takes
from ...support.path import record_run
from ...support.target_range import assert_in_range, in_range
from ..gemm.logits_gemm import base2_logits
from ..gemm.tma import load_tile, matrix_of
from ..launch.replay import Kernel
from ..rows.logit_numbers import loaded, numbers_in_kernel
from ..rows.two_sum import in_two_float32
from ..steps.chunks import contiguous
from .gather_sums import SplitLists, launch_gather_lists, launch_split_lists

# N tokens, E entries (classes of tokens), D hidden, V vocabulary

ENTRIES = 8  # rows of linear_weight that a program reads at a time: 64 products for each thread
NUMBERS = 64  # entries that a program reads at a time when u is known
UNSPLIT = 1 << 30  # more entries than any list has, so no list is split
SPLIT = 256  # a class's list with more entries is cut, as in sparse_step.py
SPLITS = 256  # the most splits of all classes together; their float32 sums take 4 MiB at D = 4096
SORTED = 1 << 20  # entries that are sorted at a time: 48 MiB
TOKEN_COLUMNS, CLASS_COLUMNS = 512, 1024  # columns of one program of the gather kernel


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
    begin, end = tl.load(support.offsets + token), tl.load(support.offsets + token + 1)
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
    z, slope = base2_logits(product, None, logit_numbers, numbers, 1.0)
    if logit_numbers.softcap is None:
        slope = tl.full(product.shape, 1.0, tl.float32)
    return z, slope * numbers.logit_scale


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
    begin, end = tl.load(support.offsets + token), tl.load(support.offsets + token + 1)
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
    all_classes = num_classes if call.vocab_size is None else call.vocab_size
    with torch.cuda.device_of(input):
        assert_in_range(in_range(target, all_classes, call.ignore_index).all(), target, all_classes, call.ignore_index)
        support_products_kernel[(tokens,)](
            call.operands,
            call.support,
            products,
            hidden,
            input.stride(),
            matrix_of(linear_weight),
            ENTRIES=ENTRIES,
            BLOCK_D=min(1024, triton.next_power_of_2(hidden)),
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


NOTE = "the classes of a support are gathered"


def vectors(call: SupportForward | SupportBackward) -> dict[str, Tensor | None]:
    target, linear_bias = contiguous(*call.operands[2:])
    return {"target": target, "linear_bias": linear_bias}


@Kernel
def support_gradient_kernel(
    target_ptr,  # (N,)
    support,  # Support
    products_ptr,  # (E,)
    rows,  # five of (N,): lse, its rounding error, expected log p; cotangents of lse and expected log p; or None
    grad_target_ptr,  # (N,), or None
    logit_numbers,  # LogitNumbers
    grad_ptr,  # (E,) out
    entries_ptr,  # (E,) int64, out: the entry's gradient (upper 32 bits) and its class (lower 32 bits)
    vocab_start,
    BLOCK: tl.constexpr,
):
    """One program per token."""
    lse_ptr, lse_rest_ptr, expected_ptr, grad_lse_ptr, grad_expected_ptr = rows
    token = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(support.offsets + token), tl.load(support.offsets + token + 1)
    numbers = loaded(logit_numbers, token, token >= 0)
    target = tl.load(target_ptr + token).to(tl.int64) - vocab_start
    lse = tl.load(lse_ptr + token)
    share = tl.full((), 1.0, tl.float32)
    rest = tl.full((), 0.0, tl.float32)
    if lse_rest_ptr is not None:
        rest = tl.load(lse_rest_ptr + token)
        share = tl.exp(-rest)
    factor, of_log_p = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if grad_lse_ptr is not None:
        factor = tl.load(grad_lse_ptr + token).to(tl.float32)
    if grad_expected_ptr is not None:
        of_log_p = tl.load(grad_expected_ptr + token).to(tl.float32)
        factor -= of_log_p * (tl.load(expected_ptr + token) + rest)
    of_target = tl.full((), 0.0, tl.float32)
    if grad_target_ptr is not None:
        of_target = tl.load(grad_target_ptr + token).to(tl.float32)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        here = place < end
        column = tl.load(support.classes + place, mask=here, other=-1)
        z, slope = logits_in_nats(tl.load(products_ptr + place, mask=here, other=0.0), logit_numbers, numbers)
        p = tl.exp(z - lse) * share
        grad = p * factor
        if grad_expected_ptr is not None:
            grad += tl.where(p > 0.0, p * (z - lse), 0.0) * of_log_p
        grad += tl.where(column == target, of_target, 0.0)
        grad *= slope
        tl.store(grad_ptr + place, grad, mask=here)
        bits = grad.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(entries_ptr + place, bits | column, mask=here)


@takes(SupportBackward)
def launch_backward(call: SupportBackward) -> meta.Gradients:
    results, add = gradients_of_all_classes(call)
    call.operands, call.logits = call.operands._replace(**vectors(call)), call.logits.contiguous()
    input, linear_weight, *_ = call.operands
    grad = call.products.new_empty(call.products.shape)
    entries = torch.empty_like(call.support.classes)
    rows = contiguous(
        call.lse,
        call.lse_rest,
        call.expected_log_prob,
        call.cotangents.grad_lse,
        call.grad_expected_log_prob,
        call.cotangents.grad_target_logit,
    )
    with torch.cuda.device_of(input):
        support_gradient_kernel[(input.shape[0],)](
            call.operands.target,
            call.support,
            call.products,
            rows[:5],
            rows[5],
            numbers_in_kernel(call.logits),
            grad,
            entries,
            call.vocab_start,
            BLOCK=NUMBERS,
            num_warps=1,
        )
        want_input, want_weight, want_bias = call.output_mask
        if want_input:
            lengths = call.support.offsets.diff()
            launch_sums(entries, lengths, linear_weight, results[0], add, UNSPLIT, TOKEN_COLUMNS)
        if want_weight or want_bias:
            del entries
            of_classes, starts = by_class(call.support, grad, input.shape[0], linear_weight.shape[0])
            if want_weight:
                launch_sums(of_classes, starts.diff(), input, results[1], add, SPLIT, CLASS_COLUMNS)
            if want_bias:
                grad = (of_classes >> 32).int().view(torch.float32)
                total = torch.segment_reduce(grad, "sum", offsets=starts, initial=0.0, unsafe=True)
                results[2].copy_(total + results[2] if add else total)
    record_run(call, input.shape[0], 1, NOTE)
    return results


def by_class(support: Support, grad: Tensor, tokens: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Lists of the classes: (E,) int64, entries by class, and by token within a class; (V + 1,) where classes begin.

    Behind the last list stand entries of no token, of which padded ids leave many. A sort takes six times its numbers
    in memory, so one range of entries is sorted at a time. Counts of the ranges before it say where its own belong.
    """
    places, device = support.classes.shape[0], grad.device
    ranges = [slice(start, min(start + SORTED, places)) for start in range(0, places, SORTED)]

    def classes_and_tokens(part: slice) -> tuple[Tensor, Tensor]:
        place = torch.arange(part.start, part.stop, device=device)
        token = torch.searchsorted(support.offsets, place, right=True) - 1
        return torch.where(token < tokens, support.classes[part], num_classes), token

    counts = torch.zeros(num_classes + 1, dtype=torch.int64, device=device)
    for part in ranges:
        column, token = classes_and_tokens(part)
        here = token < tokens
        # the others add 0, each to another count: millions of additions to one count would wait for each other
        spread = torch.arange(column.shape[0], device=device) % num_classes
        counts.scatter_add_(0, torch.where(here, column, spread), here.long())
    behind = counts.cumsum(0)
    starts, free = behind - counts, behind - counts  # free: where a class's next entry belongs
    entries, classes = torch.empty_like(support.classes), torch.arange(num_classes + 2, device=device)
    for part in ranges:
        column, token = classes_and_tokens(part)
        entry = grad[part].view(torch.int32).long() << 32 | token
        column, order = column.sort(stable=True)
        first = torch.searchsorted(column, classes)
        place = free[column] + torch.arange(column.shape[0], device=device) - first[column]
        entries.scatter_(0, place, entry[order])
        free += first.diff()
    return entries, starts


def launch_sums(
    entries: Tensor,  # (E,) int64, one list after another
    lengths: Tensor,  # (L,)
    table: Tensor,  # (T, D)
    out: Tensor,  # (L, D)
    add: bool,
    shortest: int,  # split
    columns: int,
) -> None:
    lengths = lengths.int()
    behind, splits, split = torch.empty_like(lengths), torch.empty_like(lengths), lengths.new_empty(())
    lists = SplitLists(entries, lengths, behind, split, splits)
    launch_split_lists(lists, shortest, SPLITS)
    sums = out.new_empty(SPLITS, out.shape[1], dtype=torch.float32)
    launch_gather_lists(lists, sums, table, out, add=add, columns=columns)
