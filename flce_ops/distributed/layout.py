"""What each mesh dimension shards, read off the placements of input and linear_weight; refusals of what does not fit.

    linear_weight   input        the mesh dimension shards    input is needed as    d input    d linear_weight
    Replicate       Shard(k)     tokens (k is not D)          Shard(k)              Shard(k)   Partial
    Shard(0)        any          the vocabulary               Replicate             Partial    Shard(0)
    Replicate       otherwise    nothing                      Replicate             Replicate  Replicate

Gradients return to the placement that the argument came in: Partial -> Replicate is one all_reduce, Partial -> Shard(k)
(sequence parallelism) one reduce_scatter. A replicated weight's Partial gradient stays Partial, as F.linear's does.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flce_ops.meta.checks import check_dense

# V vocabulary, D hidden

OP = "linear_cross_entropy"
FSDP_HINT = (
    "If FSDP shards this weight, the loss must run while it is gathered: inside the forward of the module that owns it "
    "(flce_ops.LinearCrossEntropyHead does that), in a method named by register_fsdp_forward_method, or after "
    "module.unshard()."
)


def splits(placement: Placement) -> bool:
    """Shard, or the strided shard that (B, T, D) sharded along T becomes when it is flattened to (B T, D)."""
    return not (placement.is_replicate() or placement.is_partial())


@dataclass(frozen=True)
class Layout:
    """What each dimension of `mesh` shards."""

    mesh: DeviceMesh
    tokens: tuple[Placement, ...]  # per mesh dimension: a shard of the token dimensions, or Replicate
    vocabulary: tuple[bool, ...]  # per mesh dimension

    def placements(
        self, *, tokens: Placement | None = None, vocabulary: Placement | None = None
    ) -> tuple[Placement, ...]:
        """One placement on the dimensions that shard tokens, one on those that shard the vocabulary, else Replicate."""
        return tuple(
            (vocabulary if shards_vocabulary else tokens if splits(token) else None) or Replicate()
            for token, shards_vocabulary in zip(self.tokens, self.vocabulary)
        )

    @property
    def replicated(self) -> tuple[Placement, ...]:
        return (Replicate(),) * self.mesh.ndim

    @property
    def shards_vocabulary(self) -> bool:
        return any(self.vocabulary)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether a rank holds only some of the classes; a mesh dimension of one rank leaves it all of them."""
        return any(self.mesh.size(dim) > 1 for dim, shards_it in enumerate(self.vocabulary) if shards_it)

    @property
    def input_gradient(self) -> tuple[Placement, ...]:
        return tuple(
            Partial() if shards_vocabulary else token for token, shards_vocabulary in zip(self.tokens, self.vocabulary)
        )

    def vocabulary_range(self, num_classes: int) -> tuple[int, int]:
        """(first class, number of classes) of this rank: chunks of ceil(V / ranks), the last ones short or empty."""
        start, size = 0, num_classes
        coordinate = self.mesh.get_coordinate()
        for dim, shards_vocabulary in enumerate(self.vocabulary):
            if shards_vocabulary:
                chunk = -(-size // self.mesh.size(dim))
                offset = min(coordinate[dim] * chunk, size)
                start, size = start + offset, min(chunk, size - offset)
        return start, size


def layout_of(input: Tensor, linear_weight: Tensor, op: str = OP, **others: Tensor | None) -> Layout:
    """`others`, by name, are on the same mesh or plain."""
    check_both_distributed(input, linear_weight, op)
    input, linear_weight = cast(DTensor, input), cast(DTensor, linear_weight)
    check_placements(linear_weight, op)
    check_dense_shards(op, input=input, linear_weight=linear_weight)
    if input.device_mesh != linear_weight.device_mesh:
        raise ValueError(
            f"{op}: input is {describe(input)}, but linear_weight is {describe(linear_weight)}; both must be on one "
            f"mesh: make input a DTensor on the weight's mesh, or the weight one on input's. {FSDP_HINT}"
        )
    if input.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{op}: this process is not part of the mesh of input and linear_weight, {input.device_mesh}; call it on "
            "the processes of the mesh only"
        )
    check_same_mesh(input, op, **others)
    tokens, vocabulary = [], []
    for token, rows in zip(input.placements, linear_weight.placements):
        vocabulary.append(rows.is_shard())
        stays = splits(token) and not rows.is_shard() and cast(Shard, token).dim % input.dim() != input.dim() - 1
        tokens.append(token if stays else Replicate())
    return Layout(input.device_mesh, tuple(tokens), tuple(vocabulary))


