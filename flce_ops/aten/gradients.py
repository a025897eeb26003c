"""The loop over chunks that makes gradients, the two gradient GEMMs of a chunk, and the sums over chunks.

A sparse G is a dense matrix with zeros for the entries that are not kept. This saves no time compared with an exact
gradient.

    product  (n, V)    of a chunk: overwritten with the kept entries of G
    exact    (n, V)    all of G, if only one of the two gradients is sparse
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.options import accumulation_dtype
from ..math.sparse_gradient import keep_entries
from ..meta.arguments import Backward, BackwardInPlace, WithGrad
from ..support.sizes import cdiv
from ..support.workspace import FLOAT32_SUM_BYTES, get_workspace
from . import chunks
from .chunks import RowsByChunk
from .logits import activate, activate_with_slope

# N tokens, n rows of a chunk, D hidden, V vocabulary

# Up to this many chunks, a CPU keeps the sum of grad_linear_weight in bfloat16 or float16. Rounding the logits gives
# the gradient a relative error of 6.6e-3. Rounding the sum after each chunk adds 1.6e-3 times sqrt(1 + chunks / 2):
# 7.4e-3 in all with 8 chunks (dense torch: 7.0e-3). A float32 sum would take a tenth more time and twice the memory of
# a step (bfloat16, 2048x512x32000).
ROUNDED_CHUNKS_ON_CPU = 8
# Bytes of a product that is added to a float32 sum. Such a product of some classes fits a CPU's cache; that is 1.4
# times as fast as a product of all classes.
PRODUCT_BYTES = 2 << 20


def sums_in_float32(input: Tensor, elements: int, count: int) -> bool:
    """Whether grad_linear_weight, with `elements` numbers in bfloat16 or float16, is summed over chunks in float32."""
    rounded = 1 if input.device.type != "cpu" else ROUNDED_CHUNKS_ON_CPU
    fits = 4 * elements <= max(get_workspace() // 2, FLOAT32_SUM_BYTES)
    return input.dtype.itemsize < 4 and count > rounded and fits


def rows_beside_gradients(
    input: Tensor, num_classes: int, want_weight: bool, *, reserved: int = 0, **matrices: int
) -> int:
    """How many rows of a chunk fit the workspace beside the float32 sum of grad_linear_weight, if there is one."""
    rows = chunks.rows_per_chunk(input, num_classes, reserved=reserved, **matrices)
    elements = num_classes * input.shape[1] * want_weight
    if not sums_in_float32(input, elements, cdiv(input.shape[0], rows)):
        return rows
    return chunks.rows_per_chunk(input, num_classes, reserved=reserved + 4 * elements + PRODUCT_BYTES, **matrices)


def run_blocks(
    call: Any,
    products: Iterable[tuple[slice, Tensor]],  # the rows of each chunk and their u, (n, V), which is overwritten with G
    work: Callable[..., Tensor | None],  # (rows, z, *vectors): makes G by z in place; returns lse's cotangent, (n,)
    *vectors: Tensor,  # (N, ...)
    gradients: "GradientAccumulator | None" = None,  # None: `work` makes no G
    nbytes: int | None = None,  # of a matrix of a block
) -> None:
    input = call.operands[0]
    nbytes = chunks.block_bytes(input) if nbytes is None else nbytes
    for chunk, product in products:
        for rows, block, *own in chunks.row_blocks(input, chunk, product, nbytes, *vectors):
            if gradients is None:
                work(rows, activate(block, call.logits), *own)
                continue
            u = gradients.kept(block)
            logits, slope = activate_with_slope(block, call.logits)
            grad_lse = work(rows, logits, *own)
            if slope is not None:
                logits.mul_(slope)
            if gradients.bias_sum is not None:
                gradients.bias_sum += logits.sum(0)
            if u is not None:
                gradients.add_scale(logits, u)
            gradients.finish_block(block, logits, grad_lse, chunk, rows)
            del block, logits, slope, u  # frees memory before the next block is allocated
        if gradients is not None:
            gradients.add_products(chunk, product)
    if gradients is not None:
        gradients.finish()


class GradientAccumulator:
    """Receives the G of chunks, and adds each to the gradients that `output_mask` asks for."""

    def __init__(
        self,
        call: Any,
        grads: Sequence[Tensor],  # in the order of meta.outputs.Gradients; without the last, of ranks that share V
        rows: int,  # of a chunk
    ) -> None:
        (self.input, self.linear_weight, *_), self.mask = call.operands, call.output_mask
        self.grad_input, self.grad_linear_weight, self.grad_linear_bias, *of_scale = grads
        accumulate = accumulation_dtype(self.input.dtype)
        # into main_grad the user's buffer is added to, otherwise the result is overwritten
        adds = isinstance(call, BackwardInPlace)
        self.weight_sum = self.grad_linear_weight if adds else self.grad_linear_weight.zero_()
        if sums_in_float32(self.input, self.weight_sum.numel(), cdiv(self.input.shape[0], rows)):
            self.weight_sum = self.weight_sum.to(accumulate)  # the same tensor if it has that dtype
        self.bias_sum = torch.zeros_like(self.grad_linear_bias, dtype=accumulate) if self.mask[2] else None
        self.logit_scale, self.grad_logit_scale = call.logits.logit_scale, None
        if vars(call).get("scale_gradient"):
            self.grad_logit_scale = of_scale[0].zero_()

    def kept(self, product: Tensor) -> Tensor | None:
        """The products u that `add_scale` reads, copied if the logits overwrite them."""
        if self.grad_logit_scale is None:
            return None
        return product.clone() if product.dtype == self.grad_logit_scale.dtype else product

    def add_scale(self, grad_logits: Tensor, product: Tensor) -> None:
        """Adds sum_ij G_ij u_ij, which is logit_scale times its gradient. A class that a bias of -inf switches off has
        G = 0, and adds nothing.
        """
        self.grad_logit_scale += (grad_logits * product).masked_fill_(grad_logits == 0.0, 0.0).sum()

    def finish_block(self, block: Tensor, grad_logits: Tensor, slope: Tensor | None, chunk: slice, rows: slice) -> None:
        """Copies the G of some rows over their logits, unless G was made there."""
        if block.dtype != grad_logits.dtype:
            block.copy_(grad_logits)

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        """Adds the products of a chunk's G, (n, V)."""
        rounded = grad_logits.to(self.input.dtype)
        self.add_to_input(rows, rounded)
        self.add_to_weight(rows, rounded)

    def add_to_input(self, rows: slice, rounded: Tensor) -> None:
        if self.mask[0] and chunks.readable(self.linear_weight):
            torch.mm(rounded, self.linear_weight, out=chunks.rows_of(self.grad_input, rows))
        elif self.mask[0]:
            for features, weight in chunks.readable_rows(self.linear_weight.T):
                torch.mm(rounded, weight.T, out=self.grad_input[rows, features])

    def add_to_weight(self, rows: slice, rounded: Tensor) -> None:
        if not self.mask[1]:
            return
        input = chunks.rows_of(self.input, rows)
        if self.weight_sum.dtype == self.input.dtype:
            self.weight_sum.addmm_(rounded.T, input)
        elif not chunks.product_is_rounded(input):
            torch.addmm(self.weight_sum, rounded.T, input, out_dtype=self.weight_sum.dtype, out=self.weight_sum)
        else:
            self.add_by_classes(rounded, input)

    def add_by_classes(self, rounded: Tensor, input: Tensor) -> None:
        classes = max(PRODUCT_BYTES // max(input.shape[1] * input.itemsize, 1), 1)
        for start in range(0, rounded.shape[1], classes):
            self.weight_sum[start : start + classes] += rounded[:, start : start + classes].T @ input

    def finish(self) -> None:
        if self.weight_sum is not self.grad_linear_weight:
            self.grad_linear_weight.copy_(self.weight_sum)
        if self.bias_sum is not None:
            self.grad_linear_bias.copy_(self.bias_sum)
        if self.grad_logit_scale is not None:
            self.grad_logit_scale.div_(self.logit_scale)


class GivenRows(GradientAccumulator):
    """Writes G to the rows of grad_logits."""

    bias_sum = grad_logit_scale = None

    def __init__(self, grad_logits: Tensor) -> None:
        self.grad_logits = grad_logits

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
    sparse, input = vars(call).get("sparse"), call.operands.input
    if sparse is None or not sparse.gradient_threshold or not any(sparse.products(call.output_mask)):
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

    def finish_block(self, block: Tensor, grad_logits: Tensor, slope: Tensor | None, chunk: slice, rows: slice) -> None:
        """Keeps entries of `grad_logits`, rows of the chunk, in place. `slope` is l, (n,); None for 0."""
        if slope is None:
            slope = grad_logits.new_zeros(grad_logits.shape[0])
        if self.exact is not None:
            self.exact[rows.start - chunk.start : rows.stop - chunk.start].copy_(grad_logits)
        slope = slope if self.logit_scale is None else slope * self.logit_scale
        places, count = self.places[rows], grad_logits.shape[0]
        at_once = count // PARTS + 1
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            keep_entries(grad_logits[part], slope[part], self.sparse, places[part])
        super().finish_block(block, grad_logits, None, chunk, rows)

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        if self.exact is None:
            super().add_products(rows, grad_logits)
            return
        sparse, exact = (of.to(self.input.dtype) for of in (grad_logits, self.exact[: grad_logits.shape[0]]))
        of_input, of_weight = self.sparse.products(self.mask)
        self.add_to_input(rows, sparse if of_input else exact)
        self.add_to_weight(rows, sparse if of_weight else exact)


def products_and_gradients(
    call: Any,
    grads: Sequence[Tensor],
    in_block: int = 0,  # further matrices of a block
    retained: Tensor | None = None,
    largest_shard: int | None = None,  # of ranks that share the vocabulary; a chunk is one block then
) -> tuple[Iterator[tuple[slice, Tensor]], GradientAccumulator]:
    """Each chunk's rows and u, and what its G is added to."""
    if call.operands.linear_weight is None:
        return chunks.copied_rows(call), GivenRows(grads[0])
    (input, linear_weight, *_), places = call.operands, places_of(call)
    in_block += chunks.product_is_rounded(input) + (call.logits.softcap is not None)
    # The user's buffer. If there are several chunks, they are summed in float32 first, also for a bfloat16 or float16
    # buffer.
    main_grad = call.main_grad if isinstance(call, BackwardInPlace) else None
    sums = call.output_mask[1] and (main_grad is None or main_grad.itemsize < 4)
    if largest_shard is not None:
        step = rows_beside_gradients(input, largest_shard, sums, matrices=in_block)
    else:
        in_block += (places is not None) + 2 * call.scale_gradient  # u, and G u
        exact, reserved = places is not None and needs_exact(call), chunks.copy_bytes(linear_weight)
        step = rows_beside_gradients(
            input, linear_weight.shape[0], sums, matrices=exact, matrices_in_block=in_block, reserved=reserved
        )
    gradients = accumulator_of(call, places, grads, step)
    return chunks.chunk_products(call, input, linear_weight, call.operands.linear_bias, step, retained), gradients


def accumulator_of(call: Any, places: Tensor | None, grads: Sequence[Tensor], rows: int) -> GradientAccumulator:
    return GradientAccumulator(call, grads, rows) if places is None else SparseAccumulator(call, places, grads, rows)
