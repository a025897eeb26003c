"""The operators as plain ATen, for runtimes that have neither Python nor this package.

    exported.run_decompositions(flce_ops.export_decompositions())

The kernels divide the tokens into chunks at run time, by the workspace. A graph cannot, because the number of tokens is
a symbol there. The number of classes is known, so decompositions divide the vocabulary into blocks and unroll the loop
over them. A while_loop over tokens would also bound the memory for any N, but few runtimes support loops.

               D                V
           ┌───────┐   ┌────┬────┬────┬──┐   for each block of CLASSES_PER_BLOCK columns:
       N   │ input │ @ │ ▓▓ │    │    │  │       z = logits of the block                    (N, block)
           └───────┘   └────┴────┴────┴──┘       target_logit += z_y where y is in the block  (N,)
                                                 lse_b = logsumexp z                          (N,)
       lse = logsumexp_b lse_b

Each block runs the functions of the kernels (aten/logits.py), made functional. The numbers of the blocks are combined
as those of ranks that share a vocabulary (distributed/vocab_parallel.py). Nothing reads data on the host. The
graph uses only operators that runtimes for exported programs have: matrix products, comparisons, reductions. Gradients
take a second pass over the blocks.
"""

from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from ._ops import ops
from .aten import chunks
from .aten.logits import activate, activate_with_slope, add_sum, apply_slope, softmax_factors, softmax_gradient, upcast
from .aten.row_statistics import ALL_AT_ONCE, reduce_rows
from .aten.valid_tokens import check_target_range
from .distributed.vocab_parallel import shard_rows, whole_rows
from .entry import BODIES
from .math.options import Statistics, TokenStatistics, accumulation_dtype
from .math.shards import target_columns
from .math.statistics import two_sum
from .math.topk import tokens_that_count
from .meta.arguments import (
    ROW_LOSSES,
    Backward,
    Forward,
    LowRankWithGrad,
    RowLossWithGrad,
    SupportBackward,
    SupportForward,
    WithGrad,
)
from .meta.call import takes
from .meta.outputs import Gradients, Outputs
from .ops.made_in_forward import multiply
from .ops.with_grad_autograd import concatenated, of_pair, recomputed_step
from .support.holes import refuse_hole
from .support.torch_private import functional

# N tokens, D hidden, V vocabulary, v classes of a block

# AOTInductor, one CPU core, 2048x256x65659, whose logits take 513 MiB: 68 MiB and 0.87 s with blocks of 8192; 131 MiB
# and 0.91 s with 16384. Compiling takes 10.5 s and 9.2 s.
CLASSES_PER_BLOCK = 8192
NUMBERS = ("logit_sum", "expected_log_prob", "argmax", "log_sum_sq_probs", "mean_logit")


def export_decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Decompositions of this package's operators into ATen, for ``ExportedProgram.run_decompositions``.

    The decomposed program holds no operator of this package: ``torch.export.load``, AOTInductor packages and runtimes
    without Python run it without flce_ops. The other operators of the model stay as they are. For ATen's core set, add
    this table to torch's own::

        table = torch.export.default_decompositions()
        table.update(flce_ops.export_decompositions())
        program = torch.export.export(model, args).run_decompositions(table)

    Returns:
        A dict of operator and function, for the operators that inference and training programs hold. Not in the dict:
        second derivatives, ``main_grad``, ``linear_kl_div``, and a vocabulary sharded over several devices. A support
        is refused.

    Memory and time:
        N x 8192 logits are held at a time, in float32 (float64 for float64), and N may stay dynamic. V must be static.
        1 GEMM pass over the logits for the loss; 4 with the gradients of a training program, which eager makes in 3.

    Errors:
        A target outside [0, V) fails an assertion when the program runs.
    """
    entries = ["linear_cross_entropy", "linear_cross_entropy_metrics", "linear_log_probs"]
    entries += ["linear_cross_entropy_low_rank", *ROW_LOSSES]
    return {
        **{getattr(ops, name).default: BODIES[name] for name in entries},
        ops.linear_cross_entropy_forward.default: forward,
        ops.linear_cross_entropy_backward.default: backward,
        ops.linear_cross_entropy_with_grad.default: with_grad,
        ops.linear_cross_entropy_low_rank_with_grad.default: low_rank_with_grad,
        ops.linear_cross_entropy_upstream.default: multiply,
        ops.linear_support_forward.default: takes(SupportForward)(refuse_support),
        ops.linear_support_backward.default: takes(SupportBackward)(refuse_support),
        **{getattr(ops, row_loss.op).default: takes(row_loss)(losses_with_grad) for row_loss in ROW_LOSSES.values()},
    }


def class_blocks(linear_weight: Tensor) -> Iterator[slice]:
    num_classes = linear_weight.shape[0]
    for start in range(0, num_classes, CLASSES_PER_BLOCK):
        yield slice(start, min(start + CLASSES_PER_BLOCK, num_classes))


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right + bias in the accumulation dtype. cuBLAS returns that dtype; a CPU rounds the product of half
    operands first.
    """
    return chunks.product(left, right, chunks.product_dtype(left), bias).to(accumulation_dtype(left.dtype))


