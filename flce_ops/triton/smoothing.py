"""The part of the logit gradient that label smoothing adds, as two vectors.

Without a softcap, smoothing subtracts from G the rank-1 matrix  K_ij = kappa a_i w_j,  kappa = eps logit_scale / V,
with a the row scales and w the class weights. Its products are outer products, so G itself need not hold it:

    K @ linear_weight = kappa a (w @ linear_weight)     K.T @ input = kappa w (a @ input)     K.T @ 1 = kappa w sum(a)
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
        row_scale: Tensor,  # (N,), 0 where ignored
        kappa: float | Tensor,  # ()
    ) -> None:
        self.kappa = kappa
        self.class_weight = class_weight
        self.row_scale = row_scale
        self.weight_columns = weighted_column_sum(linear_weight, class_weight)  # (D,)
        self.input_columns = weighted_column_sum(input, row_scale)  # (D,)

    def input_terms(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """Two vectors whose outer product is added to grad_input of the kept tokens."""
        return -self.kappa * self.row_scale[kept.order.long()], self.weight_columns

    def weight_terms(self) -> tuple[Tensor | None, Tensor]:
        """Two vectors, the first None for 1, whose outer product is added to grad_linear_weight."""
        return self.class_weight, -self.kappa * self.input_columns

    def subtract_from_bias(self, grad_bias: Tensor) -> None:
        total = self.kappa * self.row_scale.sum()
        grad_bias -= total if self.class_weight is None else total * self.class_weight
