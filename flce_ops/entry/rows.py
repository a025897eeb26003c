"""The numbers of rows of logits, from whatever source and in whatever layout, and the cross-entropy made of them.

a head             linear_cross_entropy_forward        logits made and thrown away
given logits       cross_entropy_forward               logits read
ranks that share the vocabulary                        one of the two on each, one exchange: vocab_parallel.py
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flce_ops.distributed.one_rank import OneRank
from flce_ops.math.options import LogitOperands, TokenLosses, TokenStatistics
from flce_ops.math.statistics import Rows, asked_of_forward
from flce_ops.objectives.cross_entropy import losses_of_rows

# N tokens

# Of an objective: losses (N,), 0 where ignored, and what else is asked for, (N,) each.
OfRows = Callable[[OneRank, TokenLosses, Rows], tuple[Tensor, Any]]


def rows_of(layout: OneRank, problem: TokenLosses) -> Rows:
    if layout.splits_vocabulary:
        from flce_ops.distributed.vocab_parallel import vocab_parallel_rows

        return vocab_parallel_rows(cast(Any, layout), problem)
    options = {"ignore_index": problem.ignore_index, "logit_sum": problem.loss.label_smoothing != 0.0}
    options |= problem.logits._asdict()
    if isinstance(problem.operands, LogitOperands):
        argmax = problem.statistics.argmax
        found = torch.ops.flce.cross_entropy_forward(*problem.operands, **options, argmax=argmax)
        target_logit, lse, logit_sum, largest, lse_rest = found
        return Rows(target_logit, lse, logit_sum, lse_rest, argmax=largest)
    options |= asked_of_forward(problem.statistics) | problem.sparse._asdict()
    found = torch.ops.flce.linear_cross_entropy_forward(*problem.operands, **options, main_grad=problem.main_grad)
    target_logit, lse, logit_sum, expected, _, largest, squares, mean_logit, lse_rest, _ = found
    return Rows(target_logit, lse, logit_sum, lse_rest, expected, largest, squares, mean_logit)


def from_rows(layout: OneRank, of_rows: OfRows) -> Callable[[TokenLosses], tuple[Tensor, Any]]:
    """Losses per token as differentiable ATen over the numbers of each row."""
    return lambda problem: of_rows(layout, problem, rows_of(layout, problem))


def cross_entropy_of_rows(layout: OneRank, problem: TokenLosses, rows: Rows) -> tuple[Tensor, TokenStatistics]:
    options = (problem.ignore_index, problem.loss, layout.num_classes)
    losses, _ = losses_of_rows(problem.operands, *options, *rows[:4], target_weight=problem.target_weight)
    return losses, rows.statistics(problem.statistics)
