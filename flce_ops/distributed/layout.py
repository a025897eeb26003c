"""Finds what each mesh dimension shards, from the placements of input and linear_weight, and refuses layouts that do
not fit.

    linear_weight   input        the mesh dimension shards    input is needed as    d input    d linear_weight
    Replicate       Shard(k)     tokens (k is not D)          Shard(k)              Shard(k)   Partial
    Shard(0)        any          the vocabulary               Replicate             Partial    Shard(0)
    Replicate       otherwise    nothing                      Replicate             Replicate  Replicate

Layout implements OneRank's protocol for DTensors: it returns local tensors, and turns results into DTensors.

A gradient gets the placement of its argument: Partial -> Replicate takes one all_reduce, Partial -> Shard(k) (sequence
parallelism) one reduce_scatter. A replicated weight's Partial gradient stays Partial, as F.linear's does.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import Parameter

from ..math.sparse_gradient import SparseGradient
from ..math.statistics import all_gather, shards_of_classes
from ..math.token_weights_and_denominator import accuracy_of, count_right_and_valid, target_is_argmax
from ..meta.checks import check_dense, same_shape
from ..support.refusals import refuse_hole
from ..support.sizes import SYMBOLIC, cdiv
from . import OneRank
from .local import SumOverRanks, globalize, localize

# N tokens of this rank, K classes of a target, V vocabulary, v of them on this rank, D hidden

FSDP_HINT = (
    "If FSDP shards this weight, the loss must run while it is gathered: inside the forward of the module that owns it "
    "(flce_ops.LinearCrossEntropyHead does that), in a method named by register_fsdp_forward_method, or after "
    "module.unshard()."
)


def splits(placement: Placement) -> bool:
    """Whether this is a Shard, or the strided shard that results from flattening (B, T, D), sharded along T, to (B T,
    D).
    """
    return not (placement.is_replicate() or placement.is_partial())


# The distance between the seeds of ranks. It is so large that seeds that count steps do not collide, and 2^23 ranks fit
# an int64.
BETWEEN_RANKS = 0x9E3779B97F


@dataclass(eq=False)
class Layout(OneRank):
    """What each dimension of `mesh` shards. All tensors are DTensors on `mesh`, or plain tensors that are equal on all
    ranks.
    """

    mesh: DeviceMesh
    tokens: tuple[Placement, ...]  # for each mesh dimension: a shard of a token dimension, or Replicate
    vocabulary: tuple[bool, ...]  # for each mesh dimension: whether it shards the vocabulary

    def __post_init__(self) -> None:
        self.is_mesh = True
        shards = zip(self.mesh.shape, self.vocabulary)
        self.splits_vocabulary = any(ranks > 1 for ranks, shards_it in shards if shards_it)

    def placements(
        self, *, tokens: Placement | None = None, vocabulary: Placement | None = None
    ) -> tuple[Placement, ...]:
        """A placement for each mesh dimension: `tokens` if the dimension shards tokens, `vocabulary` if it shards the
        vocabulary, otherwise Replicate.
        """
        return tuple(
            (vocabulary if shards_vocabulary else tokens if splits(token) else None) or Replicate()
            for token, shards_vocabulary in zip(self.tokens, self.vocabulary)
        )

    @property
    def replicated(self) -> tuple[Placement, ...]:
        return (Replicate(),) * self.mesh.ndim

    def tokens_and(self, vocabulary: Placement) -> tuple[Placement, ...]:
        return tuple(vocabulary if shards else token for token, shards in zip(self.tokens, self.vocabulary))

    @property
    def part_of_tokens(self) -> tuple[Placement, ...]:
        """The placements of a number that must be summed over the ranks that share the tokens."""
        return self.placements(tokens=Partial())

    def sharing(self) -> dict[str, Any]:
        if not any(self.vocabulary):
            return {}
        dim = self.vocabulary.index(True)
        group = self.mesh.get_group(dim).group_name
        return {"group": group, "ranks": self.mesh.size(dim), "vocab_size": self.num_classes}

    def local(self, tensor: Tensor | None, placements: tuple[Placement, ...], **gradient: Any) -> Tensor | None:
        return localize(self.mesh, tensor, placements, **gradient)

    def rows(self, tensor: Tensor | None) -> Tensor | None:
        local = self.local(tensor, self.tokens, gradient=self.tokens_and(Partial()))
        if local is None:
            return None
        self.local_shape = local.shape[:-1]
        return local.reshape(math.prod(self.local_shape), local.shape[-1])

    def columns(self, tensor: Tensor) -> Tensor:
        local = cast(Tensor, self.local(tensor, self.tokens_and(Shard(tensor.dim() - 1))))
        self.local_shape = local.shape[:-1]
        return local

    def per_token(self, tensor: Tensor | None) -> Tensor | None:
        local, dims = self.local(tensor, self.tokens), len(self.shape)
        return None if local is None else local.reshape(math.prod(local.shape[:dims]), *local.shape[dims:])

    def per_class(self, tensor: Tensor | None) -> Tensor | None:
        """This rank's part of a tensor over classes. The gradient is Partial over the ranks among which tokens are
        sharded.
        """
        gradient = self.placements(tokens=Partial(), vocabulary=Shard(0))
        return self.local(tensor, self.placements(vocabulary=Shard(0)), gradient=gradient, keep_partial=True)

    def whole(self, tensor: Tensor | None) -> Tensor | None:
        return self.local(tensor, self.replicated)

    def number(self, tensor: Tensor | None) -> Tensor | None:
        return self.local(tensor, self.replicated, gradient=self.part_of_tokens)

    def beside_tokens(self, tensor: Tensor) -> Tensor:
        return tensor.redistribute(self.mesh, self.tokens) if isinstance(tensor, DTensor) else tensor

    def sum_over_tokens(self, part: Tensor) -> Tensor:
        """The sum of the parts of all ranks, such as a mean's denominator (math/token_weights_and_denominator.py)."""
        return SumOverRanks.apply(self.mesh, self.part_of_tokens, part).to_local()

    def quotient(self, loss: Tensor | None, total: Tensor, denominator: Tensor | None) -> DTensor:
        """The sums are added over all ranks before the division."""
        return SumOverRanks.apply(self.mesh, self.part_of_tokens, loss, total, denominator)

    def result(self, found: Tensor) -> DTensor:
        topk = found.shape[1:]
        local = found.reshape((*self.local_shape, *topk))
        return globalize(self.mesh, local, self.tokens, (*self.shape, *topk))

    def sparse(self, sparse: SparseGradient) -> SparseGradient:
        """The options with a seed of this rank's own, because a token's random numbers depend on the token's place
        among those of its rank.
        """
        if sparse.gradient_seed is None:
            return sparse
        part, coordinate = 0, self.mesh.get_coordinate()
        for dim, token in enumerate(self.tokens):
            if splits(token):
                part = part * self.mesh.size(dim) + coordinate[dim]
        return sparse._replace(gradient_seed=self.whole(sparse.gradient_seed) + part * BETWEEN_RANKS)

    def vocabulary_range(self, num_classes: int) -> tuple[int, int]:
        """This rank's (first class, number of classes). Ranks have ceil(V / ranks) classes; the last ones have fewer or
        none.
        """
        classes, coordinate = slice(0, num_classes), self.mesh.get_coordinate()
        for dim, shards_vocabulary in enumerate(self.vocabulary):
            if shards_vocabulary:
                classes = shards_of_classes(classes, self.mesh.size(dim))[coordinate[dim]]
        return classes.start, classes.stop - classes.start

    def vocabulary_shards(self, num_classes: int) -> list[slice]:
        """The classes of all ranks that share a token, in the order of their numbers (gather_shards)."""
        shards = [slice(0, num_classes)]
        for dim, shards_vocabulary in enumerate(self.vocabulary):
            if shards_vocabulary:
                shards = [part for classes in shards for part in shards_of_classes(classes, self.mesh.size(dim))]
        return shards

    def gather_shards(self, per_shard: Tensor) -> Tensor:  # (k, N) -> (R, k, N)
        """The rows of all shards of the vocabulary. Backward gives each rank its own row, without communication.

        Mesh dimensions that shard tokens are declared as Replicate here, so nothing moves along them.
        """
        placements = self.placements(vocabulary=Shard(0))
        return self.whole(DTensor.from_local(per_shard.unsqueeze(0), self.mesh, placements, run_check=False))


