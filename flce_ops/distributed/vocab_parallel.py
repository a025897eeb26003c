"""Row statistics if each rank holds some of the classes. Ranks exchange O(N) numbers, never a logit or a weight.

    rank r:   lse_r = logsumexp of its z_ij      target_logit_r = z_iy or 0
              hbar_r = sum of its p log p        max_r, argmax_r = its largest logit and that one's class
              logit_sum_r = sum of its w_j (z_ij - lse_r)

         (3 to 8, N) of every rank                one all_gather; a target of K classes has K numbers
    lse = logsumexp_r lse_r                             target_logit: a sum over r                    N numbers each,
    logit_sum = sum_r logit_sum_r + W_r (lse_r - lse)   W_r: the sum of the w_j of rank r
    expected_log_prob = sum_r s_r (hbar_r + log s_r)    argmax: that of the largest max_r             on every rank
    with s_r = exp(lse_r - lse)

Ranks send an lse as its lse_pair, so differences lose no digits if all logits share a large offset.

Backward: d lse / d lse_r = exp(lse_r - lse). Each rank uses its own row of the cotangents, so nothing is sent.
grad_input must still be summed over ranks. The caller's placements decide when: it is a Partial.

A scalar loss and its gradients take one pass over the logits instead: 3 GEMM passes instead of 4. For each chunk of n
rows, every rank runs this for its own classes:

    E = exp(z - reference)                       the chunk's only GEMM for logits
    lse, target_logit, logit_sum of the shard    all_gather of 2 to 4 numbers a row: the only communication
    lse, target_logit, logit_sum, losses         as above, on every rank
    grad_linear_weight += G.T @ input            G from E and lse
    grad_input[rows]    = G @ linear_weight      this rank's part of a sum over ranks, which the caller adds

All ranks must use the same chunks. Chunks depend on the largest shard, ceil(V / R) rows, and on the workspace, which
must therefore be the same on all ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..aten.logits import activate_with_slope
from ..math.options import Operands, TokenLosses, TokenStatistics, accumulation_dtype, changed, in_columns
from ..math.statistics import (
    Rows,
    argmax_of_shards,
    asked_of_rows,
    class_weights_of_shards,
    log_shares,
    logit_sum_of_shards,
    statistics_of_shards,
)
from ..math.token_weights_and_denominator import Reduction
from ..meta.arguments import Forward, WithGrad
from ..objectives.cross_entropy import losses_of_rows
from ..ops.autograd import finite_in_empty_rows
from ..ops.function import OPERANDS
from ..ops.made_in_forward import MadeInForward
from ..ops.paths import gradients_in_the_same_pass, gradients_wanted, sharding_of

# N tokens of this rank, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary

Layout = Any  # that of layout.py, which imports torch.distributed.tensor
IGNORED = -1  # used in place of ignore_index, which could equal a column's index on this rank


class ShardRows(NamedTuple):
    """The numbers that a rank sends the others about its classes, (N,) each."""

    lse_pair: Tensor  # (N, 2)
    target_logit: Tensor  # (N, K) with a target (N, K); 0 for classes of other ranks
    others: dict[str, Tensor]  # the requested numbers, by name

    def stacked(self) -> Tensor:  # (k, N)
        return torch.stack([*self.lse_pair.unbind(1), *in_columns(self.target_logit).unbind(1), *self.others.values()])


def vocab_parallel_rows(layout: Layout, problem: TokenLosses) -> Rows:
    """Rows that are equal on all ranks that share the vocabulary.

    For ignored tokens the requested statistics are 0, and argmax is -1.

    `problem` has this rank's (v, D) weight and (v,) bias, or its (N, v) logits. Targets and class weights refer to the
    whole vocabulary.
    """
    num_classes, asked = layout.num_classes, asked_of_rows(problem)
    start, size = layout.vocabulary_range(num_classes)
    if problem.operands.linear_weight is None:
        shard = rows_of_logits(problem, slice(start, start + size), num_classes)
    else:
        shard = rows_of_shard(problem, slice(start, start + size), num_classes, asked)
    shards, valid, target = layout.gather_shards(shard.stacked()), problem.valid, problem.operands.target  # (R, k, N)
    topk = shards.shape[1] - 2 - len(shard.others)
    others = dict(zip(shard.others, shards[:, 2 + topk :].unbind(1), strict=True))  # (R, N) each
    pair, log_share = log_shares(shards[:, 0], shards[:, 1])
    target_logit = shards[:, 2 : 2 + topk].sum(0).T.reshape(target.shape)
    logit_sum = None
    if "logit_sum" in others:
        class_weights = class_weights_of_shards(problem.operands.weight, layout.vocabulary_shards(num_classes), pair)
        logit_sum = logit_sum_of_shards(others["logit_sum"], log_share, class_weights)
    per_shard = TokenStatistics(
        entropy=0.0 - others["expected_log_prob"] if "expected_log_prob" in others else None,
        log_sum_sq_probs=others.get("log_sum_sq_probs"),
        mean_logit=others.get("mean_logit"),
    )
    whole = statistics_of_shards(problem.statistics, per_shard, None, log_share)
    _, _, entropy, *constants = changed(whole, lambda numbers: torch.where(valid, numbers, 0.0))
    expected, largest = None if entropy is None else 0.0 - entropy, None
    if "argmax" in others:
        largest = argmax_of_shards(others["max_logit"].detach(), others["argmax"].detach())
        largest = torch.where(valid, largest, -1)
    pair = torch.where(valid[:, None], pair, 0.0)
    return Rows(target_logit, pair, logit_sum, expected, largest, *constants)


def rows_of_shard(
    problem: TokenLosses,
    classes: slice,  # those of this rank
    num_classes: int,
    asked: dict[str, bool],
) -> ShardRows:
    """A rank may have no classes: V < R, or the shards of ceil(V / R) rows before it hold all V. It then computes one
    class of zeros and leaves the numbers of that class out. So this rank refuses bad targets as the others do, and
    takes part in all collectives of backward.
    """
    operands, empty = problem.operands, classes.start == classes.stop
    weight = None if operands.weight is None or empty else operands.weight[classes]
    operands = operands._replace(weight=weight)
    if empty:
        linear_bias = None if operands.linear_bias is None else pad(operands.linear_bias, (0, 1))
        operands = operands._replace(linear_weight=pad(operands.linear_weight, (0, 0, 0, 1)), linear_bias=linear_bias)
    first = num_classes if empty else classes.start
    own = {"operands": operands, "vocab_start": first, "vocab_size": num_classes, **asked}
    results = Forward.applied(Forward.like(problem, **own))
    found = {made.name: numbers for made, numbers in zip(Forward.results, results)}
    pair = found["lse_pair"]
    others = {name: found[name] for name, wanted in asked.items() if wanted}  # in the same order on all ranks
    for name in ("expected_log_prob", "log_sum_sq_probs"):
        if asked[name]:
            others[name] = finite_in_empty_rows(others[name], pair)
    if asked["argmax"]:
        others["argmax"] = (found["argmax"] + classes.start).to(pair.dtype)  # float32 counts exactly up to 2^24
        others["max_logit"] = found["max_logit"]
    if empty:
        pair = no_classes(finite_in_empty_rows(pair[:, 1], pair))
        least = {"argmax": others["argmax"], "max_logit": pair.detach()[:, 0]} if asked["argmax"] else {}
        others = dict.fromkeys(others, torch.zeros_like(pair[:, 0])) | least
    return ShardRows(pair, found["target_logit"], others)


def no_classes(numbers: Tensor) -> Tensor:  # (N,) -> (N, 2)
    """The lse_pair of rows without classes. `numbers` are finite and have the graph that takes part in backward."""
    return torch.stack([torch.full_like(numbers, -torch.inf), 0.0 * numbers], 1)


def rows_of_logits(problem: TokenLosses, classes: slice, num_classes: int) -> ShardRows:
    """The numbers of given logits. The operators on given logits need a target in every row. A row whose target is on
    another rank gets this rank's class 0, and its target_logit is then set to 0. Backward reads each rank's own logits
    a second time and sends nothing.
    """
    logits, _, target, _, weight = problem.operands
    size, smoothed = classes.stop - classes.start, problem.loss.label_smoothing != 0.0
    column = target.long() - classes.start
    here = (column >= 0) & (column < size)
    somewhere = (target >= 0) & (target < num_classes)
    # a target out of range stays out of range, so that the operator refuses it
    column = torch.where(here, column, torch.where(somewhere, 0, max(size, 1)))
    column = torch.where(problem.valid, column, IGNORED)
    own_weight = weight[classes] if size and weight is not None else None
    operands = Operands(logits if size else logits.new_zeros(logits.shape[0], 1), None, column, None, own_weight)
    own = {"operands": operands, "ignore_index": IGNORED, "logit_sum": smoothed, "argmax": problem.statistics.argmax}
    target_logit, pair, logit_sum, _, _, argmax, *_ = Forward.applied(Forward.like(problem, **own))
    if not size:  # this rank has no class
        target_logit = logit_sum = nothing = logits.sum(1).to(accumulation_dtype(logits.dtype))
        pair = no_classes(nothing)
    others = {"logit_sum": logit_sum} if smoothed else {}
    if problem.statistics.argmax:
        largest = pair.detach()[:, 0]  # -inf without classes
        if size:
            largest = logits.detach().gather(1, argmax.clamp(min=0)[:, None]).to(pair.dtype)
            largest = activate_with_slope(largest, problem.logits)[0].squeeze(1)
        others |= {"argmax": (argmax + classes.start).to(pair.dtype), "max_logit": largest}
    return ShardRows(pair, torch.where(here & problem.valid, target_logit, 0.0), others)


def one_pass_applies(layout: Layout, problem: TokenLosses) -> bool:
    """Whether all ranks take this path. The answer must not depend on the rank."""
    known = sharding_of(layout.vocabulary, layout.mesh.shape, layout.num_classes)
    known |= {"topk": problem.operands.target.dim() == 2}
    title = "a scalar loss over a sharded vocabulary"
    return gradients_in_the_same_pass(problem, title, **known)


def losses_with_grad(
    layout: Layout, problem: TokenLosses, reduction: Reduction
) -> tuple[Tensor, Tensor, TokenStatistics]:
    """Returns the loss () with a gradient, and the tokens' losses and statistics, which are constants."""
    start, _ = layout.vocabulary_range(layout.num_classes)
    values = WithGrad.like(
        problem,
        reduction=reduction,
        **layout.sharing(),
        vocab_start=start,
        output_mask=gradients_wanted(problem.operands),
    )
    loss, losses, _, _, _, *found, _, _ = VocabParallelFunction.apply(*values, layout)
    return loss, losses, TokenStatistics.found(problem.statistics, found)


