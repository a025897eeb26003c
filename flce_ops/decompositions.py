"""The operators as plain ATen, for a runtime that has neither Python nor this package.

    exported.run_decompositions(flce_ops.export_decompositions())

The kernels cut the tokens into chunks when they run, by the workspace. A graph cannot: the number of tokens is a symbol
there. The number of classes is not, so these cut the vocabulary into blocks and unroll the loop over them. A while_loop
over tokens would bound N as well, but few runtimes have one.

               D                V
           ┌───────┐   ┌────┬────┬────┬──┐   for each block of CLASSES_PER_BLOCK columns:
       N   │ input │ @ │ ▓▓ │    │    │  │       z = logits of the block                    (N, block)
           └───────┘   └────┴────┴────┴──┘       target_logit += z_y where y is in the block  (N,)
                                                 lse_b = logsumexp z                          (N,)
       lse = logsumexp_b lse_b

Nothing here writes in place or looks at data on the host, and every operator is one that runtimes for exported programs
have: products of matrices, comparisons, reductions. Gradients take a second pass over the blocks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flce_ops import meta, ops
from flce_ops.entry import cross_entropy, log_probs
from flce_ops.math.loss import losses_of_rows
from flce_ops.math.options import LogitOptions
from flce_ops.math.two_sum import two_sum
from flce_ops.meta.arguments import Backward, Forward, WithGrad, takes
from flce_ops.meta.outputs import Gradients
from flce_ops.support.torch_private import assert_on_device

# N tokens, D hidden, V vocabulary, v classes of a block

# AOTInductor, one CPU core, 2048x256x65659, whose logits take 513 MiB: 68 MiB and 0.87 s with blocks of 8192, 131 MiB
# and 0.91 s with 16384; compiled in 10.5 and 9.2 s.
CLASSES_PER_BLOCK = 8192


def export_decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Decompositions of this package's operators into ATen, for ``ExportedProgram.run_decompositions``.

    The program that comes out holds no operator of this package: ``torch.export.load``, AOTInductor packages and
    runtimes without Python run it where flce_ops is not installed. The operators of the rest of the model stay as they
    are; for ATen's core set, add this table to torch's own::

        table = torch.export.default_decompositions()
        table.update(flce_ops.export_decompositions())
        program = torch.export.export(model, args).run_decompositions(table)

    Returns:
        {operator: function} for the entries and for the operators that inference and training programs hold. Not in it:
        second derivatives, ``linear_kl_div``, and a vocabulary sharded over several devices.

    Memory and time:
        N x 8192 logits are held at a time, in float32 (float64 for float64), and N may stay dynamic. V must be static.
        1 GEMM pass over the logits for the loss; 4 with the gradients of a training program, which eager makes in 3.

    Errors:
        A target outside [0, V) fails an assertion when the program runs.
    """
    return {
        torch.ops.flce.linear_cross_entropy.default: cross_entropy.composite,
        torch.ops.flce.linear_cross_entropy_metrics.default: cross_entropy.composite_metrics,
        torch.ops.flce.linear_log_probs.default: log_probs.composite,
        ops.linear_cross_entropy_forward: forward,
        ops.linear_cross_entropy_backward: backward,
        ops.linear_cross_entropy_with_grad: with_grad,
        torch.ops.flce.linear_cross_entropy_upstream.default: upstream,
    }


def class_blocks(linear_weight: Tensor) -> Iterator[tuple[int, int]]:
    """(first class, one past the last) of each block."""
    num_classes = linear_weight.shape[0]
    for start in range(0, num_classes, CLASSES_PER_BLOCK):
        yield start, min(start + CLASSES_PER_BLOCK, num_classes)


def block_logits(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (v, D)
    linear_bias: Tensor | None,  # (v,)
    options: LogitOptions,
) -> Tensor:  # (N, v) in the accumulation dtype
    logits = uncapped_logits(input, linear_weight, linear_bias, options.logit_scale)
    return logits if options.softcap is None else torch.tanh(logits / options.softcap) * options.softcap