def layout_of_arguments(op: str, named: dict[str, Any]) -> Layout:
    """The layout of an entry operator's arguments, by name, some of which are DTensors."""
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if "logits" in tensors:
        layout, rows = layout_of_logits(op, **tensors), tensors["logits"]
    else:
        layout, rows = layout_of(op=op, **tensors), tensors["input"]
    check_member(op, layout.mesh)
    try:
        check_local_shapes(op, layout.mesh, tensors)
    except ValueError:
        check_ranks_agree(op, layout, tensors, refused=True)
        raise
    check_ranks_agree(op, layout, tensors)
    if "teacher_input" in named:
        teacher = named["teacher_input"], named["teacher_weight"]
        check_teacher_layout(op, layout, named["linear_weight"], *teacher)
    if "target" in tensors:
        check_plain_target(tensors["target"], rows, op)
    return layout


def layout_of(input: Tensor, linear_weight: Tensor, op: str, **others: Tensor | None) -> Layout:
    """The layout that input and linear_weight determine. `others` are tensors by name: DTensors on the same mesh, or
    plain tensors.
    """
    check_both_distributed(input, linear_weight, op)
    input, linear_weight = cast(DTensor, input), cast(DTensor, linear_weight)
    check_placements(linear_weight, op)
    check_dense_shards(op, input=input, linear_weight=linear_weight)
    if input.device_mesh != linear_weight.device_mesh:
        raise ValueError(
            f"{op}: input is {describe(input)}, but linear_weight is {describe(linear_weight)}; both must be on one "
            f"mesh: make input a DTensor on the weight's mesh, or the weight one on input's. {FSDP_HINT}"
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


def check_member(op: str, mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{op}: this process is not part of the mesh of the arguments, {mesh}; call it on the processes of the "
            "mesh only"
        )


def check_local_shapes(op: str, mesh: DeviceMesh, tensors: dict[str, Tensor]) -> None:
    """Checks, without communication, that this rank's part of each DTensor has the shape that the placements give this
    rank. Otherwise the loss would be that of other classes or tokens. Sizes that a traced graph learns when it runs are
    not compared.
    """
    coordinate = cast(list[int], mesh.get_coordinate())
    distributed, shape = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}, mesh.shape
    with torch.no_grad():  # so that autograd records nothing
        local_shapes = [tensor.to_local().shape for tensor in distributed.values()]
    for (name, tensor), local in zip(distributed.items(), local_shapes):
        expected = list(tensor.shape)
        for placement, ranks, rank in zip(tensor.placements, shape, coordinate):
            if splits(placement) and not isinstance(expected[dim := cast(Shard, placement).dim], SYMBOLIC):
                expected[dim] = size_of_shard(expected[dim], placement, ranks, rank)
        known = [sizes for sizes in zip(local, expected) if not isinstance(sizes[0] + sizes[1], SYMBOLIC)]
        if len(local) != len(expected) or any(size != of for size, of in known):
            raise ValueError(
                f"{op}: {name} is {describe(tensor)} and has shape {tuple(tensor.shape)}, of which the rank at "
                f"{tuple(coordinate)} holds {tuple(expected)}, but its local tensor has shape {tuple(local)}. Shards "
                "are those of torch.chunk, the last ones short or empty: make the DTensor with distribute_tensor, or "
                "give DTensor.from_local such shards, and the shape and stride of the whole"
            )


