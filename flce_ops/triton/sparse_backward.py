"""A sparse gradient where backward brings what a token's loss is multiplied by: sparse_step.py over its rows.

Lists are made of exponentials. So backward makes those again as a one-pass step does, one GEMM and then gathers; lse is
not read, and forward retains no logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops import meta
from flce_ops.math.options import Cotangents, TokenStatistics
from flce_ops.math.reduction import Reduction
from flce_ops.meta.arguments import Backward
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import BLOCK_N, FinishedRows, Tokens, empty_rows, store_factors, sums_of_rows
from flce_ops.triton.gradients import finish_gradients, wanted_gradients
from flce_ops.triton.kept_tokens import keep_tokens, kept_rows
from flce_ops.triton.logits_gemm import number_at
from flce_ops.triton.one_pass_step import StepTokens
from flce_ops.triton.replay import Kernel
from flce_ops.triton.sparse_run import run_sparse

# N tokens, n rows of a chunk, V vocabulary

# l is divided by. Below this part of a it is made so large: p moves by a tenth of a rounding of a.
LEAST_SLOPE = tl.constexpr(2.0**-27)


@Kernel
@triton.jit
def finish_given_rows_kernel(
    cotangents,  # Cotangents, (N,) each
    tokens,  # Tokens
    sums,  # RowSums
    finished,  # FinishedRows, out
    n,
    logit_scale_ptr,  # ()
    BLOCK_N: tl.constexpr,
):
    """finish_rows.py with l and a as they are given, of which l may be 0 where a is not."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < kept_rows(tokens.kept, n)
    token = tl.load(tokens.kept.order + i, mask=mask, other=0)
    row_sum, at_target, _, _, hit = sums_of_rows(tokens, sums, i, mask)
    d_lse = tl.zeros((BLOCK_N,), tl.float32)
    d_target = tl.zeros((BLOCK_N,), tl.float32)
    if cotangents.grad_lse is not None:
        d_lse = tl.load(cotangents.grad_lse + token, mask=mask, other=0.0)
    if cotangents.grad_target_logit is not None:
        d_target = tl.load(cotangents.grad_target_logit + token, mask=mask, other=0.0)
    least = tl.abs(d_target) * LEAST_SLOPE
    d_lse = tl.where(tl.abs(d_lse) < least, least, d_lse)
    ratio = d_target / tl.where((d_lse == 0.0) & (d_target == 0.0), 1.0, d_lse)
    row_factor = d_lse * number_at(logit_scale_ptr) / row_sum
    store_factors(tokens, finished, i, mask, hit, at_target + row_sum * ratio, row_factor)


def sparse_backward_step(call: Backward, outputs: meta.Gradients) -> list[slice]:
    """The chunks that it takes."""
    target, scale = call.operands.target, call.logits.logit_scale
    kept, place = keep_tokens(target, call.ignore_index, call.operands.linear_weight.shape[0])
    gradients = wanted_gradients(outputs, call.output_mask)
    cotangents = Cotangents(call.cotangents.grad_target_logit, call.cotangents.grad_lse, None)

    def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
        finished, n = empty_rows(tokens, call.operands.input.dtype), tokens.column.shape[0]
        finish_given_rows_kernel[(triton.cdiv(n, BLOCK_N),)](
            cotangents, tokens, sums, finished, n, scale, BLOCK_N=BLOCK_N, num_warps=2
        )
        return finished, None

    unread = torch.empty_like(call.lse)  # where a step that knows its loss puts that
    per_token = StepTokens(None, Reduction(None), unread, TokenStatistics())
    chunks = run_sparse(call, kept, per_token, gradients, finish_rows)
    finish_gradients(outputs, gradients, kept, place)
    return chunks
