"""Body of the entry operator flce::linear_kl_div: which path runs, the reduction."""

from torch import Tensor

from flce_ops.entry.arguments import check_positive
from flce_ops.entry.kl_div_checks import OP
from flce_ops.entry.kl_div_plain import plain_composite
from flce_ops.math.kl_div_arguments import Operands, Options
from flce_ops.math.scalars import Number, logit_scalars, scalar
from flce_ops.meta.kl_div_checks import check_kind
from flce_ops.support.dtensor import any_dtensor

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def composite(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    teacher_probs: Tensor | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    kind: str = "forward",
    beta: Number = 0.5,
    target: Tensor | None = None,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    normalizer: Tensor | None = None,
    logit_scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    teacher_logit_scale: Number | None = None,
    teacher_softcap: Number | None = None,
) -> Tensor:
    """Body of torch.ops.flce.linear_kl_div."""
    operands = Operands(input, linear_weight, linear_bias, teacher_input, teacher_weight, teacher_bias, teacher_probs)
    check_positive(OP, softcap=softcap, teacher_softcap=teacher_softcap, temperature=temperature)
    kind = resolve_kind(kind, beta)
    student = logit_scalars(logit_scale, softcap, temperature, input)
    teacher_logit_scale = logit_scale if teacher_logit_scale is None else teacher_logit_scale
    teacher = logit_scalars(
        teacher_logit_scale, teacher_softcap, temperature, input if teacher_input is None else teacher_input
    )
    options = Options(
        kind=kind,
        beta=scalar(beta, input) if kind == "jsd" else None,
        **student,
        teacher_logit_scale=teacher["logit_scale"],
        teacher_softcap=teacher["softcap"],
    )
    arguments = (target, token_weight, reduction, normalizer)
    if any_dtensor(*operands, target, token_weight, normalizer):
        from flce_ops.entry.kl_div_sharded import dtensor_composite  # builds on torch.distributed.tensor

        return dtensor_composite(operands, options, *arguments, ignore_index)
    return plain_composite(operands, options, *arguments, ignore_index)


def resolve_kind(kind: str, beta: Number) -> str:
    """beta = 0 and 1 name the two divergences that "jsd" tends to, up to the factors beta and 1 - beta."""
    if kind != "jsd" or 0.0 < beta < 1.0:
        check_kind(OP, kind)
        return kind
    if beta not in (0.0, 1.0):
        raise ValueError(f"{OP}: expected beta in [0, 1], got {beta}")
    return "reverse" if beta else "forward"
