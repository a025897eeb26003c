"""CUDA implementations of the operators that make loss and gradients in one pass over the logits, with three GEMMs.

one_pass_step.py has the stages of a chunk of n tokens, flce_ops/objectives the functions of a row. chunks.py divides
the tokens. Ignored tokens cost nothing (valid_tokens.py).

If ranks share the vocabulary, they exchange numbers of rows between the GEMMs of each chunk: two numbers per row, one
more with label smoothing, two more with argmax. Chunks are as large as the workspace allows, so exchanges are few.
"""

import torch
from torch import Tensor

from ... import meta
from ...math.options import TokenStatistics
from ...math.statistics import Exchange, shard_rows, statistics_of_shard
from ...meta.arguments import WithGrad
from ...meta.call import takes
from ...objectives.cross_entropy import CrossEntropy, RowObjective, cross_entropy_of
from ...objectives.token_function import FunctionObjective, token_loss_named
from ...support.target_range import assert_in_range
from ..rows.after_chunks import LossSum
from ..rows.copy_rows import with_padded_features
from ..rows.row_numbers import launch_in_order, sums_for
from ..rows.valid_tokens import ValidTokens, compact_tokens
from ..sparse.sparse_or_dense import is_sparse, sparse_notes
from ..sparse.sparse_step import run_spans
from .chunks import Chunking, best_chunking, equal_chunking, make_vectors_contiguous, problem_of, record_chunks
from .gradients import finish_step, wanted_gradients
from .one_pass_step import OnePassStep, StepTokens

# N tokens, D hidden, V vocabulary


@takes(WithGrad)
@with_padded_features
def launch_with_grad(call: WithGrad) -> meta.Outputs:
    outputs = meta.outputs(call)
    make_vectors_contiguous(call)
    if call.group is not None:
        return launch_shard(call, outputs)
    if call.function is not None:
        return launch_step(call, FunctionObjective(token_loss_named(call.function), tuple(call.tensors or ())), outputs)
    return launch_step(call, objective_of(call), outputs)


def objective_of(call: WithGrad) -> CrossEntropy:
    objective = cross_entropy_of(call, call.operands.num_classes, torch.float32)
    return objective._replace(weight=None if objective.weight is None else objective.weight.contiguous())


def launch_step(
    call: WithGrad,
    objective: RowObjective,
    outputs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Runs the step and returns its outputs."""
    loss, losses, *results, log_probs, of_scale = outputs
    grads, statistics = [*results[:3], of_scale], TokenStatistics.found(call.statistics, results[3:])
    input, linear_weight, target, _, _ = call.operands
    of_step, sums = (input.shape[0], linear_weight, call.output_mask), sums_for(call.statistics).numbers
    with torch.cuda.device_of(linear_weight):
        in_range = target.new_empty((), dtype=torch.bool)
        valid_tokens, place = compact_tokens(target, call.ignore_index, linear_weight.shape[0], in_range)
        if isinstance(objective, FunctionObjective):
            tensors = tuple(launch_in_order(t, valid_tokens) if t.dim() else t for t in objective.tokens)
            objective = objective._replace(tokens=tensors)
        per_token = StepTokens(
            objective, call.reduction, losses, statistics, None if call.function is None else log_probs
        )
        chunking = best_chunking(problem_of(*of_step, more_sums=sums, batch_invariant=call.batch_invariant))
        chunks = step_over_tokens(call, per_token, valid_tokens, place, (loss, *grads), chunking)
        assert_in_range(in_range, target, linear_weight.shape[0], call.ignore_index)
    record_chunks(call, linear_weight, chunks, *sparse_notes(call))
    return outputs


def step_over_tokens(
    call: WithGrad,
    per_token: StepTokens,
    valid_tokens: ValidTokens,
    place: Tensor,  # (N,)
    results: tuple[Tensor, ...],  # the loss and the gradients
    chunking: Chunking,
) -> list[slice]:
    """Runs the step and returns its chunks."""
    loss, *grads = results
    gradients, chunks = wanted_gradients(grads, call), chunking.chunks
    if is_sparse(call):
        chunks = run_spans(call, valid_tokens, per_token, gradients)
    else:
        OnePassStep(call, valid_tokens, per_token, gradients, chunks).run(chunking)
    loss_sum = LossSum(per_token.losses, per_token.reduction, loss)
    finish_step(grads, gradients, valid_tokens, place, call, loss_sum)
    return chunks


def launch_shard(call: WithGrad, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Runs the step of a rank that shares the vocabulary with others."""
    loss, losses, *grads, columns = outputs[:6]
    input, linear_weight, target, *_ = call.operands
    rows = shard_rows(call.vocab_size, call.ranks)
    with torch.cuda.device_of(input):
        in_range = target.new_empty((), dtype=torch.bool)
        valid_tokens, place = compact_tokens(target, call.ignore_index, call.vocab_size, in_range)
        assert_in_range(in_range, target, call.vocab_size, call.ignore_index)
        exchange = Exchange(call.group, call.ranks)
        objective = cross_entropy_of(call, call.vocab_size, torch.float32)
        own = statistics_of_shard(call.statistics, losses)
        statistics = own._replace(argmax=columns if call.statistics.argmax else None)
        per_token = StepTokens(objective, call.reduction, losses, statistics, gather=exchange.gather)
        of_step, sums = (input.shape[0], linear_weight, call.output_mask), sums_for(call.statistics).numbers
        chunking = equal_chunking(problem_of(*of_step, more_sums=sums)._replace(vocab=rows))
        chunks = step_over_tokens(call, per_token, valid_tokens, place, (loss, *grads), chunking)
        exchange.finish_statistics(call.statistics, own, target != call.ignore_index, outputs[6:10])
    record_chunks(call, linear_weight, chunks)
    return outputs
