"""A one-pass step whose GEMMs of the gradients leave out tiles of small entries: gradient_mode="tiles".

    E, losses, row factors of a chunk                                                              one_pass_step.py
    the tiles of (tokens, classes) that are live, as lists by tokens and by classes                   live_tiles.py
    grad_linear_weight += E.T @ (c rows), grad_input[rows] = c (E @ linear_weight), over live tiles

No lead chunk: its exponentials would wait in slices of the vocabulary, whose steps are others.
"""

from torch import Tensor

from flce_ops.meta.arguments import Backward, WithGrad
from flce_ops.triton.cut import cut_beside
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.gradients import Gradients
from flce_ops.triton.input_gradient import Pieces
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.live_tiles import EVERY_STEP, launch_live_tiles
from flce_ops.triton.one_pass_step import OnePassStep, StepTokens

# N tokens, n rows of a chunk, D hidden, V vocabulary


class TileStep(OnePassStep):
    call: WithGrad | Backward

    def exponentiate(
        self, chunk: slice, rows: Tensor, pieces: Pieces, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        tokens, finished = super().exponentiate(chunk, rows, pieces, scratch)
        ((_, exponentials),) = pieces
        sparse = self.call.sparse
        steps = launch_live_tiles(exponentials, self.row_sum, tokens.column, tokens.kept, sparse.gradient_threshold)
        chosen = sparse.products(self.call.output_mask)
        self.input_steps, self.weight_steps = (of if wanted else EVERY_STEP for of, wanted in zip(steps, chosen))
        return tokens, finished


def run_tiles(call: WithGrad | Backward, kept: Kept, per_token: StepTokens, gradients: Gradients) -> list[slice]:
    """The chunks that it takes."""
    operands = call.operands
    cut = cut_beside(0, slice(0, operands.input.shape[0]), operands.linear_weight, call.output_mask)
    step = TileStep(operands, call.logits, kept, per_token, gradients, cut)
    step.call = call
    step.run_chunks(cut.chunks)
    return cut.chunks
