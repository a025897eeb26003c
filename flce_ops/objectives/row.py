"""A row objective: the loss of a token from its row of logits, and the slopes of the loss by the numbers of the row.

    surprisal_i = lse_i - z_iy                 a soft target has K of them, one for each slot
                value_ik, slope_ik = of_target(surprisal_ik, weight_ik, at, objective)
    loss_i, d_lse_i = of_row(sum_k value_ik, sum_k slope_ik, lse_i, logit_sum_i, at, objective)

    G_ij = (l_i p_ij + a_i [j = y_i] + m_i w_j) dz/du        l = g d_lse,   a = -g slope,   m = g d_sum

`slope` is the derivative of the value by the surprisal, d_lse that of the loss by lse through all terms, and g the
scale of the row. of_target is linear in `weight`: the class weight of the target, times the slot's own.

An objective is a NamedTuple of tensors of tokens (N,), whose names stand in `per_token`, and of numbers (). Its two
functions are RowFunctions (language.py): ATen calls them on tensors, the Triton kernels on a block of rows.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from flce_ops.math.options import Cotangents
from flce_ops.math.slots import beside_slots
from flce_ops.objectives.language import RowFunction, times

# N tokens, K slots of each


class RowObjective(Protocol):
    per_token: ClassVar[tuple[str, ...]]
    bounded: ClassVar[bool]  # a slope of 0 is 0 even if the loss is divided by 0
    of_target: ClassVar[RowFunction]
    of_row: ClassVar[RowFunction]

    @property
    def d_sum(self) -> float | None:
        """The derivative by the weighted sum of the logits, the same for all rows; None where it is not read."""

    def _replace(self, **fields: Any) -> Any: ...


def of_rows(objective: Any, rows: slice) -> Any:
    """The same of some tokens."""
    per_token = {name: getattr(objective, name) for name in objective.per_token}
    parts = {name: values[rows] for name, values in per_token.items() if values is not None}
    return objective._replace(**parts) if parts else objective


@dataclass(frozen=True)
class RowTerms:
    """An objective with the weights of N tokens, in ATen; its results can be differentiated once more."""

    objective: Any  # RowObjective
    weight: Tensor | None = None  # (N,) or (N, K); None for 1

    @property
    def soft(self) -> bool:
        """Whether a token has K slots."""
        return self.weight is not None and self.weight.dim() == 2

    def of(self, rows: slice) -> "RowTerms":
        return replace(
            self,
            objective=of_rows(self.objective, rows),
            weight=None if self.weight is None else self.weight[rows],
        )

    def losses_and_slopes(
        self,
        surprisal: Tensor,  # (N,) or (N, K)
        lse: Tensor,  # (N,)
        logit_sum: Tensor | None,  # (N,), with label smoothing
    ) -> tuple[Tensor, Cotangents]:  # (N,)
        """A slope that all rows share is a number."""
        objective = self.objective
        value, slope = objective.of_target(surprisal, self.weight, None, objective)
        of_all_slots = slope
        if self.soft:
            value = torch.where(slope == 0.0, 0.0, value).sum(-1)  # a bias of -inf may switch the class off
            of_all_slots = slope.sum(-1)
        losses, d_lse = objective.of_row(value, of_all_slots, lse, logit_sum, None, objective)
        return losses, Cotangents(-slope, d_lse, objective.d_sum)

    def cotangents(self, slopes: Cotangents, scale: Tensor) -> Cotangents:  # (N,) each
        """Of sum_i scale_i loss_i."""
        d_target, d_lse, d_sum = slopes
        by_slot = beside_slots(scale, d_target) if isinstance(d_target, Tensor) else scale

        def scaled(slope: Tensor | float, scale: Tensor) -> Tensor:
            if self.objective.bounded:
                return torch.where(slope == 0.0, 0.0, slope * scale)
            return scale.neg() if isinstance(slope, float) and slope == -1.0 else times(slope, scale)

        return Cotangents(scaled(d_target, by_slot), scaled(d_lse, scale), None if d_sum is None else d_sum * scale)
