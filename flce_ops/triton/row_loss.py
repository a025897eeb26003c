"""flce_ops/math/loss.py in a kernel: the loss of a row and its partial derivatives.

    loss = (1 - eps) w_y (lse - z_y)  +  eps / V (sum_j w_j lse - logit_sum)  +  z_loss lse^2

The kernels that call it hand `loss` through: an option of the loss is read here and in flce_ops/math/loss.py only.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.options import LossOptions
from flce_ops.triton.logits_gemm import LN2, number_at

# n rows of a chunk, V vocabulary


class RowLoss(NamedTuple):
    """What the loss of every row depends on; one argument of a kernel."""

    class_weight_sum: Tensor | None  # () sum_j w_j; None for V
    num_classes: int  # V, of all ranks
    options: LossOptions


@triton.jit
def row_loss(
    surprisal2,  # (n,) lse - z_y in base 2, made without cancellation where the caller can
    lse2,  # (n,) base 2
    logit_sum2,  # (n,) sum_j w_j z_j in base 2; None without label smoothing
    target_weight,  # (n,) w_y; None for 1s
    loss,  # RowLoss, its tensors as pointers
):
    """(loss, d_lse, d_target) of each row: the gradient by z is d_lse softmax(z) + d_target onehot(y) + d_sum w.

    d_sum = -eps / V is the same for all rows: flce_ops/triton/smoothing.py applies it.
    """
    options, V = loss.options, loss.num_classes
    target_factor = tl.full(lse2.shape, 1.0, tl.float32) - options.label_smoothing
    if target_weight is not None:
        target_factor *= target_weight
    lse = lse2 * LN2
    value = target_factor * surprisal2 * LN2
    d_lse = target_factor
    if logit_sum2 is not None:
        smoothing = options.label_smoothing / V
        class_weight_sum = V * 1.0 if loss.class_weight_sum is None else tl.load(loss.class_weight_sum)
        value += smoothing * (class_weight_sum * lse - logit_sum2 * LN2)
        d_lse += smoothing * class_weight_sum
    if options.z_loss is not None:
        z_loss = number_at(options.z_loss)
        value += z_loss * lse * lse
        d_lse += 2.0 * z_loss * lse
    return value, d_lse, -target_factor
