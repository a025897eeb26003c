"""The divergence of a chunk of rows, and its gradient G by the logits, from the stored logits of both models.

                 V                       V
        ┌──┬──┬──┬──┐            ┌──┬──┬──┬──┐
      n │  │▓▓│  │  │ student  n │  │▓▓│  │  │ teacher        a program has BLOCK_N rows of one tile of the logits GEMM
        └──┴──┴──┴──┘            └──┴──┴──┴──┘

    1. sum over each row, tile by tile          objectives/divergence.py defines the sums; "forward" makes G here
    2. add up all tiles (and ranks)             gives the divergence and the one number a row that G needs
    3. G = row_scale logit_scale G', rounded    written over the student's logits

Both passes over the matrices are bound by memory traffic: they read 4 bytes an entry, and write 2 if they make G.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...objectives import divergence
from ...objectives.divergence import Divergence, ForwardKL, TotalVariation
from ...objectives.in_triton import LN2, number
from ...support.integers import cdiv
from ..gemm.device import interpreted
from ..gemm.logits_gemm import LOG2E, base2_logits
from ..gemm.tile_sums import launch_sum_tiles
from ..gemm.tma import Matrix, load_tile, store_tile
from ..kernel import Kernel
from ..rows.valid_tokens import ROW_MULTIPLE, ValidTokens, row_distance, valid_rows
from .fixed_point import from_fixed_point
from .softmax_rows import Softmax, move_shift

# N tokens, n rows of a chunk, V vocabulary (of this rank), T tiles along it

LEAST_UNSHIFTED = tl.constexpr(divergence.LEAST_UNSHIFTED)  # of logarithms in base 2 here
BLOCK_ROWS = 64  # rows of a program, in kernels that read one number for each row


class Distributions(NamedTuple):
    """Stored logits of a chunk's rows. Exactly one of `teacher` and `teacher_probs` is given."""

    student: Softmax
    teacher: Softmax | None
    teacher_probs: Matrix | None  # (N, V)


class RowScale(NamedTuple):
    """The factors that multiply G, and what a shifted kind adds to logarithms."""

    row_scale: Tensor  # (N,)
    logit_scale: Tensor | None  # ()
    offset: Tensor | None = None  # (n,), for a shifted kind


@triton.jit
def load_shift(softmax, rows, row_mask, n):
    """(minus the row's maximum, the log of its denominator)"""
    high = -tl.load(softmax.shift + rows, mask=row_mask, other=0.0)
    return high, tl.load(softmax.shift + n + rows, mask=row_mask, other=0.0)


@triton.jit
def log_probabilities(softmax, shift, rows, cols, row_mask, tile, n, V, EVEN: tl.constexpr):
    """Returns (log2 of the probabilities, dz/du / logit_scale). The second is meaningful only with a softcap.

    The log-probabilities are -inf after column V, and in rows after the valid ones. Loads still run to the end of the
    padded row: rows are a multiple of 16 numbers apart, so loads of 16 bytes work for any V.
    """
    FIXED_POINT: tl.constexpr = softmax.logits.dtype.element_ty == tl.int16
    FILLED: tl.constexpr = EVEN and softmax.softcap is None and not FIXED_POINT
    others: tl.constexpr = float("-inf") if FILLED else 0.0
    places = softmax.logits + rows.to(tl.int64)[:, None] * softmax.stride + cols[None, :]
    logits = tl.load(places, mask=row_mask[:, None] & (cols < softmax.stride)[None, :], other=others)
    if FIXED_POINT:
        logits = from_fixed_point(logits)
    logits = logits.to(tl.float32)
    high, low = shift
    dz_du = logits
    if softmax.softcap is not None:
        softcap = number(softmax.softcap)
        logits, dz_du = base2_logits(logits, None, softmax, LogitOptions(softcap, 1.0))  # type: ignore[arg-type]
    else:
        high += tl.load(softmax.tile_max + tile.to(tl.int64) * row_distance(n) + rows, mask=row_mask, other=0.0)
    logits = (logits + high[:, None]) - low[:, None]
    if not FILLED:
        logits = tl.where(row_mask[:, None] & (cols < V)[None, :], logits, float("-inf"))
    return logits, dz_du