def block_of(per_class: Tensor | None, classes: slice) -> Tensor | None:
    return None if per_class is None else per_class[classes]


@functional
@takes(Forward)
def forward(call: Forward) -> Outputs:
    if call.ranks > 1:
        refuse_hole("export_decompositions", "exported shards")
    input, linear_weight, target, linear_bias, weight = call.operands
    check_target_range(target, call.num_classes, call.ignore_index, on_device=True)
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    input = zeroed_where_ignored(input, valid)
    dtype = accumulation_dtype(input.dtype)
    weight, options = upcast(weight, dtype), call.logits.of(slice(None))
    asked = {name: getattr(call, name) for name in NUMBERS}
    statistics = Statistics(call.argmax, False, call.expected_log_prob, call.log_sum_sq_probs, call.mean_logit)
    blocks, shards = list(class_blocks(linear_weight)), []
    for classes in blocks:
        logits = activate(product(input, linear_weight[classes].T, block_of(linear_bias, classes)), options)
        target_logit, of_block = logits_at_target(column, classes, logits, target), block_of(weight, classes)
        weight_sum = ALL_AT_ONCE.weight_sum(of_block, logits.shape[1]) if call.logit_sum else None
        found = reduce_rows(logits, statistics, call.num_classes, of_block, weight_sum)
        lse, lse_rest = two_sum(found.row_max, found.log_sum)
        expected = found.moment - found.log_sum if call.expected_log_prob else None
        largest = found.max_logit, found.argmax
        others = expected, *largest, found.log_sum_sq_probs, found.mean_logit, lse_rest
        shards.append(shard_rows((target_logit, lse, found.logit_sum, *others), asked, classes.start))
    rows = whole_rows(call, valid, list(shards[0].others), torch.stack([shard.stacked() for shard in shards]), blocks)
    nothing, max_logit = rows.lse.new_zeros(0), None
    if call.argmax:
        max_logit = torch.where(valid, torch.stack([shard.others["max_logit"] for shard in shards]).amax(0), 0.0)
    logit_sum = torch.where(valid, rows.logit_sum, 0.0) if call.logit_sum else None
    argmax = rows.argmax if call.argmax else target.new_zeros(0, dtype=torch.int64)
    others = (logit_sum, rows.expected_log_prob, max_logit, argmax, rows.log_sum_sq_probs, rows.mean_logit)
    return (
        torch.where(hit, rows.target_logit, 0.0),
        rows.lse,
        *(nothing if number is None else number for number in others),
        torch.where(valid, rows.lse_rest, 0.0),
        # backward below does not read it
        target.new_zeros(call.retain, call.operands.saved_columns, dtype=torch.int16),
    )


def zeroed_where_ignored(input: Tensor, valid: Tensor) -> Tensor:  # (N, D)
    """The input with zeros for ignored rows, whose values, nan included, must not matter. Their number is data, so they
    are computed.
    """
    return torch.where(valid.unsqueeze(1), input, 0.0)


