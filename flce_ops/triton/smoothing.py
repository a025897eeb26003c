"""The part of the logit gradient that label smoothing adds, as two vectors.

Without a softcap, smoothing adds to G the rank-1 matrix  m_i w_j logit_scale,  with m_i = -g_i eps / V the derivative
by the row's logit sum, g the row scales and w the class weights. Its products are outer products, so G need not hold
it. With logit_scale in m:

    grad_input += m (w @ linear_weight)     grad_linear_weight += w (m @ input)     grad_linear_bias += w sum(m)
"""

from torch import Tensor

from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.kept_tokens import Kept

# N tokens, n rows of a chunk, D hidden, V vocabulary


class SmoothingTerms:
    def __init__(
        self,
        input: Tensor,  # (N, D)
        linear_weight: Tensor,  # (V, D)
        class_weight: Tensor | None,  # (V,) float32
        d_sum: Tensor,  # (N,) float32, m; 0 where ignored
    ) -> None:
        self.class_weight, self.d_sum = class_weight, d_sum
        self.weight_columns = weighted_column_sum(linear_weight, class_weight)  # (D,)
        self.input_columns = weighted_column_sum(input, d_sum)  # (D,)

    def input_terms(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """Two vectors whose outer product is added to grad_input of the kept tokens."""
        return self.d_sum[kept.order.long()], self.weight_columns

    def weight_terms(self) -> tuple[Tensor | None, Tensor]:
        """Two vectors, the first None for 1, whose outer product is added to grad_linear_weight."""
        return self.class_weight, self.input_columns

    def add_to_bias(self, grad_bias: Tensor) -> None:
        total = self.d_sum.sum()
        grad_bias += total if self.class_weight is None else total * self.class_weight
