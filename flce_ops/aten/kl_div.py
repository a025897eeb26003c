"""linear_kl_div's operators in plain ATen, one chunk of rows at a time, for every device.

    z = softcap * tanh(logit_scale * (input @ linear_weight.T + linear_bias) / softcap)      (n, V), student
    t = the same of teacher_input, teacher_weight, teacher_bias                              (n, V), teacher
    log q = z - max z - log sum exp(z - max z)        log p = the same of t, or the logarithm of teacher_probs
                                                      (teacher_probs themselves for "cross_entropy")

    divergence, G                        for a block of rows: flce_ops/objectives/divergence.py
    grad_input = (G z') @ linear_weight     grad_linear_weight = (G z').T @ input     grad_linear_bias = (G z').T @ 1

All (n, V) matrices are in the accumulation dtype (float32 for 16-bit operands). G is rounded once, for the GEMMs.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..math.options import KlDivOperands, KlDivOptions, accumulation_dtype
from ..math.statistics import all_gather, all_reduce, log_denominator, shard_rows
from ..meta import allocate
from ..meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from ..objectives.divergence import DIVERGENCES, LEAST_UNSHIFTED, Divergence
from ..support.sizes import cdiv
from ..support.workspace import matrix_bytes
from . import chunks
from .chunks import kernel_of
from .gradients import GradientAccumulator, logit_blocks
from .logits import activate, finite_maximum, shift_rows

# N tokens, n rows of a chunk, D and E hidden sizes of student and teacher, V vocabulary (of this rank)

BLOCK_BYTES = 1 << 18
BLOCKS = 4  # in a block of the other operators: the terms of an entry take twice as many temporaries


def rows_of_chunk(call: Any, nbytes: int, gradients: bool) -> int:
    """All ranks that share a vocabulary get the same number, whatever their shards."""
    operands, options, teacher = call.operands, call.options, call.operands.teacher_input
    input, alone = operands.input, options.vocab_size is None
    classes = operands.linear_weight.shape[0] if alone else shard_rows(options.vocab_size, options.ranks)
    rounded = chunks.product_is_rounded(input)
    in_block = DIVERGENCES[options.kind].matrices + rounded + (options.softcap is not None)
    in_block += 2 * vars(call).get("scale_gradient", False)  # u, and G u
    return chunks.rows_per_chunk(
        input,
        nbytes,
        classes,
        matrices=1 + rounded + (0 if alone else in_block),  # the teacher's
        matrices_in_block=cdiv(2 * in_block, BLOCKS) if alone else 0,
        bytes_of_row=0 if teacher is None else teacher.shape[1] * teacher.dtype.itemsize,
        reserved=chunks.copy_bytes(operands.linear_weight, operands.teacher_weight) if alone else 0,
        summed=classes * input.shape[1] if gradients and call.output_mask[1] else 0,
    )


def gradient_factors(factors: Tensor, valid: Tensor | None) -> Tensor:  # (N,)
    """Row factors, 0 for ignored tokens. A factor of inf becomes nan: the softmax's gradient subtracts a row's sum, so
    every entry would be inf - inf.
    """
    factors = factors.masked_fill(factors.isinf(), torch.nan)
    return factors if valid is None else torch.where(valid, factors, 0.0)


def teacher_rows(operands: KlDivOperands, options: KlDivOptions, rows: slice) -> Tensor:  # (n, V)
    """The teacher's logits, or the logarithms of given probabilities (the probabilities for "cross_entropy")."""
    dtype = accumulation_dtype(operands.input.dtype)
    if operands.teacher_probs is None:
        product = chunks.chunk_product(operands.teacher_input[rows], operands.teacher_weight, operands.teacher_bias)
        return activate(product, options.teacher).to(dtype)
    p = operands.teacher_probs[rows].to(dtype)
    return p if DIVERGENCES[options.kind].of_given_p else p.log()


@kernel_of(KlDivForward)
def forward(call: KlDivForward, outputs: Sequence[Tensor]) -> None:
    divergences(call, outputs)


@kernel_of(KlDivWithGrad)
def with_grad(call: KlDivWithGrad, outputs: Sequence[Tensor]) -> None:
    loss, divergence, *grads = outputs
    of_rows = (divergence, *allocate(KlDivForward.results[1:], call))
    scale = gradient_factors(call.row_scale, call.operands.valid).to(divergence.dtype)
    divergences(call, of_rows, grads, scale)
    torch.sum(scale * divergence, dim=0, out=loss)


@kernel_of(KlDivBackward)
def backward(call: KlDivBackward, grads: Sequence[Tensor]) -> None:
    scale = gradient_factors(call.grad, call.operands.valid).to(call.lse_pair.dtype)
    divergences(call, (None, call.lse_pair, call.teacher_lse_pair, call.student_kl), grads, scale)


