"""Where a loss may have a sparse gradient (gradient_threshold), and refusals by name elsewhere."""

from flce_ops.entry.schemas import CrossEntropy
from flce_ops.meta.sparse_checks import check_sparse, check_sparse_options
from flce_ops.ops.situations import needs_gradient
from flce_ops.support.torch_private import functorch_is_active

OP = "linear_cross_entropy"


def check_sparse_gradient(call: CrossEntropy) -> None:
    """Of plain tensors, operands in the dtype that autocast makes them."""
    check_sparse_options(OP, call.sparse)
    wanted = any(needs_gradient(tensor) for tensor in (call.input, call.linear_weight, call.linear_bias))
    if not call.sparse.gradient_threshold or not wanted:
        return
    if functorch_is_active():
        refuse("under a torch.func transform")
    if call.main_grad is not None:
        refuse("with main_grad")
    if call.reduction == "none":
        refuse("of reduction='none'", "; use 'mean' or 'sum' with token_weight")
    numbers = call.numbers
    check_sparse(
        OP,
        call.sparse,
        call.input,
        label_smoothing=numbers.label_smoothing,
        softcap=numbers.softcap,
        target_weight=call.target_weight,
    )


def refuse_sparse_gradient(call: CrossEntropy, of: str) -> None:
    check_sparse_options(OP, call.sparse)
    if call.sparse.gradient_threshold:
        refuse(of)


def refuse(of: str, instead: str = "; leave gradient_threshold out") -> None:
    raise NotImplementedError(f"{OP}: the sparse gradient {of} is not implemented{instead}")