def size_of_shard(size: int, placement: Placement, ranks: int, rank: int) -> int:
    """How many of `size` rows `rank` has. A strided shard has a shard of each of split_factor pieces."""
    piece = cdiv(size, getattr(placement, "split_factor", 1)) or 1
    pieces, rest = divmod(size, piece)
    return pieces * size_of_chunk(piece, ranks, rank) + size_of_chunk(rest, ranks, rank)


def size_of_chunk(size: int, ranks: int, rank: int) -> int:
    rows = cdiv(size, ranks)
    return max(0, min(rows, size - rank * rows))


_agreed: set[tuple[DeviceMesh, int]] = set()  # meshes and numbers of classes that all ranks have told each other


def check_ranks_agree(op: str, layout: Layout, tensors: dict[str, Tensor], refused: bool = False) -> None:
    """Checks that the ranks that share a vocabulary take it for equally many classes, and that none has refused its
    local tensors. DTensor.from_local without a shape infers it from the rows of its own rank, so ranks with different
    numbers of rows each have a DTensor that is consistent in itself.

    Only an exchange tells. It takes place once for a mesh and a number of classes, in eager mode, and waits for the
    device. If the ranks differ, all of them raise an error.
    """
    name, dim = ("logits", -1) if "logits" in tensors else ("linear_weight", 0)
    whole, mesh = cast(DTensor, tensors[name]), layout.mesh
    num_classes = whole.shape[dim]
    if torch.compiler.is_compiling() or not any(layout.vocabulary) or (mesh, num_classes) in _agreed:
        return
    with torch.no_grad():  # so that autograd records nothing
        local = whole.to_local()
    traced = type(local) not in (Tensor, Parameter)  # fake, or functional, as AOTAutograd's are
    if traced or (local.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    for mesh_dim, shards in enumerate(layout.vocabulary):
        if shards:
            own = torch.tensor([0 if refused else num_classes], device=local.device)
            sizes = all_gather(own, mesh.get_group(mesh_dim).group_name, mesh.size(mesh_dim)).flatten().tolist()
            if refused:
                continue
            if 0 in sizes:
                raise ValueError(
                    f"{op}: the rank at {sizes.index(0)} of mesh dimension {mesh_dim} refuses its local tensors; its "
                    "error says which"
                )
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"{op}: {name} is {describe(whole)}, and its ranks take the vocabulary for {sizes} classes: their "
                    "local tensors have different numbers of classes. Give DTensor.from_local the shape and stride of "
                    "the whole, or use distribute_tensor"
                )
    if not refused:
        _agreed.add((mesh, num_classes))


