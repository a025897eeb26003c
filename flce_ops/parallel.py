"""The tensor-parallel plan for the two modules: each rank holds V / ranks rows of the head."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .functional import LinearCrossEntropyMetrics
from .functional.public import typed
from .modules import LinearCrossEntropyHead, LinearCrossEntropyLoss

# B batch, T tokens of one sequence, D hidden, V vocabulary


class VocabParallel(ParallelStyle):
    """Shards the vocabulary of a LinearCrossEntropyLoss or LinearCrossEntropyHead over a 1-D mesh.

    Every rank gets the same loss as from the module alone. The logits and the full weight are never gathered: forward
    sends 2 to 4 numbers per token, backward sums the gradient of the input once.

    Args:
        input_layouts: layout of a plain input, (B, T, D). Replicate(): every rank passes the same hidden states, and
            one all_reduce sums their gradient. Shard(1), sequence parallelism: every rank passes its (B, T / ranks, D);
            forward has one all_gather, backward one reduce_scatter.
        target_layouts: layout of a plain target and token_weight, (B, T). Replicate(): every rank passes the labels of
            all tokens. Shard(1): labels are sharded as the sequence is.
        logits_layouts: layout of the logits that LinearCrossEntropyHead returns without targets, (B, T, V). Replicate()
            gathers the logits; Shard(-1) leaves each rank its classes.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        TypeError: another module than these two.
        ValueError: a mesh of more than one dimension.

    Example::

        parallelize_module(model, mesh["tp"], {"head": flce_ops.VocabParallel(input_layouts=Shard(1))})
        loss = model.head(hidden, target)
    """

    @typed
    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        target_layouts: Placement | None = None,
        logits_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        for name, layout in (("input", input_layouts), ("target", target_layouts), ("logits", logits_layouts)):
            if not isinstance(layout, Placement | None):
                raise TypeError(
                    f"VocabParallel: expected {name}_layouts to be a Placement or None, as Shard(1), got {layout!r}"
                )
        self.input_layouts = input_layouts or Replicate()
        self.target_layouts = target_layouts or Replicate()
        self.logits_layouts = logits_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (LinearCrossEntropyHead, LinearCrossEntropyLoss)):
            raise TypeError(
                "VocabParallel: expected a LinearCrossEntropyLoss or LinearCrossEntropyHead, got "
                f"{type(module).__name__}; for an nn.Linear use ColwiseParallel"
            )
        if device_mesh.ndim != 1:
            raise ValueError(
                f"VocabParallel: expected a 1-D mesh, got {device_mesh.ndim} dimensions; pass one, as mesh['tp']"
            )
        linear = module.linear if isinstance(module, LinearCrossEntropyLoss) else module
        distribute_module(module, device_mesh, partial(self._shard_vocabulary, linear))
        # distribute_module's own hooks see positional arguments only
        module.register_forward_pre_hook(partial(self._to_dtensors, device_mesh), with_kwargs=True)
        module.register_forward_hook(self._to_output, with_kwargs=True)
        return module

    def _shard_vocabulary(self, linear: nn.Module, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if module is not linear:
            return
        for name, parameter in list(linear.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            linear.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

    def _to_dtensors(
        self, device_mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = dict(zip(("input", "target"), args)) | kwargs
        layouts = {"input": self.input_layouts, "target": self.target_layouts, "token_weight": self.target_layouts}
        for name, layout in layouts.items():
            tensor = named.get(name)
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                named[name] = DTensor.from_local(tensor, device_mesh, [layout], run_check=False)
        return args[2:], named  # forward refuses surplus positional arguments

    def _to_output(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: DTensor | tuple[DTensor, LinearCrossEntropyMetrics | dict[str, DTensor]],
    ) -> Any:  # as `output`, with plain tensors
        if kwargs.get("target") is None:
            logits = cast(DTensor, output).redistribute(placements=[self.logits_layouts])
            return logits.to_local() if self.use_local_output else logits
        if not self.use_local_output:
            return output
        # clones, because to_local returns a view, and FSDP2 warns of views that leave its modules
        if isinstance(output, DTensor):
            return output.to_local().clone()
        loss, metrics = output
        if isinstance(metrics, dict):
            return loss.to_local().clone(), {name: part.to_local().clone() for name, part in metrics.items()}
        local = (cast(DTensor, part).to_local().clone() for part in metrics)
        return loss.to_local().clone(), LinearCrossEntropyMetrics(*local)

    def __repr__(self) -> str:
        return (
            f"VocabParallel(input_layouts={self.input_layouts}, target_layouts={self.target_layouts}, "
            f"logits_layouts={self.logits_layouts}, use_local_output={self.use_local_output})"
        )