@Kernel
def divergence_kernel(
    distributions,  # Distributions
    beta_ptr,  # (), used by "jsd"
    sums_ptr,  # (s, T, n) out; or None
    gradient_ptr,  # (n, V) out, over the student's logits; or None
    row_number_ptr,  # (n,), the number of each row that G needs; None for 1
    scale,  # RowScale, for G
    valid_tokens,  # ValidTokens
    n,
    V,
    TEACHER_PROBS: tl.constexpr,  # the teacher's probabilities are given, not logits
    OF_GIVEN_P: tl.constexpr,  # OF_ENTRY takes p instead of log p
    OF_ENTRY: tl.constexpr,
    GRADIENT: tl.constexpr,
    SUMS: tl.constexpr,  # s, the number of sums
    SHIFTED: tl.constexpr,  # behind the sums, each tile's shift is stored; a program then has one tile
    TILES: tl.constexpr,  # tiles of a program
    EVEN: tl.constexpr,  # rows are not padded: V is their stride
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    programs = tl.cdiv(tl.cdiv(V, BLOCK_V), TILES)  # of a row
    program = tl.program_id(0) % programs
    first_tile = program * TILES
    row_start = tl.program_id(0) // programs * BLOCK_N
    count = valid_rows(valid_tokens, n)
    if row_start < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE:
        rows = row_start + tl.arange(0, BLOCK_N)
        row_mask = rows < count
        token = tl.load(valid_tokens.order + rows, mask=row_mask, other=0)
        student, teacher = distributions.student, distributions.teacher
        shift = load_shift(student, rows, row_mask, n)
        if not TEACHER_PROBS:
            teacher_shift = load_shift(teacher, rows, row_mask, n)
        beta = number(beta_ptr)
        if gradient_ptr is not None:
            row_number = 1.0
            if row_number_ptr is not None:
                row_number = tl.load(row_number_ptr + rows, mask=row_mask, other=0.0)[:, None]
            logit_scale = number(scale.logit_scale, 1.0)
            factor = tl.load(scale.row_scale + token, mask=row_mask, other=0.0) * logit_scale
            if scale.offset is not None:
                offset = tl.load(scale.offset + rows, mask=row_mask, other=0.0)[:, None]
                row_number = (row_number, offset)  # type: ignore[assignment]
            # nan everywhere: an infinite factor would otherwise give inf, -inf and nan in one row
            factor = tl.where(tl.abs(factor) == float("inf"), float("nan"), factor)
        for k in tl.static_range(TILES):
            # a program may end after the last tile: there all columns are after V, and add 0
            tile = tl.minimum(first_tile + k, tl.cdiv(V, BLOCK_V) - 1)
            cols = (first_tile + k) * BLOCK_V + tl.arange(0, BLOCK_V)
            log2_q, dz_du = log_probabilities(student, shift, rows, cols, row_mask, tile, n, V, EVEN)
            if not TEACHER_PROBS:
                log2_p, _ = log_probabilities(teacher, teacher_shift, rows, cols, row_mask, tile, n, V, EVEN)
            else:
                log2_p = load_tile(distributions.teacher_probs, token, cols, row_mask, cols < V).to(tl.float32)
                if not OF_GIVEN_P:
                    log2_p = tl.log2(log2_p)
            if sums_ptr is not None:
                if SHIFTED:
                    largest = tl.max(tl.minimum(log2_q, log2_p), 1)
                    largest = tl.where(largest < LEAST_UNSHIFTED, largest, 0.0)
                    terms = OF_ENTRY(log2_q, log2_p, tl.where(largest == float("-inf"), 0.0, largest)[:, None])
                else:
                    terms = OF_ENTRY(log2_q, log2_p, beta)
                if k == 0:
                    totals = terms
                else:
                    totals = added(totals, terms, SUMS)
            if gradient_ptr is not None:
                gradient = GRADIENT(log2_q, log2_p, row_number, factor[:, None], beta)
                if student.softcap is not None:
                    gradient *= dz_du
                if not EVEN or student.softcap is not None:  # else q is 0 there, and so is G
                    gradient = tl.where(row_mask[:, None] & (cols < V)[None, :], gradient, 0.0)
                store_tile(Matrix(gradient_ptr, student.stride), gradient, rows, cols, rows < n, cols < student.stride)
        if sums_ptr is not None:
            partial = program.to(tl.int64) * row_distance(n) + rows
            next_sum = programs.to(tl.int64) * row_distance(n)
            for k in tl.static_range(SUMS):
                tl.store(sums_ptr + k * next_sum + partial, tl.sum(totals[k], 1), mask=row_mask)
            if SHIFTED:
                tl.store(sums_ptr + SUMS * next_sum + partial, largest, mask=row_mask)


@triton.jit
def added(totals, terms, SUMS: tl.constexpr):
    result = ()
    for k in tl.static_range(SUMS):
        result += (totals[k] + terms[k],)  # type: ignore[assignment]
    return result


class RowResults(NamedTuple):
    """In nats, indexed by token; 0 for ignored tokens. Forward returns them; backward gets the first for a shifted kind
    alone.
    """

    divergence: Tensor | None = None  # (N,)
    shift: Tensor | None = None  # (2, N)
    teacher_shift: Tensor | None = None  # (2, N), if the teacher is a model
    student_kl: Tensor | None = None  # (N,), K; None for "forward" and class probabilities


@Kernel
def finish_divergence_kernel(
    totals_ptr,  # (s, n)
    beta_ptr,  # (), used by "jsd"
    student_shift_ptr,  # (2, n)
    teacher_shift_ptr,  # (2, n)
    results,  # RowResults
    row_number_ptr,  # (n,) out
    offset_ptr,  # (n,) out; or None
    valid_tokens,  # ValidTokens
    n,
    N,
    OF_SUMS: tl.constexpr,
    OFFSET_OF_SUMS: tl.constexpr,
    SUMS: tl.constexpr,  # s, the number of sums
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < n
    mask = i < valid_rows(valid_tokens, n)
    token = tl.load(valid_tokens.order + i, mask=inside, other=0)
    totals = ()
    for k in tl.static_range(SUMS):
        totals += (tl.load(totals_ptr + k * n + i, mask=mask, other=1.0),)  # type: ignore[assignment]
    value, row_number = OF_SUMS(totals, number(beta_ptr))
    tl.store(row_number_ptr + i, row_number, mask=mask)
    if offset_ptr is not None:
        tl.store(offset_ptr + i, OFFSET_OF_SUMS(totals), mask=mask)
    if results.divergence is not None:
        tl.store(results.divergence + token, tl.where(mask, value, 0.0), mask=inside)
    if results.student_kl is not None:
        tl.store(results.student_kl + token, tl.where(mask, row_number * LN2, 0.0), mask=inside)
    if results.shift is not None:
        move_shift(student_shift_ptr, i, n, results.shift, token, N, mask, inside, LN2)
    if results.teacher_shift is not None:
        move_shift(teacher_shift_ptr, i, n, results.teacher_shift, token, N, mask, inside, LN2)


@Kernel
def known_rows_kernel(
    known,  # RowResults
    student_shift_ptr,  # (2, n) out
    teacher_shift_ptr,  # (2, n) out
    row_number_ptr,  # (n,) out
    offset_ptr,  # (n,) out; or None
    valid_tokens,  # ValidTokens
    n,
    N,
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < valid_rows(valid_tokens, n)
    token = tl.load(valid_tokens.order + i, mask=mask, other=0)
    move_shift(known.shift, token, N, student_shift_ptr, i, n, mask, mask, LOG2E)
    if known.teacher_shift is not None:
        move_shift(known.teacher_shift, token, N, teacher_shift_ptr, i, n, mask, mask, LOG2E)
    if known.student_kl is not None:
        tl.store(row_number_ptr + i, tl.load(known.student_kl + token, mask=mask, other=0.0) / LN2, mask=mask)
    if offset_ptr is not None:
        tl.store(offset_ptr + i, tl.load(known.divergence + token, mask=mask, other=0.0) / LN2, mask=mask)


@dataclass(eq=False)
class Rows:
    """Launches the kernels of one chunk's rows, and holds their intermediate results."""

    distributions: Distributions
    kind: type[Divergence]
    beta: Tensor | None
    valid_tokens: ValidTokens
    tile: int

    def __post_init__(self) -> None:
        student, teacher, _ = self.distributions
        self.n = student.logits.shape[0]
        self.shifts = [softmax.shift for softmax in (student, teacher) if softmax is not None]
        self.row_number = student.shift.new_empty(self.n)
        self.offset = self.row_number.new_empty(self.n) if self.kind.shifted else None
        self.tiles_of_sums = 2 if self.kind is TotalVariation else 1
        # the other divergences need a sum over the row before G; so do given probabilities, which may not add up to 1
        self.gradient_at_once = self.kind is ForwardKL and teacher is not None

    def add_up(self, sums: Tensor, gradient: Tensor | None, scale: RowScale | None) -> Tensor:
        """Writes the (s, T, n) sums of the tiles and returns the (s, n) sums of the rows. Makes G, too, if it needs no
        row sum.
        """
        tiles = cdiv(sums.shape[1], self.tiles_of_sums)
        count, _, room = sums.shape
        sums = sums.view(-1)[: count * tiles * room].view(count, tiles, room)
        self.launch(sums, gradient, None, scale)
        totals = sums.new_empty(sums.shape[0], self.n)
        if self.kind.shifted:  # the tiles' sums are made relative to the row's shift
            shift = sums[-1].amax(0).clamp(min=-1e30)
            sums[:2] *= torch.exp2(sums[-1] - shift)
        launch_sum_tiles(sums, totals, self.valid_tokens)
        if self.kind.shifted:
            totals[-1] = shift[: self.n]
        return totals

    def finish(self, totals: Tensor, results: RowResults, tokens: int) -> None:
        of_sums = self.kind.offset_of_sums
        finish_divergence_kernel[(cdiv(self.n, BLOCK_ROWS),)](
            totals,
            self.beta,
            self.shifts[0],
            self.shifts[-1],
            results,
            self.row_number,
            self.offset,
            self.valid_tokens,
            self.n,
            tokens,
            OF_SUMS=self.kind.of_sums.jit,
            OFFSET_OF_SUMS=None if of_sums is None else of_sums.jit,
            SUMS=self.kind.sums,
            BLOCK_N=BLOCK_ROWS,
            num_warps=2,
        )

    def take(self, known: RowResults) -> None:
        """Fills in the shifts, and the number of each row, from what forward returned."""
        shifts, n, tokens = (self.shifts[0], self.shifts[-1]), self.n, known.shift.shape[1]
        known_rows_kernel[(cdiv(n, BLOCK_ROWS),)](
            known, *shifts, self.row_number, self.offset, self.valid_tokens, n, tokens, BLOCK_N=BLOCK_ROWS, num_warps=2
        )

    def make_gradient(self, gradient: Tensor, scale: RowScale) -> None:
        scale = scale._replace(offset=self.offset)
        self.launch(None, gradient, None if self.gradient_at_once else self.row_number, scale)

    def launch(
        self,
        sums: Tensor | None,  # (s, T, n) out
        gradient: Tensor | None,  # (n, V) out
        row_number: Tensor | None,  # (n,)
        scale: RowScale | None,
    ) -> None:
        student, logits = self.distributions.student, self.distributions.student.logits
        assert gradient is None or gradient.stride() == logits.stride()
        # Time in ms at 2048x128256. 16 rows and 8 warps: forward 0.486, G of reverse 0.479, sums of jsd 0.682. 8 rows
        # and 4 warps: 0.483, 0.420, 0.594. 4 rows and 2 warps: 0.455, 0.423, 0.589. On an H100, sums of tv over 8192
        # rows by tiles of a program: 1.577 (one), 1.466 (two), 1.546 (four); their bytes alone take 1.45.
        block_n = 16 if interpreted(logits) else 4
        tiles = self.tiles_of_sums if gradient is None else 1
        divergence_kernel[(cdiv(cdiv(logits.shape[1], self.tile), tiles) * cdiv(self.n, block_n),)](
            self.distributions,
            self.beta,
            sums,
            gradient,
            row_number,
            scale,
            self.valid_tokens,
            *logits.shape,
            TEACHER_PROBS=self.distributions.teacher_probs is not None,
            OF_GIVEN_P=self.kind.of_given_p,
            OF_ENTRY=self.kind.of_entry.jit,
            GRADIENT=self.kind.gradient.jit,
            SUMS=self.kind.sums - self.kind.shifted,
            SHIFTED=self.kind.shifted,
            TILES=tiles,
            EVEN=logits.shape[1] == student.stride,
            BLOCK_N=block_n,
            BLOCK_V=self.tile,
            num_warps=2,
        )
