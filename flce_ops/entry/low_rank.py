"""Body of flce::linear_cross_entropy_low_rank: the loss of a head with a low-rank pair beside its weight, as in LoRA.

    logits = input @ linear_weight.T + low_rank_input @ low_rank_weight.T       for LoRA, low_rank_input = s input @ A.T

A frozen head has its own operator, which makes no matrix of linear_weight's size. This operator is called once if
forward makes the gradients; otherwise backward calls it a second time. If the head is trained, or under torch.func, the
pair becomes extra features of input and of a copy of linear_weight, and the ordinary operators run.
"""

import functools

from torch import Tensor

from ..math.options import LowRankOperands, Statistics, TokenLosses
from ..math.reduction import Reduction
from ..meta.arguments import LowRankWithGrad
from ..meta.checks import check_device, check_target_dtype
from ..ops.call_facts import needs_gradient, options_in_facts, pair_facts
from ..ops.paths import path_of_loss
from .arguments import OP, check_arguments
from .cross_entropy import composite as composite_of_head
from .loss import Found, layout_of_call, loss_of_tokens, token_losses
from .schemas import CrossEntropy, LowRankCrossEntropy

# N tokens, D hidden, V vocabulary, r rank of the pair


def composite(call: LowRankCrossEntropy) -> Tensor:
    """Raises NotImplementedError for DTensors, and the errors of the loss without the pair."""
    layout = layout_of_call(OP, call)
    head = without_pair(call, call.input, call.linear_weight)
    check_target_dtype(OP, call.target)
    check_arguments(head)
    check_pair(call)
    operands = operands_of(call)
    of_head = layout.head(head)
    pair_input = layout.rows(call.low_rank_input)
    rows = operands._replace(input=of_head.input, low_rank_input=pair_input, target=of_head.target)
    problem = token_losses(OP, layout, head, of_head, Statistics())
    facts = pair_facts(rows, **options_in_facts(problem.loss, problem.logits))
    path = path_of_loss("a scalar loss of a head with a low-rank pair", facts)
    if path == "concatenated":
        input, linear_weight, *_ = operands.concatenated
        return composite_of_head(without_pair(call, input, linear_weight))[0]
    made_in_forward = path == "one pass" and call.reduction != "none"
    with_grad = functools.partial(losses_of_pair, rows, made_in_forward)

    def from_forward(problem: TokenLosses) -> tuple[Tensor, Found]:
        return with_grad(problem, Reduction(None))[1:]

    return loss_of_tokens(layout, head, problem, from_forward, with_grad)[0]


def operands_of(call: LowRankCrossEntropy) -> LowRankOperands:
    return LowRankOperands(*(getattr(call, name) for name in LowRankOperands._fields))


def without_pair(call: LowRankCrossEntropy, input: Tensor, linear_weight: Tensor) -> CrossEntropy:
    options = dict(zip(call.keywords, call.values()[call.positional :]))
    return CrossEntropy.bind(input, linear_weight, call.target, call.linear_bias, **options)


def check_pair(call: LowRankCrossEntropy) -> None:
    """Checks the pair's shapes and dtypes. Without this check, torch.cat would report them in an error that names no
    argument.
    """
    for name, beside in (("low_rank_input", call.input), ("low_rank_weight", call.linear_weight)):
        tensor = getattr(call, name)
        if tensor.shape[:-1] != beside.shape[:-1] or tensor.dim() != beside.dim():
            leading = ", ".join(map(str, beside.shape[:-1]))
            raise ValueError(f"{OP}: expected {name} of shape ({leading}, r), got {tuple(tensor.shape)}")
        if tensor.dtype != call.input.dtype:
            raise TypeError(f"{OP}: expected {name} in input's dtype {call.input.dtype}, got {tensor.dtype}")
    check_device(OP, call.input, "input", low_rank_input=call.low_rank_input, low_rank_weight=call.low_rank_weight)
    rank = call.low_rank_weight.shape[-1]
    if call.low_rank_input.shape[-1] != rank:
        raise ValueError(
            f"{OP}: low_rank_input has {call.low_rank_input.shape[-1]} features, but low_rank_weight has {rank}; "
            "expected one rank r"
        )


def losses_of_pair(
    operands: LowRankOperands, made_in_forward: bool, problem: TokenLosses, reduction: Reduction
) -> tuple[Tensor, Tensor, Found]:
    """Returns the loss () and the losses of tokens (N,). If output_mask asks for no gradient, backward makes the
    gradients.
    """
    operands = operands._replace(target=problem.operands.target)
    mask = [made_in_forward and needs_gradient(getattr(operands, name)) for name in LowRankWithGrad.made]
    call = LowRankWithGrad.like(problem, operands=operands, reduction=reduction, output_mask=mask)
    loss, losses, *_ = call.dispatched()
    return loss, losses, ()
