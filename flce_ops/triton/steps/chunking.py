"""How a one-pass step divides its tokens: into an overlay chunk or none, then chunks or a recomputing step. The table
CHUNKINGS says which.

overlay chunk       if it is larger than an ordinary chunk: up to D tokens                           overlay.py
chunks              E of n tokens fills the workspace; one chunk after another                       one_pass_step.py
recomputing step    if n would be below RECOMPUTE_BELOW: four GEMM passes, any workspace           recompute.py
"""

import functools
from dataclasses import dataclass

from torch import Tensor

from ...support.integers import cdiv
from ...support.table import Condition, Path, choose
from ...support.workspace import get_workspace
from ..gemm.device import input_tiles_for, multiprocessors, weight_tiles_for
from ..gemm.tiles import WEIGHT_TILES
from .chunks import MULTIPLE, Problem, padded, product_bytes, slices
from .overlay import Overlay, overlay_chunk

# N tokens, n rows of a chunk, D hidden, V vocabulary

RECOMPUTE_BELOW = 384  # H200, D = 4096: grad_linear_weight takes 1.6 us a row with 2048 rows, 1.8 with 512, 3 with 256
OVERLAY_STEP = 512  # sizes of overlay chunks are compared in steps of this many tokens


@dataclass(frozen=True)
class Chunking:
    overlay: Overlay | None
    chunks: list[slice]  # the chunks of the other tokens
    recompute: bool
    product_bytes: int  # workspace for float32 products with linear_weight
    few: int = 0  # with at most this many valid tokens, one chunk replaces all of these (choose_chunking)

    @property
    def most_chunks(self) -> int:
        """The largest number of chunks. Each range of rows of a recomputing step has at least MULTIPLE rows, except the
        last.
        """
        count = len(self.chunks)
        if self.recompute:
            (rows,) = self.chunks
            count = cdiv(rows.stop - rows.start, MULTIPLE)
        return count + (self.overlay is not None)

    @property
    def notes(self) -> list[str]:
        """For flce_ops.last_path()."""
        overlay = "the first chunk's exponentials wait in grad_linear_weight"
        few = f"up to {self.few} valid tokens in one chunk"
        recompute = "recomputing the logits: the workspace is small"
        return [overlay] * (self.overlay is not None) + [few] * bool(self.few) + [recompute] * self.recompute


def problem_of(
    tokens: int,
    linear_weight: Tensor,
    output_mask: list[bool],
    *,
    smoothed: bool = False,
    sum_pairs: int = 0,
    batch_invariant: bool = False,
) -> Problem:
    want_input, want_weight, _ = output_mask
    vocab, hidden = linear_weight.shape
    return Problem(
        tokens,
        vocab,
        hidden,
        linear_weight.dtype.itemsize,
        want_input,
        want_weight,
        smoothed,
        sum_pairs,
        get_workspace(),
        # the recomputing step's rows of grad_input, and the overlay chunk's, would have other bits
        0 if batch_invariant else RECOMPUTE_BELOW,
        multiprocessors(linear_weight),
        input_tiles_for(linear_weight),
        weight_tiles_for(linear_weight),
        batch_invariant,
    )


def chunk_span(tokens: int, linear_weight: Tensor, output_mask: list[bool]) -> Chunking:
    """Ordinary chunks only."""
    problem = problem_of(tokens, linear_weight, output_mask)
    _, chunks = problem.chunks(0)
    return Chunking(None, chunks, False, problem.product_bytes(chunks[0].stop))


def chunk_shard(input: Tensor, shard: int, output_mask: list[bool], *, sum_pairs: int) -> Chunking:
    """Chunks that are the same on all ranks, because they depend on the size of the largest shard only."""
    problem = problem_of(input.shape[0], input, output_mask, sum_pairs=sum_pairs)
    problem = problem._replace(vocab=shard, weight_tiles=WEIGHT_TILES["hopper"])  # the same tiles on every device
    fitting = problem.fitting()  # once: another thread may change the workspace
    chunks = slices(problem.tokens, fitting)
    products = product_bytes(fitting, chunks[0].stop, shard, problem.hidden, problem.itemsize)
    return Chunking(None, chunks, False, products)


@functools.lru_cache(maxsize=256)
def fewest_steps(problem: Problem) -> tuple[Overlay | None, list[slice]]:
    """The overlay chunk, if any, and the chunks of the other tokens that together take the fewest main-loop steps."""
    tokens, hidden, fitting = problem.tokens, problem.hidden, problem.fitting()
    steps, chunks = problem.chunks(0)
    overlay = None
    if all(condition.holds(problem) for condition in OVERLAY):
        most = min(tokens, hidden + fitting)
        for rows in sorted({min(tokens, hidden), *range(most, fitting, -OVERLAY_STEP)}):
            rows = rows if rows == tokens else rows // MULTIPLE * MULTIPLE
            found = overlay_chunk(problem, rows) if rows > fitting else None
            if found is not None:
                scratch = (found.columns[-1].stop - found.columns[-1].start) * hidden // 2
                steps_after, chunks_after = problem.chunks(rows)
                total = problem.steps(rows, scratch) + steps_after
                if total < steps:
                    steps, chunks, overlay = total, chunks_after, found
    return overlay, chunks


def recomputes(problem: Problem) -> bool:
    _, chunks = fewest_steps(problem)
    return len(chunks) > 1 and chunks[0].stop - chunks[0].start < problem.recompute_below


OVERLAY = (
    Condition("more tokens than a chunk holds", lambda problem: problem.fitting() < problem.tokens),
    Condition("a gradient of linear_weight", lambda problem: problem.want_weight),
    Condition("no batch_invariant", lambda problem: not problem.batch_invariant),
)
SAVES_STEPS = Condition("a larger chunk that saves steps", lambda problem: fewest_steps(problem)[0] is not None)
# an overlay chunk would add label smoothing's term for all tokens, the recomputed ones included
NOT_SMOOTHED = Condition(
    "no label smoothing if the others recompute", lambda problem: not (problem.smoothed and recomputes(problem))
)
FEW_ROWS = Condition(f"several chunks of fewer than {RECOMPUTE_BELOW} tokens", recomputes)
CHUNKINGS = {
    "the first tokens of a step in Triton": (
        Path("overlay", (*OVERLAY, SAVES_STEPS, NOT_SMOOTHED), why="their exponentials wait in grad_linear_weight"),
        Path("as others", ()),
    ),
    "the other tokens of a step in Triton": (
        Path("recompute", (FEW_ROWS,), why="a fourth GEMM pass, and `reason` says that the workspace is small"),
        Path("chunks", (), why="as many at a time as fill the workspace"),
    ),
}


@functools.lru_cache(maxsize=256)
def best_chunking(problem: Problem) -> Chunking:
    first, others = (choose(paths, problem).name for paths in CHUNKINGS.values())
    overlay, chunks = fewest_steps(problem)
    if first != "overlay":
        overlay = None
    if others == "recompute":
        return Chunking(overlay, [slice(overlay.rows if overlay else 0, problem.tokens)], True, 0)
    rows = chunks[0].stop - chunks[0].start if chunks else 0
    few = 0
    if overlay is not None:  # this one chunk takes no more memory than the others
        in_workspace = overlay.workspace_numbers // padded(problem.vocab, problem.itemsize) // MULTIPLE * MULTIPLE
        few = max(in_workspace, rows)
    return Chunking(overlay, chunks, False, problem.product_bytes(rows) if chunks else 0, few)