class VocabParallelFunction(MadeInForward):
    """The derivative of linear_cross_entropy_with_grad over a sharded vocabulary.

    `apply` takes the operator's arguments, then the layout.
    """

    arguments = WithGrad

    @classmethod
    def forward(cls, *values):
        return super().forward(*values[:-1])

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        ctx.layout = inputs[-1]
        super().setup_context(ctx, inputs[:-1], output)

    @classmethod
    def gradients_beside(cls, ctx):
        return (None,)  # the layout

    @classmethod
    def made_again(cls, ctx, call, grad_loss):
        # torch.autograd.grad by the operands is correct for local tensors: each is a result of ToLocal and nothing else
        # is made from it, so no path leads from one operand to another.
        problem = TokenLosses(call.operands, call.ignore_index, call.loss, call.logits)
        losses = losses_of_rows(problem, ctx.layout.num_classes, vocab_parallel_rows(ctx.layout, problem))
        leaves = [getattr(call.operands, name) for name in OPERANDS]
        wanted = [leaf for leaf, want in zip(leaves, call.output_mask) if want]
        found = torch.autograd.grad((call.reduction.row_scale * losses).sum(), wanted, grad_loss, create_graph=True)
        by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found)}
        return [by_leaf.get(id(leaf)) for leaf in leaves], losses
