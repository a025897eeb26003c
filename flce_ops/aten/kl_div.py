"""linear_kl_div's operators in plain ATen, one chunk of rows at a time, for every device.

    z = softcap * tanh(logit_scale * (input @ linear_weight.T + linear_bias) / softcap)      (n, V), student
    t = the same of teacher_input, teacher_weight, teacher_bias                              (n, V), teacher
    log q = z - max z - log sum exp(z - max z)        log p = the same of t, or the logarithm of teacher_probs
                                                      (teacher_probs themselves for "cross_entropy")

    divergence, G                        for a block of rows: flce_ops/objectives/divergence.py
    grad_input = (G z') @ linear_weight     grad_linear_weight = (G z').T @ input     grad_linear_bias = (G z').T @ 1

All (n, V) matrices are in the accumulation dtype (float32 for 16-bit operands). G is rounded once, for the GEMMs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.kl_div_arguments import KlDivOperands, KlDivOptions
from ..math.options import accumulation_dtype
from ..math.shards import log_denominator, shard_rows
from ..meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from ..meta.outputs import allocate
from ..objectives.divergence import DIVERGENCES, LEAST_UNSHIFTED, Divergence
from ..support.exchange import all_gather, all_reduce
from ..support.integers import cdiv
from ..support.workspace import float32_sum_fits, matrix_bytes
from .chunks import ROWS_OF_A_BLOCK, chunk_product, copy_bytes, cut, row_chunks
from .gradients import GradientAccumulator, accumulator_of
from .logits import activate, apply_slope, cap_with_slope, finite_maximum, scale_logits, shift_rows
from .valid_tokens import kernel_of, tokens_of

# N tokens, n rows of a chunk, D and E hidden sizes of student and teacher, V vocabulary (of this rank)

# On a CPU, chunks larger than the cache only slow down the elementwise passes.
CPU_CHUNK_BYTES = 32 << 20
# With fewer rows the GEMMs are inefficient, and each bfloat16 or float16 product is rounded after a sum over few rows.
ROWS_AT_LEAST = 128
BLOCK_BYTES = 1 << 18


def rows_per_chunk(
    operands: KlDivOperands, options: KlDivOptions, weight_gradient: bool, scale_gradient: bool = False
) -> int:
    """How many rows' matrices fit the workspace. All ranks that share a vocabulary get the same number, whatever their
    shards.
    """
    input, linear_weight = operands.input, operands.linear_weight
    classes = linear_weight.shape[0] if options.vocab_size is None else shard_rows(options.vocab_size, options.ranks)
    accumulate, own = accumulation_dtype(input.dtype).itemsize, input.dtype.itemsize
    half = own < accumulate
    matrices = DIVERGENCES[options.kind].matrices + (options.softcap is not None)  # one more for dz/du
    matrices += 2 * scale_gradient  # u, and G u
    row_bytes = classes * (matrices * accumulate + 1 + 2 * own * half)  # a bool mask; G rounded
    row_bytes += operands.input.shape[1] * own  # rows that valid_tokens.py gathers
    if operands.teacher_input is not None:
        row_bytes += operands.teacher_input.shape[1] * operands.teacher_input.dtype.itemsize
    available = matrix_bytes(tokens_of(input))
    if options.vocab_size is None:
        available -= copy_bytes(linear_weight, operands.teacher_weight)
    gradient_elements = classes * input.shape[1]
    if weight_gradient and half and float32_sum_fits(gradient_elements):
        available -= accumulate * gradient_elements
    rows = max(available, 1) // row_bytes
    if input.device.type == "cpu":
        rows = min(rows, CPU_CHUNK_BYTES // row_bytes)
    return max(1, min(max(rows, ROWS_AT_LEAST), input.shape[0]))


def gradient_factors(factors: Tensor, valid: Tensor | None) -> Tensor:  # (N,)
    """Row factors, 0 for ignored tokens. A factor of inf becomes nan: the softmax's gradient subtracts a row's sum, so
    every entry would be inf - inf.
    """
    factors = factors.masked_fill(factors.isinf(), torch.nan)
    return factors if valid is None else torch.where(valid, factors, 0.0)


def student_logits(
    operands: KlDivOperands, options: KlDivOptions, rows: slice, gradients: GradientAccumulator | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the chunk of input, (n, D), and its logits, (n, V). For gradients also dz/du / logit_scale, (n, V), with
    a softcap, and the products u, (n, V), if logit_scale gets a gradient.
    """
    input = operands.input[rows]
    product = chunk_product(input, operands.linear_weight, operands.linear_bias)
    softcap, logit_scale = of_rows = options.student
    kept = None if gradients is None else gradients.kept(product)
    if softcap is None or gradients is None:
        return input, activate(product, of_rows), None, kept
    return input, *cap_with_slope(scale_logits(product, logit_scale), softcap), kept


