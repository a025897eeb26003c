"""torchtitan: a loss for its Trainer, in place of ChunkedLossWrapper.

    from flce_ops.integrations.torchtitan import LinearCrossEntropyLoss

    config = llama3_8b()
    config.loss = LinearCrossEntropyLoss.Config()

Trainer passes the head to losses that are a ChunkedLossWrapper, and makes the model return hidden states for these.
That is the only reason why the class here derives from it. The class does not chunk the sequence, has no inner loss,
and runs one backward.

The loss runs inside the forward of the head, around which FSDP2 gathers the weight and its group.
"""

from dataclasses import dataclass
from types import MethodType

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig

from ..functional import linear_cross_entropy

# B batch, T tokens, D hidden, V vocabulary

INSTEAD = "use torchtitan's ChunkedLossWrapper there"


def sum_of_losses(self: nn.Linear, input: Tensor, target: Tensor) -> Tensor:  # (B, T, D), (B, T) -> ()
    """Forward of the head, which runs while FSDP2 has gathered its weight."""
    for name, tensor in (("hidden states", input), ("labels", target), ("a weight of lm_head", self.weight)):
        if isinstance(tensor, DTensor):
            raise NotImplementedError(f"expected plain tensors, got DTensors as {name}; {INSTEAD}")
    if self.weight.shape[0] != self.out_features:
        raise NotImplementedError(
            f"expected all {self.out_features} classes of lm_head on this rank, got {self.weight.shape[0]}: tensor "
            f"parallelism has sharded it; {INSTEAD}"
        )
    return linear_cross_entropy(input, self.weight, target, self.bias, reduction="sum", ignore_index=IGNORE_INDEX)


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """Sum of the cross-entropies over `global_valid_tokens`, as torchtitan's CrossEntropyLoss of lm_head's logits.

    For data parallelism (FSDP2, HSDP), with pipeline and context parallelism. Raises NotImplementedError under tensor
    parallelism, and if lm_head is not a plain linear layer (adapters, low precision).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        """compile_config is ignored: to a compiler the operator is one kernel call."""
        self.lm_head: nn.Module | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            raise NotImplementedError(
                f"expected lm_head to compute input @ weight.T + bias, got {type(lm_head).__qualname__}; {INSTEAD}"
            )
        # replaces a forward that torchtitan may have set, which redistributes logits over tensor parallelism
        lm_head.forward = MethodType(sum_of_losses, lm_head)  # type: ignore[method-assign]
        self.lm_head = lm_head

    def __call__(
        self,
        pred: Tensor,  # hidden states, (B, T, D)
        labels: Tensor,  # (B, T)
        global_valid_tokens: Tensor | None = None,  # ()
        **loss_inputs: object,  # positions, which this loss does not need
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.lm_head is None:
            raise RuntimeError("LinearCrossEntropyLoss needs the head: call set_lm_head first, as Trainer does")
        loss = self.lm_head(pred, labels)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}
