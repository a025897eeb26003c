"""Body of the entry operator flce::linear_kl_div: its arguments by group; of plain tensors or of DTensors."""

from torch import Tensor

from flce_ops.entry.arguments import check_ranges
from flce_ops.entry.kl_div_checks import OP
from flce_ops.entry.kl_div_plain import plain_composite
from flce_ops.entry.schemas import KlDiv
from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.options import LogitNumbers
from flce_ops.math.scalars import Number, logit_options, scalar
from flce_ops.meta.call import takes
from flce_ops.meta.kl_div_checks import check_kind
from flce_ops.support.dtensor import any_dtensor

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


@takes(KlDiv)
def composite(call: KlDiv) -> Tensor:
    """Body of torch.ops.flce.linear_kl_div."""
    input, temperature = call.input, call.temperature
    check_ranges(OP, softcap=call.softcap, teacher_softcap=call.teacher_softcap, temperature=temperature)
    operands = KlDivOperands(
        input,
        call.linear_weight,
        call.linear_bias,
        call.teacher_input,
        call.teacher_weight,
        call.teacher_bias,
        call.teacher_probs,
        None,
    )
    kind = resolve_kind(call.kind, call.beta)
    student = logit_options(LogitNumbers(call.softcap, call.logit_scale, temperature), input)
    teacher_scale = call.logit_scale if call.teacher_logit_scale is None else call.teacher_logit_scale
    teacher_like = input if call.teacher_input is None else call.teacher_input
    teacher = logit_options(LogitNumbers(call.teacher_softcap, teacher_scale, temperature), teacher_like)
    options = KlDivOptions(
        kind=kind,
        beta=scalar(call.beta, input) if kind == "jsd" else None,
        **student._asdict(),
        teacher_logit_scale=teacher.logit_scale,
        teacher_softcap=teacher.softcap,
    )
    body = plain_composite
    if any_dtensor(*operands, call.target, call.token_weight, call.normalizer):
        from flce_ops.entry.kl_div_sharded import dtensor_composite  # builds on torch.distributed.tensor

        body = dtensor_composite
    reduction = (call.target, call.token_weight, call.reduction, call.normalizer)
    return body(operands, options, *reduction, call.ignore_index)


def resolve_kind(kind: str, beta: Number) -> str:
    """beta = 0 and 1 name the two divergences that "jsd" tends to, up to the factors beta and 1 - beta."""
    if kind != "jsd" or 0.0 < beta < 1.0:
        check_kind(OP, kind)
        return kind
    if beta not in (0.0, 1.0):
        raise ValueError(f"{OP}: expected beta in [0, 1], got {beta}")
    return "reverse" if beta else "forward"