def divergences(
    call: KlDivForward | KlDivWithGrad | KlDivBackward,
    of_rows: Sequence[Tensor | None],  # the results of KlDivForward, out; in backward they are given but for the first
    grads: Sequence[Tensor] | None = None,  # out
    row_scale: Tensor | None = None,  # (N,)
) -> None:
    """Runs one pass over the logits: computes the divergence of every row, and the gradients if they are wanted."""
    operands, options = call.operands, call.options
    divergence, pair, teacher_pair, student_kl = of_rows
    kind, beta, alone = DIVERGENCES[options.kind], options.beta, options.ranks == 1
    # given probabilities need not add up to 1, so their sum is needed
    weighed = operands.teacher_probs is not None and not kind.of_student
    of_forward = vars(call).get("divergence")  # for a shifted kind
    nbytes = matrix_bytes(chunks.tokens_of(operands.input))
    step = rows_of_chunk(call, nbytes, grads is not None)
    gradients = None if grads is None else GradientAccumulator(call, grads, step)

    def work(rows: slice, log_q: Tensor, log_p: Tensor) -> None:
        softmaxes = [(log_q, pair)]
        if operands.teacher_probs is None:
            softmaxes.append((log_p, teacher_pair))
        if divergence is not None:
            find_pairs(softmaxes, rows, options)
        for logits, known in softmaxes:
            if divergence is None:
                logits.sub_(known[rows, :1])
            logits.sub_(known[rows, 1:])
        number: Tensor | float = 1.0
        offset = None if of_forward is None else of_forward[rows]
        # Of a kind with a kink K depends on which entries are equal to the bit. Backward may divide its rows otherwise
        # than forward, and BLAS then rounds logits otherwise, so these rows are summed again.
        again = kind.kinked and alone
        if divergence is None and kind.of_student and not again:
            number = student_kl[rows]
        elif divergence is not None or weighed or again:
            lowest = None  # (n, 1), a shift of the row
            if kind.shifted:
                least = finite_maximum(torch.minimum(log_q, log_p))
                least = all_gather(least, options.group, options.ranks).amax(0)
                lowest = torch.where(least < LEAST_UNSHIFTED, least, 0.0)
            sums = row_sums(kind, blocks(log_q, log_p, alone), beta if lowest is None else lowest, weighed)
            numbers: tuple = (*all_reduce(sums, options.group, options.ranks), *([] if weighed else [1.0]))
            numbers += () if lowest is None else (lowest.squeeze(1),)
            value, number = kind.of_sums(numbers, beta)
            offset = None if kind.offset_of_sums is None else kind.offset_of_sums(numbers)
        if divergence is not None:
            valid = operands.valid
            divergence[rows] = value if valid is None else torch.where(valid[rows], value, 0.0)
            if kind.of_student:
                student_kl[rows] = number
        if row_scale is not None:
            scale = row_scale[rows].unsqueeze(1)
            for block, block_q, block_p in blocks(log_q, log_p, alone):
                of_row: Any = number if isinstance(number, float) else number[block].unsqueeze(1)
                if offset is not None:
                    of_row = of_row, offset[block].unsqueeze(1)
                block_q.copy_(kind.gradient(block_q, block_p, of_row, scale[block], beta))

    # Sums and gradient of a block share intermediate results. If other ranks have a part of the sums, all rows are
    # summed before any gradient is made, so there is one block.
    of_block = chunks.block_bytes(operands.input, nbytes) // BLOCKS if alone else chunks.WHOLE_CHUNK
    for chunk, product in chunks.chunk_products(call, step):
        teacher = teacher_rows(operands, options, chunk)
        blocks_of_chunk = partial(logit_blocks, call) if gradients is None else gradients.blocks
        for rows, log_q in blocks_of_chunk(chunk, product, of_block):
            work(rows, log_q, teacher[rows.start - chunk.start : rows.stop - chunk.start])
            del log_q  # frees memory before the next block is allocated
        del teacher
        if gradients is not None:
            gradients.add_products(chunk, product)
    if gradients is not None:
        gradients.finish()


def blocks(log_q: Tensor, log_p: Tensor, whole: bool) -> Iterable[tuple[slice, Tensor, Tensor]]:  # (n, V) each
    """Both matrices whole, or a block of rows at a time, whose temporaries together are smaller than one matrix."""
    if whole:
        return [(slice(None), log_q, log_p)]
    rows, classes = log_q.shape
    step = max(cdiv(rows, 16), BLOCK_BYTES // (max(classes, 1) * log_q.element_size()), 2 * chunks.ROWS_OF_A_BLOCK)
    parts = chunks.cut(0, rows, step, chunks.ROWS_OF_A_BLOCK)
    return ((part, log_q[part], log_p[part]) for part in parts)


def row_sums(
    kind: type[Divergence], blocks: Iterable[tuple[slice, Tensor, Tensor]], beta: Tensor | None, weighed: bool
) -> Tensor:
    """The (k, n) sums over this rank's columns. The mass is included only if `weighed`. `beta` may be rows' shifts."""
    count = kind.sums - kind.shifted - (not weighed)
    of_rows = beta is not None and beta.dim() > 0
    terms = (kind.of_entry(log_q, log_p, beta[rows] if of_rows else beta)[:count] for rows, log_q, log_p in blocks)
    return torch.cat([torch.stack([of_entry.sum(1) for of_entry in block]) for block in terms], 1)


def find_pairs(softmaxes: list[tuple[Tensor, Tensor]], rows: slice, options: KlDivOptions) -> None:
    """Fills in the (N, 2) lse_pair of each softmax, and subtracts the reference from the logits, (n, V). A function of
    its own, because a name that is left over would keep the logits in memory.
    """
    found = [shift_rows(logits) for logits, _ in softmaxes]
    row_max, log_sum = (torch.stack(numbers) for numbers in zip(*found))
    denominators = log_denominator(row_max, log_sum, options.group, options.ranks)
    for (_, pair), *numbers in zip(softmaxes, row_max, denominators):
        pair[rows] = torch.stack(numbers, -1)
