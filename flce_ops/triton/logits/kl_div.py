"""CUDA implementations of linear_kl_div's three operators, which run one step.

forward      row sums, no G
with_grad    row sums and G
backward     G, from the numbers of each row that forward returned

    rows, teacher's rows = the chunk's valid tokens                                                copy_rows.py
    t = logits of the teacher                   GEMM; float32 row sums in its epilogue             stored.py
    s = logits of the student                   likewise; ranks that share V exchange row numbers
    divergence, G over s                        one or two passes over s and t                     divergence_rows.py
    G's GEMMs                                   grad_input's splits where t was                    steps/gradients.py

The first four lines run for one part of the chunk at a time, because the teacher's logits are not needed once G is
made. G of a part will overwrite the part's student logits. The teacher's logits are in the last rows of the memory,
which no G has reached yet:

    row 0        o          o + p                M - p          M
        G of earlier parts  | student's | ...   | teacher's |         o + 2 p <= M

So 4096 tokens of 128256 classes take 3 chunks of 1408 in the default workspace, in parts of 896 and 512. With two
matrices of a whole chunk they would take 4. If the user gives the teacher's probabilities, the kernels read them in
place.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import meta
from ...math.statistics import all_gather, all_reduce, shard_rows
from ...math.token_weights_and_denominator import Reduction
from ...meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from ...meta.call import takes
from ...objectives.divergence import DIVERGENCES, ForwardKL
from ...support.sizes import cdiv
from ..gemm.input_gradient import TILE_OVERHEAD, float32_memory
from ..gemm.tiles import EPILOGUE_N, Tiles, matrix_of, tiles_for
from ..rows.after_chunks import LossSum
from ..rows.copy_rows import launch_copy_rows, with_padded_features
from ..rows.valid_tokens import ValidTokens, compact_tokens, room_for_rows
from ..steps.chunks import (
    MULTIPLE,
    Chunking,
    Problem,
    best_chunking,
    contiguous,
    equal_chunking,
    padded,
    problem_of,
    record_chunks,
)
from ..steps.gradients import (
    ChunkGradient,
    GradientGemms,
    Gradients,
    finish_step,
    powers_for_float16,
    wanted_gradients,
)
from .divergence_rows import Entries, RowResults, Rows, Softmax, share_denominators

# N tokens, n rows of a chunk or of a part of it, D and E hidden sizes of student and teacher, V vocabulary (of this
# rank), T tiles along V

NO_GRADIENTS = Gradients(None, None, None)
CANDIDATES = 16  # about as many sizes of the teacher's memory are tried
LAUNCHES = 1  # the fixed cost of a part, mostly its launches, in waves of tiles
KlDivCall = KlDivForward | KlDivWithGrad | KlDivBackward


@takes(KlDivForward)
@with_padded_features
def launch_kl_div_forward(call: KlDivForward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.outputs(call)
    with torch.cuda.device_of(call.operands.input):
        results = RowResults(*(out if out.numel() else None for out in outputs))
        valid_tokens, _ = prepared(call)
        chunks = KlDivStep(call, valid_tokens, NO_GRADIENTS, results).run()
    record_chunks(call, call.operands.linear_weight, chunks)
    return outputs


@takes(KlDivWithGrad)
@with_padded_features
def launch_kl_div_with_grad(call: KlDivWithGrad) -> tuple[Tensor, ...]:
    outputs = meta.outputs(call)
    call.row_scale = call.row_scale.contiguous()
    loss, divergence, *grads = outputs
    with torch.cuda.device_of(call.operands.input):
        valid_tokens, place = prepared(call)
        gradients = wanted_gradients(grads, call)
        chunks = KlDivStep(call, valid_tokens, gradients, RowResults(divergence), call.row_scale).run()
        loss_sum = LossSum(divergence, Reduction(call.row_scale), loss)
        finish_step(grads, gradients, valid_tokens, place, call, loss_sum)
    record_chunks(call, call.operands.linear_weight, chunks)
    return outputs


@takes(KlDivBackward)
@with_padded_features
def launch_kl_div_backward(call: KlDivBackward) -> meta.Gradients:
    outputs = meta.outputs(call)
    call.grad, *of_rows = contiguous(call.grad, call.divergence, call.lse_pair, call.teacher_lse_pair, call.student_kl)
    known = RowResults(*(None if numbers is None or not numbers.numel() else numbers for numbers in of_rows))
    with torch.cuda.device_of(call.operands.input):
        valid_tokens, place = prepared(call)
        gradients = wanted_gradients(outputs, call)
        chunks = KlDivStep(call, valid_tokens, gradients, RowResults(), call.grad, known).run()
        finish_step(outputs, gradients, valid_tokens, place, call)
    record_chunks(call, call.operands.linear_weight, chunks)
    return outputs


def prepared(call: KlDivCall) -> tuple[ValidTokens, Tensor]:
    """Makes the call's vectors contiguous. Returns the tokens for which `valid` is not 0, and each token's place."""
    operands, valid = call.operands, call.operands.valid
    linear_bias, teacher_bias = contiguous(operands.linear_bias, operands.teacher_bias)
    if valid is None:
        valid = torch.ones(operands.input.shape[0], dtype=torch.bool, device=operands.input.device)
    valid = valid.contiguous()
    call.operands = operands._replace(linear_bias=linear_bias, teacher_bias=teacher_bias, valid=valid)
    return compact_tokens(valid.view(torch.uint8), 0, operands.linear_weight.shape[0])


@functools.lru_cache(maxsize=256)
def chunks_and_parts(
    problem: Problem, of_teacher: int, teacher_hidden: int, tiles: Tiles, cut: Callable[[Problem], Chunking]
) -> tuple[Chunking, int]:
    """Chunks of G, and how many rows of logits are in memory beside a chunk's, for the teacher. On one rank, they are
    those whose GEMMs take the fewest steps.
    """
    least = max(problem.least_rows // 4, MULTIPLE)
    both = on_both(problem, of_teacher)
    most = max(min(both.fitting(), cdiv(problem.tokens, MULTIPLE) * MULTIPLE), least) if cut is best_chunking else least
    depth = cdiv(problem.hidden, tiles.block_k) + cdiv(teacher_hidden, tiles.block_k) + 2 * TILE_OVERHEAD.value

    def steps(rows: int, beside: int, product_bytes: int) -> float:  # of the GEMMs of a chunk
        tiles_of_parts = [
            cdiv(part.stop - part.start, tiles.block_m) * cdiv(problem.vocab, tiles.block_n)
            for part in parts_of(rows, rows + beside)
        ]
        waves = sum(cdiv(number, problem.programs) + LAUNCHES for number in tiles_of_parts)
        return waves * depth + problem.steps(rows, product_bytes // 4)

    found = []
    for beside in range(most, least - 1, -cdiv(most - least + 1, CANDIDATES * MULTIPLE) * MULTIPLE):
        rows = max(problem.least_rows - beside, MULTIPLE)
        chunking = cut(problem._replace(reserved=beside * of_teacher, least_rows=rows))
        first, last = (chunk.stop - chunk.start for chunk in (chunking.chunks[0], chunking.chunks[-1]))
        time = (len(chunking.chunks) - 1) * steps(first, beside, chunking.product_bytes)
        found.append((time + steps(last, beside, chunking.product_bytes), beside, chunking))
    _, beside, chunking = min(found, key=lambda cut: cut[:2])
    return chunking, min(beside, chunking.chunks[0].stop)


def on_both(problem: Problem, of_teacher: int) -> Problem:
    """The problem of chunks with as many rows of the teacher's logits."""
    least_rows = max(problem.least_rows // 2, MULTIPLE)
    return problem._replace(row_bytes=problem.row_bytes + of_teacher, least_rows=least_rows)


def parts_of(rows: int, room: int) -> list[slice]:
    """From the last row of a chunk back, the largest parts for which the memory of `room` rows has space."""
    parts, end = [], rows
    while end:
        start = max(cdiv(2 * end - room, MULTIPLE) * MULTIPLE, 0)
        parts.append(slice(start, end))
        end = start
    return parts[::-1]


def sums_of_sizes(probs: Tensor) -> Tensor:  # (N, V) -> (N,) float32
    if probs.dtype.itemsize == 1:  # torch has no sums of these
        probs = probs.half()
    return torch.linalg.vector_norm(probs, 1, 1, dtype=torch.promote_types(probs.dtype, torch.float32)).float()


@dataclass(eq=False)
class KlDivStep:
    """A step, and the memory that all of its chunks share."""

    call: KlDivCall
    valid_tokens: ValidTokens
    gradients: Gradients
    results: RowResults
    row_scale: Tensor | None = None  # (N,), for G
    known: RowResults | None = None  # what forward returned

    def __post_init__(self) -> None:
        self.operands, self.options = self.call.operands, self.call.options
        self.kind = DIVERGENCES[self.options.kind]
        input, teacher_input = self.operands.input, self.operands.teacher_input
        self.classes = self.operands.linear_weight.shape[0]
        # (T, n') float32 of a part: maxima of each model's tiles; under a softcap those of both; sums
        self.matrices = 1 + (teacher_input is not None) + (self.options.softcap is not None) + self.kind.sums
        self.powers = None
        if self.row_scale is not None and input.dtype == torch.float16:
            bound, probs = self.row_scale.abs(), self.operands.teacher_probs
            if probs is not None:  # an entry of G is at most row_scale times the sum of their sizes, 1 if not weighted
                bound = bound * sums_of_sizes(probs).clamp(min=1.0)
            if self.options.kind == "reverse":  # G has log-ratios: room for a million nats
                bound = bound * 16.0
            power, self.powers = powers_for_float16(bound, self.options.logit_scale, self.valid_tokens)
            self.row_scale = self.row_scale * power
        self.chunking, beside = self.divide()
        self.dtype = torch.int16 if input.dtype.itemsize == 2 else input.dtype
        columns, most = padded(self.classes, input.dtype.itemsize), self.chunking.chunks[0].stop
        self.logits = input.new_empty(most + beside, columns, dtype=self.dtype)  # the student's, then G; the teacher's
        if teacher_input is not None:
            sizes = {chunk.stop - chunk.start for chunk in self.chunking.chunks}
            parts = [part.stop - part.start for size in sizes for part in parts_of(size, most + beside)]
            self.teacher_rows = teacher_input.new_empty(max(parts), teacher_input.shape[1])

    def divide(self) -> tuple[Chunking, int]:
        """Returns the chunks, and the rows of memory beside a chunk's. Ranks that share a vocabulary get the same."""
        (input, linear_weight, _, teacher_input, *_), options = self.operands, self.options
        wanted = [gradient is not None for gradient in self.gradients[:3]]
        of_call = input.shape[0], linear_weight, wanted
        problem = problem_of(*of_call, more_sums=self.matrices - 1, batch_invariant=options.batch_invariant)
        shard = linear_weight.shape[0] if options.vocab_size is None else shard_rows(options.vocab_size, options.ranks)
        problem = problem._replace(vocab=shard)
        cut = best_chunking if options.ranks == 1 else equal_chunking
        if teacher_input is None:
            return cut(problem), 0
        teacher_hidden, of_teacher = teacher_input.shape[1], padded(shard, problem.itemsize) * problem.itemsize
        problem = problem._replace(row_bytes=teacher_hidden * teacher_input.dtype.itemsize)
        if not any(wanted):  # no G
            chunking = cut(on_both(problem, of_teacher))
            return chunking, chunking.chunks[0].stop
        return chunks_and_parts(problem, of_teacher, teacher_hidden, tiles_for(input), cut)

    def run(self) -> list[slice]:
        """Returns the chunks."""
        of_head, by_ranges = (self.operands.input, self.operands.linear_weight), self.options.batch_invariant
        gemms = GradientGemms(self.gradients, *of_head, self.chunking.chunks, by_ranges, powers=self.powers)
        return gemms.run(self.chunking, self.valid_tokens, self.run_chunk)

    def run_chunk(self, chunk: slice, valid_tokens: ValidTokens, tokens: Tensor) -> ChunkGradient | None:
        n = tokens.shape[0]
        launch_copy_rows(self.operands.input, tokens, valid_tokens)
        logits = self.logits[:n, : self.classes]
        with_teacher = self.operands.teacher_input is not None
        for part in parts_of(n, self.logits.shape[0] if with_teacher else 2 * n):
            self.run_part(valid_tokens.of(part), tokens[part], logits[part])
        if self.row_scale is None:
            return None
        return ChunkGradient(logits.view(tokens.dtype), memory=float32_memory(self.logits[n:]))

    def run_part(
        self,
        valid_tokens: ValidTokens,
        tokens: Tensor,  # (n, D)
        logits: Tensor,  # (n, V) out: the student's logits, then G
    ) -> None:
        rows, sums = self.rows(valid_tokens, tokens, logits)
        gradient = None if self.row_scale is None else logits.view(tokens.dtype)
        # the other divergences need a sum over the row before G; so do given probabilities, which may not add up to 1
        at_once = self.kind is ForwardKL and self.operands.teacher_probs is None
        if self.known is None or not (rows.of_tokens or at_once):
            totals = rows.add_up(sums, gradient if at_once else None)
            rows.finish(self.add_ranks(totals), self.results)
        if gradient is not None and not (self.known is None and at_once):
            rows.launch(gradient)

    def add_ranks(self, totals: Tensor) -> Tensor:  # (s, n)
        group, ranks = self.options.group, self.options.ranks
        if not self.kind.shifted or ranks == 1:
            return all_reduce(totals, group, ranks)
        shift = all_gather(totals[-1], group, ranks).amax(0)
        totals[:2] *= torch.exp2(totals[-1] - shift)
        return torch.cat([all_reduce(totals[:-1].contiguous(), group, ranks), shift[None]])

    def rows(self, valid_tokens: ValidTokens, tokens: Tensor, logits: Tensor) -> tuple[Rows, Tensor]:
        """Stores the logits of both models. Returns a part's rows, and (s, T, n') memory for sums of tiles."""
        operands, options, n = self.operands, self.options, tokens.shape[0]
        tiles = cdiv(self.classes, EPILOGUE_N.value)
        per_tile = tokens.new_empty(self.matrices, tiles, room_for_rows(n), dtype=torch.float32)
        sums = per_tile[-self.kind.sums :]
        head = tokens, operands.linear_weight, operands.linear_bias, options.student
        student = Softmax(*head, logits, per_tile[0], before_softcap=options.softcap is not None)
        softmaxes, teacher = [student], None
        if operands.teacher_input is not None:
            rows = self.teacher_rows[:n]
            launch_copy_rows(operands.teacher_input, rows, valid_tokens)
            head = rows, operands.teacher_weight, operands.teacher_bias, options.teacher
            teacher = Softmax(*head, self.logits[-n:, : self.classes], per_tile[1])
            softmaxes.append(teacher)
        row_max, known = per_tile[len(softmaxes)], self.known  # row_max: of a softcap's logits
        for softmax, partial in zip(softmaxes, sums):
            softmax.store(valid_tokens, partial, row_max)
            if known is None:
                softmax.add_up(valid_tokens, partial, row_max)
        if known is None:
            share_denominators(softmaxes, options.group, options.ranks)
        else:
            for softmax, pair in zip(softmaxes, (known.lse_pair, known.teacher_lse_pair)):
                softmax.pair = pair
        of_teacher = (None, None) if teacher is None else (teacher.stored, teacher.pair)
        entries = Entries(*of_teacher, matrix_of(operands.teacher_probs), options.beta)
        entries = entries._replace(row_scale=self.row_scale, logit_scale=options.logit_scale)
        if known is not None:
            entries = entries._replace(row_number=known.student_kl, offset=known.divergence)
        return Rows(student, entries, self.kind, valid_tokens, known is not None and options.of_student), sums