def check_both_distributed(input: Tensor, linear_weight: Tensor, op: str) -> None:
    if isinstance(linear_weight, DTensor) and not isinstance(input, DTensor):
        raise ValueError(
            f"{op}: linear_weight is a DTensor, {describe(linear_weight)}, but input is a plain tensor. {FSDP_HINT} "
            "If its vocabulary is sharded on purpose, make input a DTensor on the same mesh: the plan "
            "flce_ops.VocabParallel does, or DTensor.from_local(input, mesh, [Replicate()])."
        )
    if not isinstance(linear_weight, DTensor) and isinstance(input, DTensor):
        raise ValueError(
            f"{op}: input is a DTensor, {describe(input)}, but linear_weight is a plain tensor. Make the weight a "
            "DTensor on the same mesh, distribute_tensor(weight, mesh, [Replicate()]) or [Shard(0)] to shard the "
            "vocabulary, or pass input.to_local()."
        )
    if not isinstance(input, DTensor):
        raise ValueError(
            f"{op}: input and linear_weight are plain tensors, but another argument is a DTensor; pass that argument's "
            "to_local() (or full_tensor()), or make input and linear_weight DTensors on its mesh"
        )


def check_dense_shards(op: str, **tensors: DTensor | None) -> None:
    with torch.no_grad():  # no work and no node in a graph
        check_dense(op, **{name: None if tensor is None else tensor.to_local() for name, tensor in tensors.items()})


def check_placements(linear_weight: DTensor, op: str) -> None:
    for placement in linear_weight.placements:
        if not (type(placement) is Shard or placement.is_replicate() or placement.is_partial()):
            raise ValueError(
                f"{op}: linear_weight is {describe(linear_weight)}, the layout of a parameter that FSDP and tensor "
                f"parallelism shard together, as it is stored between uses. {FSDP_HINT}"
            )
        if isinstance(placement, Shard) and placement.dim % linear_weight.dim() != 0:
            raise ValueError(
                f"{op}: linear_weight is sharded along its features (D), {describe(linear_weight)}, so that every "
                "logit would need a sum over ranks. Shard the vocabulary instead (flce_ops.VocabParallel, "
                "ColwiseParallel, or linear_weight.redistribute(mesh, [Shard(0)])), or replicate it."
            )


def check_same_mesh(input: DTensor, op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh != input.device_mesh:
            raise ValueError(
                f"{op}: {name} is {describe(tensor)}, but input is {describe(input)}; both must be on one mesh: pass "
                f"{name} as a plain tensor that is the same on every rank ({name}.full_tensor()), or distribute it anew"
            )


def check_plain_target(target: Tensor, input: Tensor, op: str = OP) -> None:
    """A plain target holds every token; the tokens of one rank alone cannot be told from a mistake."""
    tokens = target.shape[: input.dim() - 1]  # a dimension of slots may follow
    if isinstance(target, DTensor) or tokens == input.shape[:-1]:
        return
    input = cast(DTensor, input)  # layout_of refuses others
    hint = ""
    if tokens == input.to_local().shape[:-1]:
        hint = (
            ". It has the tokens of this rank only: say so with "
            f"DTensor.from_local(target, mesh, {list(input.placements)})"
        )
    raise ValueError(
        f"{op}: expected a plain target to hold all tokens of input, shape {tuple(input.shape[:-1])}, "
        f"got {tuple(target.shape)}{hint}"
    )


def describe(tensor: DTensor) -> str:
    names = tensor.device_mesh.mesh_dim_names
    sizes = tuple(tensor.device_mesh.shape)
    mesh = dict(zip(names, sizes)) if names else sizes
    return f"{tuple(tensor.placements)} on mesh {mesh}"
