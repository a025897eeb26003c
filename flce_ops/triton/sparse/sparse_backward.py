"""A sparse gradient where backward brings what a token's loss is multiplied by: sparse_step.py over its rows.

Lists are made of exponentials. So backward makes those again as a one-pass step does, one GEMM and then gathers; lse is
not read, and forward retains no logits.
"""

from flce_ops import meta
from flce_ops.meta.arguments import Backward
from flce_ops.objectives.given_slopes import GivenSlopes
from flce_ops.triton.rows.kept_tokens import keep_tokens
from flce_ops.triton.sparse.sparse_run import run_sparse
from flce_ops.triton.steps.gradients import finish_gradients, wanted_gradients
from flce_ops.triton.steps.one_pass_step import StepTokens

# N tokens


def sparse_backward_step(call: Backward, outputs: meta.Gradients) -> list[slice]:
    """The chunks that it takes."""
    kept, place = keep_tokens(call.operands.target, call.ignore_index, call.operands.linear_weight.shape[0])
    gradients = wanted_gradients(outputs, call.output_mask)
    per_token = StepTokens(GivenSlopes(tokens=call.cotangents), reduction=None, losses=None)
    chunks = run_sparse(call, kept, per_token, gradients)
    finish_gradients(outputs, gradients, kept, place)
    return chunks
