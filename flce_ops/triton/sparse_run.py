"""A step whose gradients are sparse, of with_grad.py or backward.py: by lists of entries or by live tiles."""

from flce_ops.math.sparse_gradient import Shard
from flce_ops.meta.arguments import Backward, VocabParallelWithGrad, WithGrad
from flce_ops.triton.gradients import Gradients
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.one_pass_step import StepTokens
from flce_ops.triton.sparse_or_dense import lists_may_pay
from flce_ops.triton.sparse_step import run_spans
from flce_ops.triton.tile_step import run_tiles

NOTES = {
    "unbiased": "a sparse gradient, dense where its lists are long",
    "drop": "a sparse gradient",
    "tiles": "a gradient of live tiles",
}

EXACT = "an exact gradient: so low a gradient_threshold takes longer at this D and V"

Call = WithGrad | VocabParallelWithGrad | Backward


def is_sparse(call: Call) -> bool:
    """An unbiased gradient may be exact, and is where its lists would take longer; what is to be dropped is dropped."""
    sparse, linear_weight = call.sparse, call.operands.linear_weight
    asked = any(sparse.products(call.output_mask))
    if not asked or sparse.gradient_mode != "unbiased":
        return asked
    num_classes = call.vocab_size if isinstance(call, VocabParallelWithGrad) else linear_weight.shape[0]
    return lists_may_pay(sparse.gradient_threshold, num_classes, linear_weight.shape[1])


def sparse_notes(call: Call) -> list[str]:
    if not any(call.sparse.products(call.output_mask)):
        return []
    return [NOTES[call.sparse.gradient_mode] if is_sparse(call) else EXACT]


def run_sparse(
    call: Call,
    kept: Kept,
    per_token: StepTokens,
    gradients: Gradients,
    shard: Shard | None = None,  # of a vocabulary that ranks share
) -> list[slice]:
    """The chunks that it takes."""
    if call.sparse.gradient_mode == "tiles":
        assert not isinstance(call, VocabParallelWithGrad)  # the entry refuses those
        return run_tiles(call, kept, per_token, gradients)
    return run_spans(call, kept, per_token, gradients, shard)
