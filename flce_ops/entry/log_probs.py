"""Log-probabilities of given tokens, and other results of a row of logits, in one pass that never holds the logits.

torch.ops.flce.linear_log_probs -> composite -> linear_cross_entropy_forward -> ATen over N numbers

log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij

With K classes per token, log_prob_ik = z_iyk - lse_i, and the tail's log p is log(1 - sum_k e^log_prob_ik).
"""

from torch import Tensor

from ..math.log_probs import log_probs_of_rows
from ..math.options import Statistics, TokenLosses, logit_options
from ..math.statistics import asked_of_forward
from ..objectives.cross_entropy import LossOptions
from .arguments import check_head
from .loss import layout_of_call, rows_of
from .schemas import LogProbs
from .support import support_of_call
from .token_temperature import temperature_of_tokens

# N tokens, K classes of a target, D hidden, V vocabulary

OP = "linear_log_probs"


def composite(call: LogProbs) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_log_probs. Results that are not requested are (0,)."""
    layout = layout_of_call(OP, call)
    check_head(OP, call)
    operands = layout.head(call)
    asked = Statistics(call.argmax, True, call.entropy, call.log_sum_sq_probs, call.mean_logit)
    temperature = temperature_of_tokens(OP, call, layout, operands.target)
    logits = logit_options(call.numbers, operands.input, temperature)
    problem = TokenLosses(operands, call.ignore_index, LossOptions(), logits, asked)
    problem.sparse, problem.batch_invariant = call.sparse, call.batch_invariant
    problem.support = support_of_call(OP, layout, call, operands.target)
    rows = rows_of(layout, problem)
    numbers = {name: getattr(rows, name) if wanted else None for name, wanted in asked_of_forward(asked).items()}
    of_targets = (operands.target, call.ignore_index, rows.target_logit, rows.lse)
    results = log_probs_of_rows(*of_targets, **numbers, lse_rest=rows.lse_rest, tail=call.tail)
    present = (True, True, call.entropy, call.argmax, call.log_sum_sq_probs, call.mean_logit, call.tail)
    return tuple(layout.result(of_rows) if there else of_rows for of_rows, there in zip(results, present, strict=True))
