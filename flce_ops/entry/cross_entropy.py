"""Bodies of the entry operators flce::linear_cross_entropy and flce::linear_cross_entropy_metrics.

The entries are CompositeImplicitAutograd, as ATen's scaled_dot_product_attention: they see requires_grad, autocast and
tensor subclasses, and everything they do beyond the inner operators is ordinary differentiable ATen over N numbers.
"""

from torch import Tensor

from flce_ops.entry import plain
from flce_ops.entry.class_order import check_class_order
from flce_ops.entry.class_probabilities import loss_of_probabilities
from flce_ops.entry.main_grad import check_main_grad
from flce_ops.entry.positions import losses_of_positions
from flce_ops.entry.schemas import CrossEntropy, CrossEntropyMetrics
from flce_ops.entry.sparse_gradient import refuse_sparse_gradient
from flce_ops.math.options import Statistics, TokenStatistics
from flce_ops.math.reduction import accuracy_of, count_right_and_valid, target_is_argmax
from flce_ops.meta.call import takes
from flce_ops.support.dtensor import any_dtensor

OP = "linear_cross_entropy"


@takes(CrossEntropy)
def composite(call: CrossEntropy) -> Tensor:
    """Body of torch.ops.flce.linear_cross_entropy."""
    check_main_grad(OP, call)
    check_class_order(OP, call)
    return loss_and_statistics(call, Statistics())[0]


@takes(CrossEntropyMetrics)
def composite_metrics(call: CrossEntropyMetrics) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics; (0,) in place of what is not asked for.

    (loss, token_accuracy, is_top1, argmax, lse, entropy, log_sum_sq_probs, mean_logit), the first two with argmax.
    """
    if call.target_weight is not None and call.statistics.argmax:
        raise NotImplementedError(
            f"{OP}: return_metrics of accuracy and argmax is not implemented beside target_weight, whose target names "
            "several classes; linear_log_probs(..., argmax=True) finds the largest logit"
        )
    check_main_grad(OP, call)
    check_class_order(OP, call)
    indices_of_matrix = call.linear_weight.dim() <= 2 and not call.target.is_floating_point()
    if indices_of_matrix and any_dtensor(call.input, call.linear_weight, call.target):
        from flce_ops.entry.sharded import dtensor_composite_metrics

        return dtensor_composite_metrics(call)
    loss, statistics = loss_and_statistics(call, call.statistics)
    accuracy = is_top1 = None
    if statistics.argmax is not None:
        is_top1 = target_is_argmax(statistics.argmax, call.target, call.ignore_index)
        accuracy = accuracy_of(count_right_and_valid(is_top1, call.target, call.ignore_index))
    return loss, *(loss.new_zeros(0) if result is None else result for result in (accuracy, is_top1, *statistics))


def loss_and_statistics(call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    if call.linear_weight.dim() > 2:
        refuse_sparse_gradient(OP, call, "of a K-dimensional loss")
        return losses_of_positions(call, asked, of_matrix)
    return of_matrix(call, asked)


def of_matrix(call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    """Of a linear_weight (V, D)."""
    if call.target.is_floating_point():
        refuse_sparse_gradient(OP, call, "of class probabilities")
        return loss_of_probabilities(call, any(asked)), TokenStatistics()
    if any_dtensor(*call.values()):
        from flce_ops.entry.sharded import dtensor_composite  # torch.distributed.tensor: only for its users

        return dtensor_composite(call, asked)
    return plain.loss_and_statistics(call, asked)