def check_dense_shards(op: str, **tensors: DTensor | None) -> None:
    with torch.no_grad():  # so that autograd records nothing
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


def check_plain_target(target: Tensor, input: Tensor, op: str) -> None:
    """Checks that a plain target holds all tokens. A plain target with this rank's tokens only is refused, because it
    may be a mistake.
    """
    tokens = target.shape[: input.dim() - 1]  # K classes may follow as a dimension
    if isinstance(target, DTensor) or same_shape(tokens, input.shape[:-1]):
        return
    input = cast(DTensor, input)  # layout_of refuses plain tensors
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


def layout_of_logits(op: str, logits: Tensor, **others: Tensor | None) -> Layout:
    if not isinstance(logits, DTensor):
        raise ValueError(
            f"{op}: logits are a plain tensor, but another argument is a DTensor; pass that argument's to_local() (or "
            "full_tensor()), or make the logits a DTensor on its mesh"
        )
    check_same_mesh(logits, op, **others)
    tokens, vocabulary = [], []
    for placement in logits.placements:
        of_classes = splits(placement) and cast(Shard, placement).dim % logits.dim() == logits.dim() - 1
        if of_classes and type(placement) is not Shard:
            refuse_hole(op, "strided classes", layout=describe(logits))
        vocabulary.append(of_classes)
        tokens.append(placement if splits(placement) and not of_classes else Replicate())
    return Layout(logits.device_mesh, tuple(tokens), tuple(vocabulary))


def check_teacher_layout(
    op: str, layout: Layout, linear_weight: DTensor, teacher_input: Tensor | None, teacher_weight: Tensor | None
) -> None:
    if sum(layout.vocabulary) > 1:
        refuse_hole(op, "two dimensions of classes", layout=describe(linear_weight))
    expected = layout.placements(vocabulary=Shard(0))
    for name, tensor in (("teacher_input", teacher_input), ("teacher_weight", teacher_weight)):
        if tensor is not None and not isinstance(tensor, DTensor):
            raise ValueError(
                f"{op}: input and linear_weight are DTensors, but {name} is a plain tensor; make it a DTensor on the "
                "same mesh: distribute_tensor(teacher_weight, mesh, linear_weight.placements), and "
                "DTensor.from_local(teacher_input, mesh, input.placements)"
            )
    teacher_input, teacher_weight = cast(DTensor | None, teacher_input), cast(DTensor | None, teacher_weight)
    check_dense_shards(op, teacher_input=teacher_input, teacher_weight=teacher_weight)
    if teacher_weight is not None and tuple(teacher_weight.placements) != expected:
        raise ValueError(
            f"{op}: linear_weight is {describe(linear_weight)}, but teacher_weight is {describe(teacher_weight)}; "
            f"they must be laid out alike: teacher_weight.redistribute(mesh, {list(expected)})"
        )


def accuracy_and_top1(argmax: DTensor, target: Tensor, ignore_index: int) -> tuple[DTensor, DTensor]:  # (), (...)
    """The accuracy is over all ranks' tokens, and the same on every rank. If tokens are sharded, it takes one
    all_reduce of two counts.
    """
    mesh, tokens = argmax.device_mesh, argmax.placements
    own = localize(mesh, target, tokens)
    is_top1 = target_is_argmax(argmax.to_local(), own, ignore_index)
    counts = count_right_and_valid(is_top1, own, ignore_index)
    partial = tuple(Partial() if splits(placement) else Replicate() for placement in tokens)
    accuracy = accuracy_of(SumOverRanks.apply(mesh, partial, counts).to_local())
    accuracy = globalize(mesh, accuracy, (Replicate(),) * mesh.ndim, ())
    return accuracy, globalize(mesh, is_top1, tokens, argmax.shape)
