"""Stands in for TRL's _chunked_divergence_loss, the loss of its DistillationTrainer.

TRL's function gives per-token divergences to autograd and recomputes both models' logits in backward. Here one call
computes the sum and makes its gradients in forward: 3 passes of the student and 1 of the teacher, and 1 of the student
for the entropy that TRL logs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...functional import linear_kl_div, linear_log_probs
from .log_probs import in_dtype_of
from .zero3 import gathered, gathered_in_backward

# B batch, K tokens of a completion, D hidden of the student, E of the teacher, V vocabulary

IGNORED = -100


def chunked_divergence_loss(
    student_hidden_states: Tensor,  # (B, K, D)
    teacher_hidden_states: Tensor,  # (B, K, E)
    student_lm_head_weight: Tensor,  # (V, D)
    teacher_lm_head_weight: Tensor,  # (V, E)
    completion_mask: Tensor,  # (B, K)
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,  # (V,)
    teacher_lm_head_bias: Tensor | None = None,  # (V,)
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # loss, sum of the student's entropies, number of tokens
    student = (student_lm_head_weight, student_lm_head_bias)
    teacher = (teacher_lm_head_weight, teacher_lm_head_bias)
    with gathered(*student, *teacher):
        weight, bias = in_dtype_of(student_hidden_states, *map(whole, student))
        teacher_weight, teacher_bias = in_dtype_of(teacher_hidden_states, *map(constant, map(whole, teacher)))
        valid = completion_mask != 0
        target = torch.where(valid, 0, IGNORED)
        options: dict[str, Any] = {"logit_scale": student_logit_scale, "softcap": student_final_logit_softcapping}
        with gathered_in_backward(weight, bias, teacher_weight, teacher_bias):
            loss = linear_kl_div(
                *(student_hidden_states, weight, teacher_hidden_states.detach(), teacher_weight),
                linear_bias=bias,
                teacher_bias=teacher_bias,
                kind="jsd",
                beta=beta,
                target=target,
                ignore_index=IGNORED,
                reduction="sum",
                **options,
                temperature=temperature,
                teacher_logit_scale=teacher_logit_scale,
                teacher_softcap=teacher_final_logit_softcapping,
            )
        with torch.no_grad():
            found = linear_log_probs(
                *(student_hidden_states, weight, target, bias),
                ignore_index=IGNORED,
                **options,
                temperature=temperature,
                entropy=True,
            )
    count = valid.sum()
    divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return loss / (divisor.to(loss.device) if isinstance(divisor, Tensor) else divisor), found.entropy.sum(), count


def whole(parameter: Tensor | None) -> Tensor | None:
    """The whole parameter. FSDP2 shards parameters as DTensors, and TRL passes them on as such."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def constant(parameter: Tensor | None) -> Tensor | None:
    """The parameter without a gradient. TRL passes on the teacher's parameters as they are, and computes no gradient
    for them.
    """
    return None if parameter is None else parameter.detach()
