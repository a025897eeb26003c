"""CUDA kernel of linear_cross_entropy_forward: one GEMM pass whose logits never leave the multiprocessors."""

import math

import torch
import triton
from torch import Tensor

from flce_ops import meta
from flce_ops.meta.arguments import Forward, takes
from flce_ops.support.target_range import check_target_range
from flce_ops.support.workspace import get_workspace
from flce_ops.triton.chunks import MULTIPLE, contiguous, record_triton_path, slices
from flce_ops.triton.exponentials import launch_exponentials
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.target import tiles_for

# N tokens, D hidden, V vocabulary, T tiles along the vocabulary

LOG2E = math.log2(math.e)
FORWARD_ROWS = 4096  # rows whose partial sums are held at a time: 16 MiB of (T, n) float32 pairs at V = 128256


@takes(Forward)
def launch_forward(call: Forward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.forward_outputs(call)
    target_logit, lse, sums, expected, max_logit, columns, lse_rest = outputs
    input, linear_weight, target, linear_bias, weight = call.operands
    num_classes = linear_weight.shape[0]
    target, linear_bias, weight = contiguous(target, linear_bias, weight)
    check_target_range(target, num_classes if call.vocab_size is None else call.vocab_size, call.ignore_index)
    tiles = triton.cdiv(num_classes, tiles_for(input, linear_weight).block_v)
    sums_a_tile = 2 + call.logit_sum + call.expected_logit + 2 * call.argmax
    rows_of_sums = get_workspace() // (tiles * 4 * sums_a_tile) // MULTIPLE * MULTIPLE
    chunks = slices(input.shape[0], min(max(rows_of_sums, MULTIPLE), FORWARD_ROWS))
    record_triton_path("linear_cross_entropy_forward", input, linear_weight, chunks)
    with torch.cuda.device_of(input):
        target_logit2, _, column = launch_reference_logit(
            call.operands._replace(target=target, linear_bias=linear_bias),
            call.logits,
            ignore_index=call.ignore_index,
            vocab_start=call.vocab_start,
        )
        class_weight = weight.float() if weight is not None and call.logit_sum else None
        for rows in chunks:
            row_sums = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                reference_logit=target_logit2[rows].clone(),
                expected=call.expected_logit,
                logit_options=call.logits,
                logit_sum=call.logit_sum,
                argmax=call.argmax,
            )
            # the sum holds the target's exponential, which was summed from another order of the same products
            row_sum = row_sums.exponentials.maximum(torch.exp2(target_logit2[rows] - row_sums.reference_logit))
            lse64 = (row_sums.reference_logit.double() + row_sum.log2()) / LOG2E
            lse[rows] = lse64
            lse_rest[rows] = torch.where(lse64.isfinite(), lse64 - lse[rows], 0.0)
            if call.logit_sum:
                sums[rows] = row_sums.logit_sum / LOG2E
            if call.expected_logit:
                expected[rows] = (row_sums.reference_logit + row_sums.expected / row_sum) / LOG2E
            if call.argmax:
                max_logit[rows], columns[rows] = row_sums.max_logit / LOG2E, row_sums.argmax
        target_logit.copy_(torch.where(column >= 0, target_logit2 / LOG2E, 0.0))
    return outputs
