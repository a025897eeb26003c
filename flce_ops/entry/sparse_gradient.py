"""Where a loss may have a sparse gradient (gradient_threshold), and refusals by name elsewhere."""

from flce_ops.entry.schemas import CrossEntropy, LogProbs, PolicyLoss
from flce_ops.meta.sparse_checks import check_sparse, check_sparse_options
from flce_ops.ops.situations import needs_gradient

Call = CrossEntropy | LogProbs | PolicyLoss

OVER_SHARDS = "over a sharded vocabulary, but for a scalar loss of one class a token with classes on every rank,"


def check_sparse_gradient(op: str, call: Call) -> None:
    """Operands are in the dtype that autocast makes them."""
    check_sparse_options(op, call.sparse)
    if not wants_gradient(call):
        return
    check_sparse(op, call.sparse, call.input)
    if call.sparse.gradient_mode == "tiles" and call.target.dim() == call.input.dim():
        refuse_sparse_gradient(op, call, "of mode 'tiles' with several classes a token")
    if isinstance(call, CrossEntropy) and call.main_grad is not None:
        refuse_sparse_gradient(op, call, "with main_grad")


def refuse_sparse_gradient(op: str, call: Call, of: str) -> None:
    check_sparse_options(op, call.sparse)
    if call.sparse.gradient_threshold and wants_gradient(call):
        raise NotImplementedError(f"{op}: the sparse gradient {of} is not implemented; leave gradient_threshold out")


def wants_gradient(call: Call) -> bool:
    return any(needs_gradient(tensor) for tensor in (call.input, call.linear_weight, call.linear_bias))