def at_target(column: Tensor, classes: slice, values: Tensor) -> Tensor:  # (N, v)
    """`values`, (N, v) or (N, 1), at the target's class, and 0 elsewhere.

    The kernels gather and scatter instead. Inductor would delay a gather until it has the logits of all blocks (512 MiB
    above).
    """
    return torch.where(column == torch.arange(classes.start, classes.stop, device=column.device), values, 0.0)


def logits_at_target(column: Tensor, classes: slice, logits: Tensor, like: Tensor) -> Tensor:  # (N,) or (N, K)
    """The target's logits; 0 if the target is not among the block's classes."""
    if like.dim() == 1:
        return at_target(column, classes, logits).sum(1)
    # a mask of K classes would be K times as large as the block
    here = (column >= classes.start) & (column < classes.stop)
    return torch.where(here, logits.gather(1, torch.where(here, column - classes.start, 0)), 0.0)


def add_at_target(grad_logits: Tensor, column: Tensor, classes: slice, values: Tensor) -> Tensor:
    """Adds `values`, (N,) or (N, K), at the targets' classes."""
    if values.dim() == 1:
        return grad_logits + at_target(column, classes, values.unsqueeze(1))
    here = (column >= classes.start) & (column < classes.stop)
    return grad_logits.scatter_add(1, torch.where(here, column - classes.start, 0), torch.where(here, values, 0.0))


def refuse_support(call: SupportForward | SupportBackward) -> NoReturn:
    refuse_hole("export_decompositions", "exported support")


def refuse_sparse(call: Backward | WithGrad) -> None:
    if call.sparse.gradient_threshold:
        refuse_hole("export_decompositions", "exported sparse gradient")


@functional
@takes(Backward)
def backward(call: Backward) -> Gradients:
    refuse_sparse(call)
    input, linear_weight, target, linear_bias, weight = call.operands
    dtype = call.lse.dtype
    want_input, want_weight, want_bias = call.output_mask
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    input = zeroed_where_ignored(input, valid)
    cotangents = call.cotangents.masked(hit, valid, dtype)
    factors = softmax_factors(call, valid, cotangents.grad_lse)
    weight, options = upcast(weight, dtype), call.logits.of(slice(None))
    grad_input = torch.zeros_like(input, dtype=dtype) if want_input else None
    grad_weight, grad_bias = [], []
    for classes in class_blocks(linear_weight):
        block = linear_weight[classes]
        logits = product(input, block.T, block_of(linear_bias, classes))
        logits, slope = activate_with_slope(logits, options)
        grad_logits = softmax_gradient(logits, factors)
        add_sum(grad_logits, cotangents.grad_logit_sum, block_of(weight, classes))
        if cotangents.grad_target_logit is not None:
            grad_logits = add_at_target(grad_logits, column, classes, cotangents.grad_target_logit)
        apply_slope(grad_logits, slope)
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
def with_grad(call: WithGrad) -> tuple[Tensor, ...]:
    refuse_sparse(call)
    gradients, losses, statistics = recomputed_step(call, forward, backward)
    valid = tokens_that_count(call.operands.target, call.ignore_index)
    absent = TokenStatistics(losses.new_zeros(0, dtype=torch.int64), *[losses.new_zeros(0)] * 4)
    found = (absent[k] if of_rows is None else of_rows for k, of_rows in enumerate(statistics))
    return call.reduction.loss(losses, valid), losses, *gradients, *found


def losses_with_grad(call: RowLossWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients, losses, (log_probs,) = recomputed_step(call, forward, backward)
    valid = call.operands.target != call.ignore_index
    return call.reduction.loss(losses, valid), losses, *gradients, log_probs


@takes(LowRankWithGrad)
def low_rank_with_grad(call: LowRankWithGrad) -> Outputs:
    loss, losses, *results = with_grad(concatenated(call))
    gradients = results[:3]
    return loss, losses, *(gradient.contiguous() for gradient in of_pair(call, gradients))
