"""linear_kl_div on DTensors: local tensors out, the registered operators on them, a DTensor back.

    input, teacher_input ...  --redistribute-->  local (N, D), (N, E)   --tokens sharded-->      this rank's tokens
                                                                        --vocabulary sharded-->  this rank's classes
    denominator               --all_reduce of one number, over the ranks that share the tokens
    loss                      <--all_reduce of one number--  sum over this rank's tokens

With the vocabulary sharded, O(N) numbers cross the ranks inside the operators (flce_ops/math/shards.py) and
neither logits nor weights move. Layouts are read off input and linear_weight, as for linear_cross_entropy; the
teacher's weight must be laid out like the student's.
"""

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from flce_ops.distributed.layout import (
    Layout,
    check_dense_shards,
    check_plain_target,
    describe,
    layout_of,
)
from flce_ops.distributed.local import localize, localize_per_class
from flce_ops.entry.kl_div_checks import OP, check_arguments
from flce_ops.entry.kl_div_plain import (
    autocast_pairs,
    denominator_of,
    flatten_tokens,
    row_divergences,
    weigh_tokens,
    weighted_loss,
)
from flce_ops.entry.sharded import per_token, quotient_over_tokens, sum_over_tokens
from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.reduction import row_factor

# N tokens of this rank, D and E hidden sizes of student and teacher, V vocabulary, v of them on this rank


def dtensor_composite(
    operands: KlDivOperands,  # DTensors of shape (..., D), (V, D), ...
    options: KlDivOptions,
    target: Tensor | None,  # (...), a DTensor, or a plain tensor that is the same on every rank
    token_weight: Tensor | None,  # (...), likewise
    reduction: str,
    normalizer: Tensor | None,  # (), likewise
    ignore_index: int,
) -> Tensor:
    others = {"target": target, "token_weight": token_weight, "normalizer": normalizer}
    layout = layout_of(**operands._asdict(), op=OP, **others)
    check_teacher_layout(layout, operands)
    if target is not None:
        check_plain_target(target, operands.input, OP)
    operands = autocast_pairs(operands)
    check_arguments(operands, target, token_weight, reduction, normalizer)
    shape = operands.input.shape[:-1]
    options = share_columns(layout, options, operands.linear_weight.shape[0])
    operands = local_operands(layout, operands)
    local_shape = operands.input.shape[:-1]
    operands = flatten_tokens(operands, localize(layout, target, layout.tokens), ignore_index)
    local_weight, denominator = localize(layout, token_weight, layout.tokens), None
    if reduction != "none":
        number_gradient = layout.placements(tokens=Partial())
        local_normalizer = localize(layout, normalizer, layout.replicated, gradient=number_gradient)
        denominator = denominator_of(operands, reduction, local_normalizer)
        if denominator is not None and normalizer is None:
            denominator = sum_over_tokens(layout, denominator).to_local().clamp(min=1.0)  # as in kl_div_plain.py
    operands, local_weight = weigh_tokens(operands, local_weight, denominator)
    if reduction != "none":
        return quotient_over_tokens(layout, *weighted_loss(operands, options, local_weight, denominator), denominator)
    factor = row_factor(operands.valid, local_weight, None)
    return per_token(layout, row_divergences(operands, options, factor).reshape(local_shape), shape)


def check_teacher_layout(layout: Layout, operands: KlDivOperands) -> None:
    if operands.teacher_probs is not None:
        raise NotImplementedError(
            f"{OP}: teacher_probs with DTensors is not implemented; pass the teacher's hidden states and weight "
            "(teacher_input, teacher_weight) as DTensors, or plain tensors throughout"
        )
    linear_weight = cast(DTensor, operands.linear_weight)
    if sum(layout.vocabulary) > 1:
        raise NotImplementedError(
            f"{OP}: linear_weight is {describe(linear_weight)}: a vocabulary sharded over more than one mesh "
            "dimension is not implemented; shard it over one and replicate it over the others"
        )
    expected = layout.placements(vocabulary=Shard(0))
    for name in ("teacher_input", "teacher_weight"):
        tensor = getattr(operands, name)
        if tensor is not None and not isinstance(tensor, DTensor):
            raise ValueError(
                f"{OP}: input and linear_weight are DTensors, but {name} is a plain tensor; make it a DTensor on the "
                "same mesh: distribute_tensor(teacher_weight, mesh, linear_weight.placements), and "
                "DTensor.from_local(teacher_input, mesh, input.placements)"
            )
    teacher_input = cast(DTensor | None, operands.teacher_input)
    teacher_weight = cast(DTensor | None, operands.teacher_weight)
    check_dense_shards(OP, teacher_input=teacher_input, teacher_weight=teacher_weight)
    if teacher_weight is not None and tuple(teacher_weight.placements) != expected:
        raise ValueError(
            f"{OP}: linear_weight is {describe(linear_weight)}, but teacher_weight is {describe(teacher_weight)}; "
            f"they must be laid out alike: teacher_weight.redistribute(mesh, {list(expected)})"
        )


def share_columns(layout: Layout, options: KlDivOptions, num_classes: int) -> KlDivOptions:
    if not layout.shards_vocabulary:
        return options
    dim = layout.vocabulary.index(True)
    group = layout.mesh.get_group(dim).group_name
    return options._replace(group=group, ranks=layout.mesh.size(dim), vocab_size=num_classes)


def local_operands(layout: Layout, operands: KlDivOperands) -> KlDivOperands:
    return operands._replace(
        input=localize(layout, operands.input, layout.tokens, gradient=layout.input_gradient),
        linear_weight=localize_per_class(layout, operands.linear_weight),
        linear_bias=localize_per_class(layout, operands.linear_bias),
        teacher_input=localize(layout, operands.teacher_input, layout.tokens),
        teacher_weight=localize_per_class(layout, operands.teacher_weight),
        teacher_bias=localize_per_class(layout, operands.teacher_bias),
    )
