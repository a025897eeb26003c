"""The loop over chunks that makes gradients, the two gradient GEMMs of a chunk, and the sums over chunks.

A sparse G is a dense matrix with zeros for the entries that are not kept. This saves no time compared with an exact
gradient.

    product  (n, V)    of a chunk: overwritten with the kept entries of G
    exact    (n, V)    all of G, if only one of the two gradients is sparse
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.sparse_gradient import keep_entries
from ..math.statistics import shard_rows
from ..meta.arguments import Backward, BackwardInPlace, WithGrad
from . import chunks
from .chunks import RowsByChunk
from .logits import activate, activate_with_slope

# N tokens, n rows of a chunk, D hidden, V vocabulary


def logit_blocks(call: Any, chunk: slice, product: Tensor, nbytes: int, *vectors: Tensor) -> Iterator[Any]:
    """Yields the rows of each block of `nbytes`, their z, and the rows of the vectors, if no gradient is made."""
    for rows, block, *own in chunks.row_blocks(call.operands.input, chunk, product, nbytes, *vectors):
        yield rows, activate(block, call.logits), *own


class GradientAccumulator:
    """Yields the logits of a chunk's blocks, receives their G, and adds it to the gradients that are asked for.

    for chunk, product in products:
        for rows, logits, ... in gradients.blocks(chunk, product, ...):
            logits becomes G by z, in place
        gradients.add_products(chunk, product)
    gradients.finish()
    """

    grad_lse: Tensor | None = None  # (n,), lse's cotangent, which the caller sets for a sparse gradient

    def __init__(
        self,
        call: Any,
        grads: Sequence[Tensor],  # in the order of meta.Gradients; without the last, of ranks that share V
        rows: int,  # of a chunk
    ) -> None:
        (self.input, self.linear_weight, *_), self.mask, self.logits = call.operands, call.output_mask, call.logits
        self.grad_input, self.grad_linear_weight, self.grad_linear_bias, *of_scale = grads
        accumulate = self.input.dtype if self.input.dtype.itemsize >= 4 else torch.float32
        # into main_grad the user's buffer is added to, otherwise the result is overwritten
        adds, chunk_count = isinstance(call, BackwardInPlace), -(-self.input.shape[0] // rows)
        self.weight_sum = self.grad_linear_weight if adds else self.grad_linear_weight.zero_()
        if self.input.dtype.itemsize < 4 and chunks.sums_in_float32(self.input, self.weight_sum.numel(), chunk_count):
            self.weight_sum = self.weight_sum.to(accumulate)  # the same tensor if it has that dtype
        self.bias_sum = torch.zeros_like(self.grad_linear_bias, dtype=accumulate) if self.mask[2] else None
        self.grad_logit_scale = of_scale[0].zero_() if vars(call).get("scale_gradient") else None

    def blocks(self, chunk: slice, product: Tensor, nbytes: int, *vectors: Tensor) -> Iterator[Any]:
        """Yields the rows of each block of `nbytes`, their z, which becomes G by z, and the rows of the vectors."""
        for rows, block, *own in chunks.row_blocks(self.input, chunk, product, nbytes, *vectors):
            u = block
            if self.grad_logit_scale is not None and block.dtype == self.grad_logit_scale.dtype:
                u = block.clone()  # the logits overwrite it
            logits, slope = activate_with_slope(block, self.logits)
            yield rows, logits, *own
            if slope is not None:
                logits.mul_(slope)
            if self.bias_sum is not None:
                self.bias_sum += logits.sum(0)
            if self.grad_logit_scale is not None:
                self.add_scale(logits, u)
            self.finish_block(block, logits, chunk, rows)
            del block, logits, slope, u  # frees memory before the next block is allocated

    def add_scale(self, grad_logits: Tensor, product: Tensor) -> None:
        """Adds sum_ij G_ij u_ij, which is logit_scale times its gradient. A class that a bias of -inf switches off has
        G = 0, and adds nothing.
        """
        self.grad_logit_scale += (grad_logits * product).masked_fill_(grad_logits == 0.0, 0.0).sum()

    def finish_block(self, block: Tensor, grad_logits: Tensor, chunk: slice, rows: slice) -> None:
        """Copies the G of some rows over their logits, unless G was made there."""
        if block.dtype != grad_logits.dtype:
            block.copy_(grad_logits)

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        """Adds the products of a chunk's G, (n, V)."""
        rounded = grad_logits.to(self.input.dtype)
        self.multiply(rows, rounded, rounded)

    def multiply(self, rows: slice, for_input: Tensor, for_weight: Tensor) -> None:
        """G @ linear_weight and G.T @ input, with a G for each. A view of all rows is not made, as it takes as long as
        an operation on a few numbers.
        """
        whole = for_input.shape[0] == self.input.shape[0]
        if self.mask[0] and self.linear_weight.is_contiguous():
            torch.mm(for_input, self.linear_weight, out=self.grad_input if whole else self.grad_input[rows])
        elif self.mask[0]:
            for features, weight in chunks.readable_rows(self.linear_weight.T):
                torch.mm(for_input, weight.T, out=self.grad_input[rows, features])
        if not self.mask[1]:
            return
        input = self.input if whole and isinstance(self.input, Tensor) else self.input[rows]
        if self.weight_sum.dtype == input.dtype:
            self.weight_sum.addmm_(for_weight.T, input)
        elif input.device.type == "cuda":
            torch.addmm(self.weight_sum, for_weight.T, input, out_dtype=self.weight_sum.dtype, out=self.weight_sum)
        else:
            self.add_by_classes(for_weight, input)

    def add_by_classes(self, rounded: Tensor, input: Tensor) -> None:
        classes = max(chunks.PRODUCT_BYTES // max(input.shape[1] * input.itemsize, 1), 1)
        for start in range(0, rounded.shape[1], classes):
            self.weight_sum[start : start + classes] += rounded[:, start : start + classes].T @ input

    def finish(self) -> None:
        if self.weight_sum is not self.grad_linear_weight:
            self.grad_linear_weight.copy_(self.weight_sum)
        if self.bias_sum is not None:
            self.grad_linear_bias.copy_(self.bias_sum)
        if self.grad_logit_scale is not None:
            self.grad_logit_scale.div_(self.logits.logit_scale)


class GivenRows(GradientAccumulator):
    """Writes G to the rows of grad_logits."""

    bias_sum = grad_logit_scale = None

    def __init__(self, call: Any, grad_logits: Tensor) -> None:
        self.input, self.logits, self.grad_logits = call.operands.input, call.logits, grad_logits

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        if self.grad_logits.numel():
            self.grad_logits[rows] = grad_logits

    def finish(self) -> None:
        """All is written."""


# keep_entries runs on this fraction of the rows at a time: it needs eight times the memory of its input, a 64-bit
# integer for each entry
PARTS = 8


def places_of(call: Any) -> Tensor | None:  # (N,) int64
    """Each row's place in the call, on which the random numbers of a sparse gradient depend; None for a dense one."""
    input = call.operands.input
    if not any(call.sparse.products(call.output_mask)):
        return None
    call.notes += ("a sparse gradient, as a dense matrix",)
    known = input.places if isinstance(input, RowsByChunk) else None
    return torch.arange(input.shape[0], device=input.device) if known is None else known


def needs_exact(call: Any) -> bool:
    return list(call.sparse.products(call.output_mask)) != call.output_mask[:2]


class SparseAccumulator(GradientAccumulator):
    """Makes gradients from the kept entries. If only one of them is sparse, a second matrix serves the exact one."""

    def __init__(self, call: WithGrad | Backward, places: Tensor, grads: Sequence[Tensor], rows: int) -> None:
        super().__init__(call, grads, rows)
        self.sparse, self.places = call.sparse, places
        self.exact = None
        if needs_exact(call):
            self.exact = self.input.new_empty(rows, self.linear_weight.shape[0], dtype=chunks.product_dtype(self.input))

    def finish_block(self, block: Tensor, grad_logits: Tensor, chunk: slice, rows: slice) -> None:
        """Keeps entries of `grad_logits`, rows of the chunk, in place. The slope l of a row is 0 without grad_lse."""
        slope = grad_logits.new_zeros(grad_logits.shape[0]) if self.grad_lse is None else self.grad_lse
        if self.exact is not None:
            self.exact[rows.start - chunk.start : rows.stop - chunk.start].copy_(grad_logits)
        scale = self.logits.logit_scale
        slope = slope if scale is None else slope * scale
        places, count = self.places[rows], grad_logits.shape[0]
        at_once = count // PARTS + 1
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            keep_entries(grad_logits[part], slope[part], self.sparse, places[part])
        super().finish_block(block, grad_logits, chunk, rows)

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        if self.exact is None:
            super().add_products(rows, grad_logits)
            return
        sparse, exact = (of.to(self.input.dtype) for of in (grad_logits, self.exact[: grad_logits.shape[0]]))
        of_input, of_weight = self.sparse.products(self.mask)
        self.multiply(rows, sparse if of_input else exact, sparse if of_weight else exact)


def products_and_gradients(
    call: Any,
    grads: Sequence[Tensor],
    nbytes: int,  # of the workspace, for matrices
    in_block: int = 0,  # further matrices of a block
    retained: Tensor | None = None,
) -> tuple[Iterator[tuple[slice, Tensor]], GradientAccumulator]:
    """Each chunk's rows and u, and what its G is added to. All ranks that share a vocabulary choose the same chunks."""
    if call.operands.linear_weight is None:
        return chunks.copied_rows(call, nbytes), GivenRows(call, grads[0])
    (input, linear_weight, *_), places = call.operands, None
    in_block += chunks.product_is_rounded(input) + (call.logits.softcap is not None)
    # The user's buffer. If there are several chunks, they are summed in float32 first, also for a bfloat16 or float16
    # buffer.
    main_grad = call.main_grad if isinstance(call, BackwardInPlace) else None
    sums = call.output_mask[1] and (main_grad is None or main_grad.itemsize < 4)
    if vars(call).get("group") is not None:  # a chunk is one block then
        classes, matrices, of_blocks, reserved = shard_rows(call.vocab_size, call.ranks), in_block, 0, 0
    else:
        if call.sparse.gradient_threshold:
            places = places_of(call)
        classes, matrices, reserved = linear_weight.shape[0], 0, chunks.copy_bytes(linear_weight)
        of_blocks = in_block + (places is not None) + 2 * call.scale_gradient  # u, and G u
        if places is not None:
            matrices = int(needs_exact(call))
    step = chunks.rows_per_chunk(
        input,
        nbytes,
        classes,
        matrices=matrices,
        matrices_in_block=of_blocks,
        reserved=reserved,
        summed=classes * input.shape[1] if sums else 0,
    )
    make = GradientAccumulator(call, grads, step) if places is None else SparseAccumulator(call, places, grads, step)
    return chunks.chunk_products(call, step, retained), make
