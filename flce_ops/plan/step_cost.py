"""How each implementation chunks a training step, and the temporary memory that this takes.

The chunk sizes come from the functions that the kernels call, so the plan always matches what runs. The figures exclude
the workspace that cuBLAS keeps for the life of a process (32 MiB on Hopper), and bias or class weights.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..aten.gradients import rows_beside_gradients, sums_in_float32
from ..math.shards import shard_rows
from ..meta import saved_columns
from ..ops.call_facts import CallFacts
from ..ops.paths import KERNELS, LOSS, rows_to_save
from ..support.integers import cdiv
from ..support.table import choose
from ..support.workspace import matrix_bytes

if TYPE_CHECKING:
    from ..triton.steps.overlay import Overlay

# N tokens, n rows of a chunk, D hidden, V vocabulary

VECTOR_BYTES = 24  # per token: losses, factors, the target's logit, lse
BOTH = [True, True, False]  # gradients of input and linear_weight, none of a bias
PARTIAL_BYTES = 8  # per row and tile of the vocabulary: a float32 sum and a float32 maximum


@dataclass(frozen=True)
class Head:
    """The sizes of a step, N, D, V, and the dtype of its operands."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype

    @property
    def logits(self) -> int:
        return self.tokens * self.vocab

    @property
    def weight_bytes(self) -> int:
        return self.vocab * self.hidden * self.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        return self.tokens * self.hidden * self.dtype.itemsize

    def shard(self, ranks: int) -> "Head":
        """The largest of `ranks` shards of the vocabulary."""
        return Head(self.tokens, self.hidden, shard_rows(self.vocab, ranks), self.dtype)

    def meta_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        input = torch.empty(self.tokens, self.hidden, dtype=self.dtype, device="meta")
        return input, torch.empty(self.vocab, self.hidden, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class StepCost:
    """The cost of one training step of a head."""

    path: str
    temporaries: int  # bytes beyond operands and gradients
    passes: float  # GEMM passes of 2NDV over the logits, averaged over the tokens
    rows: int  # rows of the largest chunk
    addition_bytes: int = 0  # bytes read and written to add chunks to grad_linear_weight
    added_rows: int = 0  # rows of such a chunk; 0: as `rows`
    sum_bytes: int = 0  # bytes read and written to add slices of the vocabulary to grad_input
    bytes_per_logit: float = 0.0  # bytes read and written by elementwise passes over the logits


def one_pass(head: Head) -> StepCost:
    """The cost of a scalar loss."""
    if not gradients_in_forward(head):
        return two_passes(head)
    return one_pass_triton(head) if runs_on_triton("with_grad", head) else one_pass_aten(head)


def gradients_in_forward(head: Head) -> bool:
    return choose(LOSS["a scalar loss"], CallFacts("cuda", head.dtype, wants_gradient=True)).name == "one pass"


def runs_on_triton(op: str, head: Head) -> bool:
    return choose(KERNELS[f"linear_cross_entropy_{op}"], CallFacts("cuda", head.dtype)).name == "triton"


def two_passes(head: Head) -> StepCost:
    """The cost of a checkpointed region, or without memory for saved logits: forward, then a backward that recomputes
    the logits.
    """
    return two_passes_triton(head) if runs_on_triton("backward", head) else two_passes_aten(head)


def per_token(head: Head) -> StepCost:
    """The cost of reduction="none": the same as two_passes, except for tokens whose logits are saved."""
    rows = rows_to_save(CallFacts("cuda", head.dtype, wants_gradient=True), head.tokens, head.vocab)
    cost, share = two_passes(head), rows / head.tokens
    kernels = "triton" if runs_on_triton("backward", head) else "aten"
    return replace(
        cost,
        path=f"{kernels}, {share:.0%} saved" if rows else cost.path,
        temporaries=cost.temporaries + 2 * rows * saved_columns(head.vocab, head.dtype),
        passes=cost.passes - share,
        # saved logits are read, and written as G
        bytes_per_logit=cost.bytes_per_logit + 2 * head.dtype.itemsize * share,
    )


def vocabulary_parallel(shard: Head) -> StepCost:
    """The cost of one rank's step over its shard of the vocabulary."""
    if not gradients_in_forward(shard):
        return two_passes(shard)
    if not runs_on_triton("vocab_parallel_with_grad", shard):
        return one_pass_aten(shard)
    from ..triton.steps.chunking import chunk_shard

    chunking = chunk_shard(shard.meta_tensors()[0], shard.vocab, BOTH, sum_pairs=0)
    return chunks_of(shard, chunking.chunks, chunking.product_bytes, 2 * VECTOR_BYTES)


def one_pass_triton(head: Head) -> StepCost:
    from ..triton.steps.chunking import best_chunking, problem_of

    _, linear_weight = head.meta_tensors()
    chunking = best_chunking(problem_of(head.tokens, linear_weight, BOTH))
    if chunking.overlay is None and chunking.recompute:
        return two_passes_triton(head)
    if chunking.overlay is None:
        return chunks_of(head, chunking.chunks, chunking.product_bytes, VECTOR_BYTES)
    first = overlay_of(head, chunking.overlay)
    rest = replace(head, tokens=head.tokens - first.rows)
    if not rest.tokens:
        return first
    if chunking.recompute:
        after = two_passes_triton(rest, summed=True)
    else:
        after = chunks_of(rest, chunking.chunks, chunking.product_bytes, VECTOR_BYTES, summed=True)
    return StepCost(
        after.path,
        temporaries=max(first.temporaries + scales_bytes(head), after.temporaries + VECTOR_BYTES * first.rows),
        passes=(first.passes * first.rows + after.passes * rest.tokens) / head.tokens,
        rows=max(first.rows, after.rows),
        # the first ordinary chunk is added to the overlay chunk's result, too
        addition_bytes=after.addition_bytes + 2 * head.weight_bytes,
        added_rows=after.rows,
        sum_bytes=first.sum_bytes + after.sum_bytes,
    )


def overlay_of(head: Head, overlay: "Overlay") -> StepCost:
    """The cost of the overlay chunk, whose exponentials wait in grad_linear_weight."""
    size = head.dtype.itemsize
    # a buffer for the valid tokens, if grad_input has no rows for them
    apart = overlay.rows * head.hidden * size * overlay.rows_apart
    return StepCost(
        "triton",
        temporaries=overlay.workspace_numbers * size + apart + VECTOR_BYTES * head.tokens,
        passes=3,
        rows=overlay.rows,
        sum_bytes=8 * len(overlay.columns) * overlay.rows * head.hidden,
    )


def chunks_of(
    head: Head, chunks: list[slice], product_bytes: int, vector_bytes: int, *, summed: bool = False
) -> StepCost:
    """The cost of chunks. Beside the exponentials there are first their partial sums, then the memory of the gradient
    GEMMs.
    """
    from ..triton.rows.target_rows import TOKENS_AT_MOST
    from ..triton.steps.chunks import padded

    size = head.dtype.itemsize
    rows = chunks[0].stop - chunks[0].start
    rest = rows * head.hidden * size * (head.tokens <= TOKENS_AT_MOST and len(chunks) == 1)
    partial = PARTIAL_BYTES * vocabulary_tiles(head) * rows
    # the last chunk's products cannot use later rows of grad_input
    small = max(partial, rest, product_bytes)
    return StepCost(
        "triton",
        temporaries=rows * padded(head.vocab, size) * size
        + small
        + scales_bytes(head) * (summed or len(chunks) > 1)
        + vector_bytes * head.tokens,
        passes=3,
        rows=rows,
        addition_bytes=added_bytes(head, len(chunks)),
    )


def added_bytes(head: Head, chunks: int) -> int:
    """Bytes added to grad_linear_weight: the first chunk writes instead."""
    return 2 * head.weight_bytes * (chunks - 1)


def two_passes_triton(head: Head, *, summed: bool = False) -> StepCost:
    """`summed`: grad_linear_weight holds the sum over earlier tokens."""
    from ..triton.steps.backward import gradient_slices, product_splits
    from ..triton.steps.chunks import padded
    from ..triton.steps.forward import forward_chunks

    size, hidden = head.dtype.itemsize, head.hidden
    row_slices, column_slices = gradient_slices(
        head.tokens, hidden, head.vocab, size, scales_bytes(head), want_input=True
    )
    rows, columns = row_slices[0].stop, column_slices[0].stop
    gradient = rows * padded(columns, size) * size
    several = len(row_slices) > 1
    left = matrix_bytes(head.tokens) - gradient - scales_bytes(head) * several
    splits = product_splits(rows * hidden, len(column_slices), left)
    backward = 4 * splits * rows * hidden + gradient + scales_bytes(head) * (summed or several)
    row_bytes = PARTIAL_BYTES * vocabulary_tiles(head) + hidden * size  # partial sums, and the gathered token
    forward = forward_chunks(head.tokens, row_bytes)[0].stop * row_bytes
    return StepCost(
        "triton, logits twice",
        temporaries=max(backward, forward) + 2 * VECTOR_BYTES * head.tokens,
        passes=4,
        rows=rows,
        addition_bytes=added_bytes(head, len(row_slices)),
        sum_bytes=8 * splits * len(column_slices) * head.tokens * hidden,
    )


def one_pass_aten(head: Head) -> StepCost:
    # bytes per logit: written by the GEMM, maximum, sub_, exp_, sum, mul_: 4 + 4 + 8 + 8 + 4 + 8; rounding to 16 bits:
    # 4 + 2
    return aten(head, passes=3, bytes_per_logit=36)


def two_passes_aten(head: Head) -> StepCost:
    # forward: all of the above except mul_, 28; backward: written, sub_, exp_, mul_, 4 + 8 + 8 + 8
    return aten(head, passes=4, bytes_per_logit=56)


def aten(head: Head, passes: int, bytes_per_logit: int) -> StepCost:
    input, linear_weight = head.meta_tensors()
    rows = rows_beside_gradients(input, head.vocab, True)
    size, elements, chunks = head.dtype.itemsize, head.vocab * head.hidden, cdiv(head.tokens, rows)
    exact = sums_in_float32(input, elements, chunks)
    rounded = size if size < 4 else 0
    return StepCost(
        "aten",
        temporaries=rows * (head.vocab * (4 + rounded) + head.hidden * size)
        + 4 * elements * exact
        + 2 * VECTOR_BYTES * head.tokens,
        passes=passes,
        rows=rows,
        addition_bytes=(chunks > 1) * chunks * elements * (8 if exact else 2 * size),
        bytes_per_logit=bytes_per_logit + (6 if rounded else 0),
    )


def dense_eager(head: Head) -> StepCost:
    """F.cross_entropy(F.linear(x, w).float(), target). The backward of log_softmax holds three float32 matrices."""
    size = head.dtype.itemsize
    gradients = head.weight_bytes + head.input_bytes
    upcast = 6 if size < 4 else 0
    return StepCost(
        "aten",
        temporaries=max(12 * head.logits - gradients, size * head.logits),
        passes=3,
        rows=head.tokens,
        # upcast; log_softmax reads and writes; nll_loss writes its gradient; log_softmax's backward; rounding to 16
        # bits
        bytes_per_logit=upcast + 8 + 4 + 12 + upcast,
    )


def dense_compiled(head: Head) -> StepCost:
    """The same under torch.compile, which holds the logits once, in input's dtype, and overwrites them with their
    gradient.
    """
    size = head.dtype.itemsize
    return StepCost("inductor", temporaries=size * head.logits, passes=3, rows=head.tokens, bytes_per_logit=6 * size)


def vocabulary_tiles(head: Head) -> int:
    from ..triton.steps.backward import BLOCK_V

    return cdiv(head.vocab, BLOCK_V)


def scales_bytes(head: Head) -> int:
    """Bytes beside grad_linear_weight if it is a sum over chunks."""
    from ..triton.gemm.tiles import WEIGHT_TILES
    from ..triton.gemm.weight_gradient import sum_bytes

    return sum_bytes(head.vocab, head.hidden, WEIGHT_TILES["hopper"])
