"""A sparse G in ATen: a dense matrix with zeros for the entries that are not kept. This saves no time compared with an
exact gradient.

product  (n, V)    of a chunk: overwritten with the kept entries of G
exact    (n, V)    all of G, if only one of the two gradients is sparse
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.sparse_gradient import Draws, Shard, keep_entries
from ..meta.arguments import Backward, VocabParallelWithGrad, WithGrad
from .chunks import product_dtype
from .gradients import GradientAccumulator

# N tokens, n rows of a chunk, V vocabulary

# keep_entries runs on this fraction of the rows at a time: it needs eight times the memory of its input, a 64-bit
# integer for each entry
PARTS = 8

Call = WithGrad | VocabParallelWithGrad | Backward


def draws_of(call: Call) -> tuple[Draws, ...]:
    """The extra arguments of a function that a kernel runs on its rows (valid_tokens.py): none unless a gradient is
    sparse.
    """
    if not call.sparse.gradient_threshold or not any(call.sparse.products(call.output_mask)):
        return ()
    call.notes += ("a sparse gradient, as a dense matrix",)
    target = call.operands.target
    return (Draws(torch.arange(target.shape[0], device=target.device)),)


def needs_exact(call: Call) -> bool:
    return list(call.sparse.products(call.output_mask)) != call.output_mask[:2]


class SparseAccumulator(GradientAccumulator):
    """Makes gradients from the kept entries. If only one of them is sparse, a second matrix serves the exact one."""

    def __init__(
        self,
        call: Call,
        draws: Draws,
        grads: Sequence[Tensor],
        rows: int,  # of a chunk
        shard: Shard | None = None,
    ) -> None:
        input, linear_weight = call.operands[:2]
        super().__init__(input, linear_weight, grads, call.output_mask, rows)
        self.sparse, self.logits, self.draws, self.shard = call.sparse, call.logits, draws, shard
        self.exact = None
        if needs_exact(call):
            self.exact = input.new_empty(rows, linear_weight.shape[0], dtype=product_dtype(input))

    def keep(self, grad_logits: Tensor, slope: Tensor, chunk: slice, rows: slice) -> None:
        """Keeps entries of `grad_logits`, rows of the chunk, in place. `slope` is l, (n,)."""
        if self.exact is not None:
            self.exact[rows.start - chunk.start : rows.stop - chunk.start].copy_(grad_logits)
        logit_scale = self.logits.of(rows).logit_scale
        slope = slope if logit_scale is None else slope * logit_scale.flatten()
        draws, count = self.draws.of(rows), grad_logits.shape[0]
        at_once = count // PARTS + 1  # the same parts on all ranks, which communicate in each
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            keep_entries(grad_logits[part], slope[part], self.sparse, draws.of(part), self.shard)

    def add_products(self, rows: slice, grad_logits: Tensor, input: Tensor | None = None) -> None:
        if self.exact is None:
            super().add_products(rows, grad_logits, input)
            return
        sparse, exact = (of.to(self.input.dtype) for of in (grad_logits, self.exact[: grad_logits.shape[0]]))
        of_input, of_weight = self.sparse.products(self.mask)
        self.add_to_input(rows, sparse if of_input else exact)
        self.add_to_weight(rows, sparse if of_weight else exact, input)
