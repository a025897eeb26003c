"""Body of the entry operator flce::linear_policy_loss: of plain tensors or of DTensors."""

from torch import Tensor

from flce_ops.entry.policy_plain import plain_composite
from flce_ops.entry.schemas import PolicyLoss
from flce_ops.meta.call import takes
from flce_ops.support.dtensor import any_dtensor


@takes(PolicyLoss)
def composite(call: PolicyLoss) -> tuple[Tensor, Tensor]:
    """Body of torch.ops.flce.linear_policy_loss: (loss, log_probs)."""
    if any_dtensor(*call.values()):
        from flce_ops.entry.policy_sharded import dtensor_composite  # torch.distributed.tensor: only for its users

        return dtensor_composite(call)
    return plain_composite(call)