def teacher_rows(operands: KlDivOperands, options: KlDivOptions, rows: slice) -> Tensor:  # (n, V)
    """The teacher's logits, or the logarithms of given probabilities (the probabilities for "cross_entropy")."""
    dtype = accumulation_dtype(operands.input.dtype)
    if operands.teacher_probs is None:
        product = chunk_product(operands.teacher_input[rows], operands.teacher_weight, operands.teacher_bias)
        return activate(product, options.teacher).to(dtype)
    p = operands.teacher_probs[rows].to(dtype)
    return p if DIVERGENCES[options.kind].of_given_p else p.log()


@kernel_of(KlDivForward)
def forward(call: KlDivForward, outputs: Sequence[Tensor]) -> None:
    divergence, shift, teacher_shift, student_kl = outputs
    stream_rows(call, divergence, shift, teacher_shift, student_kl)


@kernel_of(KlDivWithGrad)
def with_grad(call: KlDivWithGrad, outputs: Sequence[Tensor]) -> None:
    operands, options = call.operands, call.options
    loss, divergence, *grads = outputs
    shift, teacher_shift, student_kl = allocate(KlDivForward.results[1:], call)
    gradients = accumulator(call, grads)
    scale = gradient_factors(call.row_scale, operands.valid).to(divergence.dtype)
    stream_rows(call, divergence, shift, teacher_shift, student_kl, gradients, scale_of_products(scale, options))
    torch.sum(scale * divergence, dim=0, out=loss)


def accumulator(call: KlDivWithGrad | KlDivBackward, grads: Sequence[Tensor]) -> GradientAccumulator:
    rows = rows_per_chunk(call.operands, call.options, call.output_mask[1], call.scale_gradient)
    return accumulator_of(call, None, grads, rows)


def scale_of_products(row_scale: Tensor, options: KlDivOptions) -> Tensor:  # (N,)
    """The row scales times logit_scale, the constant part of dz/du."""
    return row_scale if options.logit_scale is None else row_scale * options.logit_scale


def stream_rows(
    call: KlDivForward | KlDivWithGrad | KlDivBackward,
    divergence: Tensor | None,  # (N,) out; None: backward, where the next three are given
    shift: Tensor,  # (2, N)
    teacher_shift: Tensor,  # (2, N), or (2, 0) with teacher_probs
    student_kl: Tensor,  # (N,), or (0,) for "forward"
    gradients: GradientAccumulator | None = None,
    row_scale: Tensor | None = None,  # (N,), logit_scale included
) -> None:
    """Runs one pass over the logits: computes the divergence of every row, and the gradients if they are wanted."""
    operands, options = call.operands, call.options
    asked = (False, False) if gradients is None else (gradients.mask[1], gradients.logit_scale is not None)
    for rows in row_chunks(call, operands.input, rows_per_chunk(operands, options, *asked)):
        input, log_q, slope, product = student_logits(operands, options, rows, gradients)
        log_p = teacher_rows(operands, options, rows)
        softmaxes = [(log_q, shift)]
        if operands.teacher_probs is None:
            softmaxes.append((log_p, teacher_shift))
        if divergence is not None:
            find_shifts(softmaxes, rows, options)
        else:
            for logits, known in softmaxes:
                logits.sub_(known[0, rows, None])
        for logits, known in softmaxes:
            logits.sub_(known[1, rows, None])
        del softmaxes, logits
        # Sums and gradient of a block share intermediate results. If other ranks have a part of the sums, all rows are
        # summed before any gradient is made, so there is one block.
        for part in blocks_of(log_q) if options.ranks == 1 else [slice(0, log_q.shape[0])]:
            places = slice(rows.start + part.start, min(rows.start + part.stop, rows.stop))
            scale = None if gradients is None else row_scale[places].unsqueeze(1)
            finish_rows(call, log_q[part], log_p[part], places, divergence, student_kl, scale)
        grad_logits = log_q
        del log_q, log_p  # frees memory before G is rounded
        if gradients is not None:
            gradients.add_scale(apply_slope(grad_logits, slope), product)
            gradients.add_bias(grad_logits)
            gradients.add_products(rows, grad_logits, input)
        del grad_logits, slope, product  # frees memory before the next chunk is allocated
    if gradients is not None:
        gradients.finish()


