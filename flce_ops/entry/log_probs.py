"""Log-probabilities of given tokens, and other results of a row.

torch.ops.flce.linear_log_probs -> composite -> a forward operator -> ATen over N numbers

    log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij

With K classes per token, log_prob_ik = z_iyk - lse_i, and the tail's log p is log(1 - sum_k e^log_prob_ik).
"""

from torch import Tensor

from ..math.options import Statistics
from ..math.statistics import log_probs_of_rows
from .arguments import check_head
from .loss import layout_of_call, rows_of, token_losses
from .schemas import LogProbs

# N tokens, K classes of a target, D hidden, V vocabulary

OP = "linear_log_probs"


def composite(call: LogProbs) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_log_probs. Results that are not requested are (0,)."""
    layout = layout_of_call(OP, call)
    check_head(OP, call)
    operands = layout.head(call)
    asked = Statistics(call.argmax, True, call.entropy, call.log_sum_sq_probs, call.mean_logit)
    problem = token_losses(OP, layout, call, operands, asked)
    results = log_probs_of_rows(operands.target, call.ignore_index, rows_of(layout, problem), asked, tail=call.tail)
    present = (True, True, call.entropy, call.argmax, call.log_sum_sq_probs, call.mean_logit, call.tail)
    return tuple(layout.result(of_rows) if there else of_rows for of_rows, there in zip(results, present, strict=True))
