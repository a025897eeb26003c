"""A step with sparse gradients, for with_grad.py and backward.py: by lists of entries or by live tiles.

lists    sparse_step.py
tiles    a one-pass step whose gradient GEMMs skip tiles of small entries                             live_tiles.py
"""

from torch import Tensor

from ...math.sparse_gradient import Shard
from ...meta.arguments import Backward, VocabParallelWithGrad, WithGrad
from ..gemm.input_gradient import ClassSlices
from ..rows.finish_rows import FinishedRows, Tokens
from ..rows.valid_tokens import ValidTokens
from ..steps.chunking import chunking_beside
from ..steps.gradients import Gradients
from ..steps.one_pass_step import OnePassStep, StepTokens
from .live_tiles import EVERY_STEP, compared_rows, launch_live_tiles
from .sparse_or_dense import lists_may_pay
from .sparse_step import run_spans

NOTES = {
    "unbiased": "a sparse gradient, dense where its lists are long",
    "drop": "a sparse gradient",
    "tiles": "a gradient of live tiles",
}

EXACT = "an exact gradient: so low a gradient_threshold takes longer at this D and V"

Call = WithGrad | VocabParallelWithGrad | Backward


def is_sparse(call: Call) -> bool:
    """Whether the step drops or samples entries. With "unbiased", the step is exact if making lists would take longer:
    an exact gradient is unbiased, too. "drop" and "tiles" always leave entries out, as the user asked.
    """
    sparse, linear_weight = call.sparse, call.operands.linear_weight
    asked = any(sparse.products(call.output_mask))
    if not asked or sparse.gradient_mode != "unbiased":
        return asked
    return lists_may_pay(sparse.gradient_threshold, call.num_classes, linear_weight.shape[1])


def sparse_notes(call: Call) -> list[str]:
    if not any(call.sparse.products(call.output_mask)):
        return []
    return [NOTES[call.sparse.gradient_mode] if is_sparse(call) else EXACT]


class TileStep(OnePassStep):
    def exponentiate(
        self, chunk: slice, rows: Tensor, class_slices: ClassSlices, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        tokens, finished = super().exponentiate(chunk, rows, class_slices, scratch)
        ((_, exponentials),) = class_slices
        sparse = self.call.sparse
        compared = compared_rows(exponentials, self.row_sum, tokens.valid_tokens, sparse.gradient_threshold)
        steps, chosen = launch_live_tiles(compared, tokens.column), sparse.products(self.call.output_mask)
        self.input_steps, self.weight_steps = (of if wanted else EVERY_STEP for of, wanted in zip(steps, chosen))
        return tokens, finished


def run_sparse(
    call: Call,
    valid_tokens: ValidTokens,
    per_token: StepTokens,
    gradients: Gradients,
    shard: Shard | None = None,  # if ranks share the vocabulary
) -> list[slice]:
    """Runs the step and returns its chunks."""
    if call.sparse.gradient_mode == "tiles":
        assert not isinstance(call, VocabParallelWithGrad)  # the entry operator refuses this combination
        # No overlay chunk: its exponentials come in slices of the vocabulary, but the lists of live tiles span all of
        # it.
        operands = call.operands
        chunking = chunking_beside(0, slice(0, operands.input.shape[0]), operands.linear_weight, call.output_mask)
        TileStep(call, valid_tokens, per_token, gradients, chunking).run_chunks(chunking.chunks)
        return chunking.chunks
    return run_spans(call, valid_tokens, per_token, gradients, shard)