def finish_rows(
    call: KlDivForward | KlDivWithGrad | KlDivBackward,
    log_q: Tensor,  # (n, V), overwritten with G if it is wanted
    log_p: Tensor,  # (n, V)
    rows: slice,  # the rows of the next two
    divergence: Tensor | None,  # (N,) out; None: `student_kl` is given
    student_kl: Tensor,  # (N,)
    scale: Tensor | None,  # (n, 1); None if no gradient is wanted
) -> None:
    operands, options = call.operands, call.options
    kind, beta, alone = DIVERGENCES[options.kind], options.beta, options.ranks == 1
    # given probabilities need not add up to 1, so their sum is needed
    weighed = operands.teacher_probs is not None and not kind.of_student
    number: Tensor | float = 1.0
    known = vars(call).get("divergence")  # of forward, for a shifted kind
    offset = None if known is None else known[rows]
    if divergence is None and kind.of_student:
        number = student_kl[rows]
    elif divergence is not None or weighed:
        shift = None  # (n, 1)
        if kind.shifted:
            least = finite_maximum(torch.minimum(log_q, log_p))
            least = all_gather(least, options.group, options.ranks).amax(0)
            shift = torch.where(least < LEAST_UNSHIFTED, least, 0.0)
        sums = row_sums(kind, blocks(log_q, log_p, alone), beta if shift is None else shift, weighed)
        of_rows: tuple = (*all_reduce(sums, options.group, options.ranks), *([] if weighed else [1.0]))
        of_rows += () if shift is None else (shift.squeeze(1),)
        value, number = kind.of_sums(of_rows, beta)
        offset = None if kind.offset_of_sums is None else kind.offset_of_sums(of_rows)
    if divergence is not None:
        valid = operands.valid
        divergence[rows] = value if valid is None else torch.where(valid[rows], value, 0.0)
        if kind.of_student:
            student_kl[rows] = number
    if scale is not None:
        for block, block_q, block_p in blocks(log_q, log_p, alone):
            of_row: Any = number if isinstance(number, float) else number[block].unsqueeze(1)
            if offset is not None:
                of_row = of_row, offset[block].unsqueeze(1)
            block_q.copy_(kind.gradient(block_q, block_p, of_row, scale[block], beta))


def blocks_of(matrix: Tensor) -> Iterator[slice]:  # (n, V)
    """Splits rows into blocks, so that the temporaries of a block together are smaller than one matrix."""
    rows, classes = matrix.shape
    step = max(cdiv(rows, 16), BLOCK_BYTES // (max(classes, 1) * matrix.element_size()), 2 * ROWS_OF_A_BLOCK)
    yield from cut(0, rows, step, ROWS_OF_A_BLOCK)


def blocks(log_q: Tensor, log_p: Tensor, whole: bool) -> Iterable[tuple[slice, Tensor, Tensor]]:
    """Yields both matrices whole, or a block of rows at a time."""
    if whole:
        return [(slice(None), log_q, log_p)]
    return ((rows, log_q[rows], log_p[rows]) for rows in blocks_of(log_q))


def row_sums(
    kind: type[Divergence], blocks: Iterable[tuple[slice, Tensor, Tensor]], beta: Tensor | None, weighed: bool
) -> Tensor:
    """The (k, n) sums over this rank's columns. The mass is included only if `weighed`. `beta` may be rows' shifts."""
    count = kind.sums - kind.shifted - (not weighed)
    of_rows = beta is not None and beta.dim() > 0
    terms = (kind.of_entry(log_q, log_p, beta[rows] if of_rows else beta)[:count] for rows, log_q, log_p in blocks)
    return torch.cat([torch.stack([of_entry.sum(1) for of_entry in block]) for block in terms], 1)


def find_shifts(softmaxes: list[tuple[Tensor, Tensor]], rows: slice, options: KlDivOptions) -> None:
    """Fills in the (2, N) shift of each softmax, and subtracts its first number from the logits, (n, V). A function of
    its own, because a name that is left over would keep the logits in memory.
    """
    found = [shift_rows(logits) for logits, _ in softmaxes]
    row_max, log_sum = (torch.stack(numbers) for numbers in zip(*found))
    denominators = log_denominator(row_max, log_sum, options.group, options.ranks)
    for k, (_, shift) in enumerate(softmaxes):
        shift[0, rows], shift[1, rows] = row_max[k], denominators[k]


@kernel_of(KlDivBackward)
def backward(call: KlDivBackward, grads: Sequence[Tensor]) -> None:
    operands, options, shift = call.operands, call.options, call.shift
    scale = scale_of_products(gradient_factors(call.grad, operands.valid).to(shift.dtype), options)
    gradients = accumulator(call, grads)
    known = (None, shift, call.teacher_shift, call.student_kl)
    stream_rows(call, *known, gradients, scale)