def uncapped_logits(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (v, D)
    linear_bias: Tensor | None,  # (v,)
    logit_scale: Tensor | None,  # ()
) -> Tensor:  # (N, v) in the accumulation dtype
    logits = product(input, linear_weight.T)
    if linear_bias is not None:
        logits = logits + linear_bias.to(logits.dtype)
    return logits if logit_scale is None else logits * logit_scale


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in the accumulation dtype: cuBLAS hands it over, a CPU rounds half operands' product first."""
    accumulate = meta.accumulation_dtype(left.dtype)
    if left.dtype != accumulate and left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=accumulate)
    return torch.mm(left, right).to(accumulate)


def block_of(per_class: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if per_class is None else per_class[start:stop]


@takes(Forward)
def forward(call: Forward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    input, linear_weight, target, linear_bias, weight = call.operands
    vocab_size = linear_weight.shape[0] if call.vocab_size is None else call.vocab_size
    ignore_index = call.ignore_index
    valid = target != ignore_index
    assert_on_device(
        (~valid | ((target >= 0) & (target < vocab_size))).all(),
        f"flce_ops: expected target in [0, {vocab_size}) or ignore_index {ignore_index}",
    )
    column = torch.where(valid, target.long() - call.vocab_start, -1).unsqueeze(1)  # (N, 1)
    target_logit = torch.zeros_like(target, dtype=meta.accumulation_dtype(input.dtype))
    sums = torch.zeros_like(target_logit)
    max_of, sum_of, expected_of, argmax_of = [], [], [], []  # blocks
    for start, stop in class_blocks(linear_weight):
        bias = block_of(linear_bias, start, stop)
        logits = block_logits(input, linear_weight[start:stop], bias, call.logits)
        # a sum over classes, not a gather: inductor puts a gather off until it has every block's logits (512 MiB above)
        classes = torch.arange(start, stop, device=target.device)
        target_logit = target_logit + torch.where(column == classes, logits, 0.0).sum(1)
        if call.logit_sum:
            class_weight = block_of(weight, start, stop)
            sums = sums + (logits if class_weight is None else logits * class_weight.to(logits.dtype)).sum(1)
        max_of.append(logits.amax(1))
        exponentials = torch.exp(logits - at_least_finite(max_of[-1]).unsqueeze(1))
        sum_of.append(exponentials.sum(1))
        if call.expected_logit:
            expected_of.append((exponentials * at_least_finite(logits)).sum(1))
        if call.argmax:
            argmax_of.append(logits.argmax(1) + start)
    max_of_blocks = at_least_finite(torch.stack(max_of, 1))
    row_max = max_of_blocks.amax(1)
    weights = torch.exp(max_of_blocks - row_max.unsqueeze(1))
    row_sum = (weights * torch.stack(sum_of, 1)).sum(1)
    lse, lse_rest = two_sum(row_max, row_sum.log())
    expected = max_logit = lse.new_zeros(0)
    argmax = target.new_zeros(0, dtype=torch.int64)
    if call.expected_logit:
        expected = (weights * torch.stack(expected_of, 1)).sum(1) / row_sum
    if call.argmax:
        max_logit, block = torch.stack(max_of, 1).max(1)
        argmax = torch.stack(argmax_of, 1).gather(1, block.unsqueeze(1)).squeeze(1)
    return target_logit, lse, sums if call.logit_sum else lse.new_zeros(0), expected, max_logit, argmax, lse_rest


def at_least_finite(logits: Tensor) -> Tensor:
    """A bias of -inf switches a class off: p z is 0 there, not 0 * -inf."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)


@takes(Backward)
def backward(call: Backward) -> Gradients:
    input, linear_weight, target, linear_bias, weight = call.operands
    lse, lse_rest, expected_logit = call.lse, call.lse_rest, call.expected_logit
    softcap, logit_scale = call.logits
    want_input, want_weight, want_bias = call.output_mask
    valid = target != call.ignore_index
    grad_target_logit, grad_lse, grad_logit_sum, grad_expected_logit = (
        None if grad is None else torch.where(valid, grad, 0.0).to(lse.dtype).unsqueeze(1)  # (N, 1)
        for grad in (*call.cotangents, call.grad_expected_logit)
    )
    column = torch.where(valid, target.long() - call.vocab_start, -1).unsqueeze(1)  # (N, 1)
    p_factor = grad_lse
    if grad_expected_logit is not None:
        p_factor = grad_expected_logit * (1.0 + lse - expected_logit).unsqueeze(1)
        p_factor = p_factor if grad_lse is None else p_factor + grad_lse
    p_expected = grad_expected_logit
    if lse_rest is not None:  # of exp(z - lse): what lse lacks
        share = torch.exp(-lse_rest).unsqueeze(1)
        p_factor, p_expected = (None if factor is None else factor * share for factor in (p_factor, p_expected))
    grad_input = torch.zeros_like(input, dtype=lse.dtype) if want_input else None
    grad_weight, grad_bias = [], []
    for start, stop in class_blocks(linear_weight):
        bias, block = block_of(linear_bias, start, stop), linear_weight[start:stop]
        logits = uncapped_logits(input, block, bias, logit_scale)
        if softcap is not None:
            ratio = logits / softcap
            slope = torch.cosh(ratio).reciprocal().square()  # 1 - tanh^2 cancels
            logits = torch.tanh(ratio) * softcap
        grad_logits = torch.zeros_like(logits)
        if p_factor is not None:
            log_p = logits - lse.unsqueeze(1)
            grad_logits = torch.exp(log_p) * p_factor
            if p_expected is not None:
                grad_logits = grad_logits + torch.exp(log_p) * (p_expected * log_p.clamp(min=-1e4))
        if grad_logit_sum is not None:
            class_weight = block_of(weight, start, stop)
            grad_logits = grad_logits + (grad_logit_sum if class_weight is None else grad_logit_sum * class_weight)
        if grad_target_logit is not None:
            classes = torch.arange(start, stop, device=target.device)
            grad_logits = grad_logits + torch.where(column == classes, grad_target_logit, 0.0)
        if softcap is not None:
            grad_logits = grad_logits * slope
        if logit_scale is not None:
            grad_logits = grad_logits * logit_scale
        rounded = grad_logits.to(input.dtype)
        if want_input:
            grad_input = grad_input + product(rounded, block)
        if want_weight:
            grad_weight.append(product(rounded.T, input).to(linear_weight.dtype))
        if want_bias:
            grad_bias.append(grad_logits.sum(0).to(linear_weight.dtype))
    return (
        grad_input.to(input.dtype) if want_input else input.new_zeros(0),
        torch.cat(grad_weight) if want_weight else linear_weight.new_zeros(0),
        torch.cat(grad_bias) if want_bias else linear_weight.new_zeros(0),
    )


@takes(WithGrad)
def with_grad(call: WithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = call.operands
    logits = {"ignore_index": call.ignore_index, **call.logits._asdict()}
    target_logit, lse, logit_sum, _, _, argmax, lse_rest = forward(
        *operands, logit_sum=call.loss.label_smoothing != 0.0, argmax=call.argmax, **logits
    )
    rows = (target_logit, lse, logit_sum, lse_rest)
    terms, losses, valid = losses_of_rows(
        operands, call.ignore_index, call.loss, operands.linear_weight.shape[0], *rows
    )
    scale = torch.where(valid, call.row_scale, 0.0).to(lse.dtype)
    cotangents = terms.cotangents(target_logit, lse, scale)
    gradients = backward(*cotangents, *operands, lse, **logits, output_mask=call.output_mask, lse_rest=lse_rest)
    return (call.row_scale * losses).sum(), losses, *gradients, argmax


def upstream(factor: Tensor, leaf: Tensor) -> Tensor:
    return factor.clone()
