"""A case's tensors, and the graph from its leaves to the function's arguments, which this package and the oracle share.

Problem.bases     name -> values in their memory layout, on the CPU first, then on the case's device
    leaves(dtype)     new tensors of these values; those of `wanted` require a gradient
    arguments(leaves) what the function is given: views of leaves, and tensors made from other arguments
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.cases import Case

# N tokens, K classes of a target, D hidden, V vocabulary, E hidden of the teacher

Tensors = dict[str, Tensor]
View = Callable[[Tensor], Tensor]

LOG_RATIOS = (-0.7, -0.15, 0.12, 0.6, 1.6)  # of a policy; none is near the logarithm of a bound
LOGITS = {"large": 100.0, "huge": 2000.0}  # the largest magnitude


class Problem:
    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = device  # "interpreter" is the CPU
        self.torch_device = "cuda" if device == "cuda" else "cpu"
        self.dtype = getattr(torch, case.dtype)
        plain = {"function": "cross_entropy", "sparse": "", "class_order": False, "main_grad": "", "metrics": ()}
        self.first_call = replace(case, reduction="none", token_weight="", normalizer="", **plain)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.bases: Tensors = {}
        self.views: dict[str, View] = {}
        self.make_values()
        absent = set(self.unused())
        self.bases = {name: base.to(self.torch_device) for name, base in self.bases.items() if name not in absent}
        floating = [name for name, base in self.bases.items() if base.is_floating_point()]
        self.wanted = [name for name in (*case.wants, "learnt") if name in floating]
        if not self.wanted:  # there may be no bias or token weights that could need a gradient
            self.wanted = [name for name in ("input", "weight") if name in floating]
        for name in self.wanted:
            self.bases[f"projection of {name}"] = self.eighths(self.leaf_shape(name)).to(self.torch_device)

    def with_bases(self, bases: Tensors) -> "Problem":
        other = copy(self)
        other.bases = bases
        return other

    def arithmetic_dtype(self) -> torch.dtype:
        return getattr(torch, self.case.autocast) if self.case.autocast and self.case.dtype != "float64" else self.dtype

    # --- values ---

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def eighths(self, shape: tuple[int, ...]) -> Tensor:
        """Numbers in [-1, 1] that are exact in every dtype."""
        return torch.randint(-8, 9, shape, generator=self.generator) / 8.0

    def make_values(self) -> None:
        case, N, D, V = self.case, self.case.count, self.case.D, self.case.V
        input, weight = self.head(N, D, V)
        tokens = case.tokens
        target = self.targets(input, weight).to(torch.int32 if case.int32 else torch.int64)
        self.put("target", target.reshape((*tokens, *target.shape[1:])), case.vector_layout, None, of_tokens=True)
        target = self.views["target"](self.bases["target"])  # an expanded target differs from the drawn one
        if case.topk:
            self.make_topk(target)
        ignored = ~valid_tokens(case, target)
        target, ignored = scored_target(case, target), ignored.reshape(N)
        if case.poison:
            input[ignored] = float(case.poison)
        self.put("input", input.reshape(*tokens, D), case.input_layout, self.input_dtype(), of_tokens=True)
        self.put("weight", weight, case.weight_layout, self.dtype)
        small = torch.float64 if self.dtype == torch.float64 else torch.float32
        vector_dtype = small if case.seed % 2 else self.dtype
        if case.bias and case.bias != "made":
            bias = self.normal(V) * (20.0 if case.bias == "large" else 0.5)
            if case.bias == "-inf":
                off = self.uniform(V) < 0.5
                off[target.clamp(0, V - 1).flatten()] = False
                bias[off] = -math.inf
            self.put("bias", bias, case.vector_layout if case.bias != "-inf" else "rows", self.dtype)
        if case.class_weight and case.class_weight != "made":
            values = self.uniform(V) + 0.25
            if case.class_weight == "large":
                values = 50.0 + 950.0 * self.uniform(V)
            elif case.class_weight != "uniform":
                values[self.uniform(V) < (0.5 if case.class_weight == "some zero" else 1.1)] = 0.0
            self.put("class_weight", values, case.vector_layout, vector_dtype)
        if case.token_weight and case.token_weight != "made":
            values = self.uniform(*tokens) * 2.0
            if case.token_weight == "signed":
                values = values - 0.5
            elif case.token_weight == "some zero":
                values = torch.where(self.uniform(*tokens) < 0.5, 0.0, values)
            self.put("token_weight", values, case.vector_layout, vector_dtype, of_tokens=True)
        if case.normalizer in ("tensor", "count"):
            value = torch.tensor(37.5) if case.normalizer == "tensor" else torch.tensor(41)
            self.put("normalizer", value, "rows", vector_dtype if case.normalizer == "tensor" else None)
        if case.function == "kl_div":
            self.make_teacher(input, weight)
        if case.sparse:
            self.put("gradient_seed", torch.tensor(case.seed), "rows", None)
        if case.class_order:
            self.put("class_order", torch.randperm(case.V, generator=self.generator), "rows", None)
        if case.main_grad:
            self.put("main_grad", self.eighths((V, D)), "rows", small if case.main_grad == "sums" else self.dtype)
        if case.learnt:
            self.put("learnt", torch.tensor(float(getattr(case, case.learnt))), "rows", small)
        self.bases["ids"] = torch.randint(V, tokens, generator=self.generator)
        for name in ("loss", "log_probs", "lse", "entropy", "tail"):
            shape = tokens if case.reduction == "none" else ()
            if case.topk and name == "log_probs":
                shape = (*tokens, case.topk)
            values = self.eighths(shape) if case.cotangent != "ones" else torch.ones(shape)
            if case.cotangent == "nan where ignored" and shape and shape == tokens:
                values = values.masked_fill(ignored.reshape(tokens), math.nan)
            self.bases[f"cotangent of {name}"] = values
        if case.function == "policy":
            self.make_policy(ignored)
        if case.function == "token_loss":
            values = self.normal(*tokens, *([case.topk] if case.topk else []))
            if case.poison:
                values[ignored.reshape(tokens)] = math.nan
            self.put(
                "a", values, "rows", torch.float64 if self.dtype == torch.float64 else torch.float32, of_tokens=True
            )

    def head(self, N: int, D: int, V: int) -> tuple[Tensor, Tensor]:
        """Hidden states and weight; "zipf": feature 0 carries a prior over the classes, as in a trained model."""
        case = self.case
        input, weight = self.normal(N, D), self.normal(V, D) * (1.5 / math.sqrt(D))
        if case.data in ("zipf", "large", "huge"):
            input[:, 0] = 1.0
            weight[:, 0] = -torch.log1p(torch.randperm(V, generator=self.generator).float())
        if case.data in LOGITS and N:
            input *= LOGITS[case.data] / (input @ weight.T).abs().max().clamp(min=1e-3)
        elif case.data == "tiny":
            input, weight = input * 1e-3, weight * 1e-2
        elif case.data == "shifted":  # all logits of a row are near one large number
            common = self.normal(D)
            input, weight = input + 3.0 * common, weight + 3.0 * common
        return input.to(self.dtype).float(), weight.to(self.dtype).float()

    def targets(self, input: Tensor, weight: Tensor) -> Tensor:  # (N,)
        case, N, V = self.case, self.case.count, self.case.V
        if case.topk:  # a token may name a class twice
            target = torch.randint(V, (N, case.topk), generator=self.generator)
            target[self.uniform(N, case.topk) < 0.15] = case.ignore_index
        elif case.targets == "uniform":
            target = torch.randint(V, (N,), generator=self.generator)
        elif case.targets == "one class":
            target = torch.full((N,), V // 3)
        else:
            logits = input @ weight.T
            if case.targets == "likely":  # drawn from the softmax, by the Gumbel trick
                logits = logits - torch.log(-torch.log(self.uniform(N, V).clamp(1e-20, 1 - 1e-7)))
            target = logits.nan_to_num(0.0).argmax(1)
        target[self.uniform(N) < case.ignored] = case.ignore_index
        return target

    def make_topk(self, target: Tensor) -> None:  # (..., K)
        """Weights whose sum is not 1, some of them 0, and entries that must not be read."""
        weight = self.uniform(*target.shape) * (self.uniform(*target.shape[:-1], 1) + 0.1)
        weight[self.uniform(*target.shape) < 0.1] = 0.0
        weight[target == self.case.ignore_index] = math.nan
        dtype = self.dtype if self.case.seed % 3 else torch.float32
        self.put("target_weight", weight, "rows", dtype, of_tokens=self.case.function != "log_probs")

    def make_policy(self, ignored: Tensor) -> None:  # (N,)
        """Old log-probabilities on all sides of the bounds, relative to those of this head."""
        case, tokens = self.case, self.case.tokens
        at = {name: self.views[name](base) for name, base in self.bases.items() if name in self.views}
        operands = [at[name].double() if name in at else None for name in ("input", "weight", "bias")]
        z = softcapped(case, F.linear(*operands))
        classes = torch.where(at["target"] == case.ignore_index, 0, at["target"]).long().unsqueeze(-1)
        log_p = z.log_softmax(-1).gather(-1, classes).squeeze(-1).detach().nan_to_num(0.0)
        ratios = torch.tensor(LOG_RATIOS)[torch.randint(len(LOG_RATIOS), tokens, generator=self.generator)]
        made = {"advantages": self.normal(*tokens), "old_log_probs": log_p - ratios + 0.01 * self.normal(*tokens)}
        made["ref_log_probs"] = log_p + 0.5 * self.normal(*tokens)
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        for name, values in made.items():
            values = values.masked_fill(ignored.reshape(tokens), math.nan) if case.poison else values
            self.put(name, values, case.vector_layout if name == "advantages" else "rows", dtype, of_tokens=True)
        unused = ["old_log_probs"] * case.on_policy + ["ref_log_probs"] * (not case.kl_factor)
        for name in unused:
            del self.bases[name], self.views[name]

    def make_teacher(self, input: Tensor, weight: Tensor) -> None:
        case, N, E, V = self.case, self.case.count, self.case.E, self.case.V
        dtype = self.dtype
        if case.teacher == "student":
            return
        if case.teacher == "near":
            teacher_input = input.nan_to_num(0.0, 0.0, 0.0)
            teacher_weight = weight * (1.0 + 0.02 * self.normal(*weight.shape))
        else:
            teacher_input, teacher_weight = self.normal(N, E), self.normal(V, E) * (1.5 / math.sqrt(E))
        if "probs" in case.teacher:
            probs = (teacher_input @ teacher_weight.T).double().softmax(-1)
            if case.teacher == "sparse probs":
                probs = torch.where(probs >= probs.topk(min(3, V), 1).values[:, -1:], probs, 0.0)
            self.put("teacher_probs", probs.reshape(*case.tokens, V), case.weight_layout, dtype, of_tokens=True)
            return
        self.put(
            "teacher_input",
            teacher_input.reshape(*case.tokens, teacher_input.shape[1]),
            case.weight_layout,
            dtype,
            of_tokens=True,
        )
        self.put("teacher_weight", teacher_weight, case.input_layout, dtype)

    def input_dtype(self) -> torch.dtype:
        return self.arithmetic_dtype() if self.case.half_input else self.dtype

    # --- memory ---

    def put(self, name: str, values: Tensor, layout: str, dtype: torch.dtype | None, of_tokens: bool = False) -> None:
        """Stores `values` as bases[name]. views[name] makes what the function is given."""
        values = values if dtype is None else values.to(dtype)
        turn = of_tokens and self.case.transposed_tokens and len(self.case.tokens) > 1
        base, view = lay(values.transpose(0, 1) if turn else values, layout)
        self.bases[name] = base
        self.views[name] = (lambda base: view(base).transpose(0, 1)) if turn else view

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        base = self.bases[name]
        return tuple(base.shape if self.is_view(name) else self.views[name](base).shape)

    def is_view(self, name: str) -> bool:
        return name in self.case.views

    # --- the graph ---

    def unused(self) -> list[str]:
        made = {"tied": "input", "same": "input"}
        names = [leaf for relation, leaf in made.items() if relation in self.case.relations]
        return names + ([] if "tied" in self.case.relations else ["ids"])

    def leaves(self, dtype: torch.dtype | None = None) -> Tensors:
        """The leaves by name, also constants; in `dtype` if one is given."""
        leaves = {}
        for name, base in self.bases.items():
            to = dtype if dtype is not None and base.is_floating_point() else base.dtype
            leaf = base.to(to, copy=True)
            if name in self.wanted and not self.is_view(name):
                leaf = self.views[name](leaf)
            leaves[name] = leaf.requires_grad_(name in self.wanted)
        return leaves

    def arguments(self, leaves: Tensors) -> Tensors:
        case, relations = self.case, self.case.relations
        at = {}
        for name, leaf in leaves.items():
            unviewed = name in self.views and (self.is_view(name) or name not in self.wanted)
            at[name] = self.views[name](leaf) if unviewed else leaf
        if "inner weight" in relations:
            at["weight"] = torch.tanh(at["weight"])
        weight = at["weight"]
        if "tied" in relations:
            ids = at["ids"]  # flattened, because torch traces a 0-d index as a number that depends on data
            at["input"] = torch.tanh(weight[ids.flatten()]).view(*ids.shape, weight.shape[1])
        elif "same" in relations:
            at["input"] = weight
        if "trunk" in relations:
            hidden = at["input"].to(weight.dtype)
            at["input"] = hidden + torch.tanh(hidden @ weight.T) @ weight / case.V
        # contiguous, because torch's fake tensors give the result of an indexing by a transposed tensor other strides
        classes = torch.where(at["target"] == case.ignore_index, 0, at["target"]).long().contiguous()
        classes = classes[..., 0] if case.topk else classes
        if "bias of weight" in relations:
            at["bias"] = 0.3 * weight.sum(1)
        if "class_weight of weight" in relations:
            at["class_weight"] = weight.detach().abs().sum(1) + 0.1
        if "token_weight of weight" in relations:
            at["token_weight"] = torch.sigmoid(accumulated(weight).sum(1))[classes]
        if "token_weight of input" in relations:
            at["token_weight"] = torch.sigmoid(accumulated(at["input"]).sum(-1))
        if "normalizer of token_weight" in relations and "token_weight" in at:
            at["normalizer"] = accumulated(at["token_weight"]).abs().sum() + 1.0
        elif case.normalizer == "made":
            at["normalizer"] = accumulated(at["input"]).square().mean(-1).sum() + 1.0
        if case.teacher == "student" and case.function == "kl_div":
            at["teacher_input"], at["teacher_weight"] = at["input"].detach().roll(1, 0), weight.detach()
        return at


def softcapped(case: Case, u: Tensor) -> Tensor:
    """Logits after scale, cap and temperature."""
    z = case.logit_scale * u
    return (z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)) / case.temperature


def scored_target(case: Case, labels: Tensor) -> Tensor:
    """The target of each position; with `shift` the label of the next one."""
    return F.pad(labels, (0, 1), value=case.ignore_index)[..., 1:] if case.shift else labels


def valid_tokens(case: Case, labels: Tensor) -> Tensor:  # (...) bool
    counts = scored_target(case, labels) != case.ignore_index
    return counts.any(-1) if case.topk else counts


def accumulated(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def lay(values: Tensor, layout: str) -> tuple[Tensor, View]:
    """A tensor that holds `values` in this layout, with filler between them that must not be read, and its view."""
    # on a CPU, torch's own products of half operands multiply by 0 what lies between the rows
    filler = (math.nan if values.dtype.itemsize > 2 else 1000.0) if values.is_floating_point() else -7
    shape = values.shape
    if values.dim() == 0 or layout == "rows" or values.numel() == 0:
        return values.contiguous(), lambda base: base
    if layout == "columns":
        order = tuple(reversed(range(values.dim())))
        return values.permute(order).contiguous(), lambda base: base.permute(order)
    if layout == "both strides":
        base = values.new_full((2 * shape[0], *shape[1:-1], *([2 * shape[-1]] if len(shape) > 1 else [])), filler)
        view = (lambda base: base[::2, ..., 1::2]) if len(shape) > 1 else (lambda base: base[::2])
        view(base).copy_(values)
        return base, view
    if layout == "wide rows":
        base = values.new_full((*shape[:-1], shape[-1] + 3), filler)
        base[..., 1:-2] = values
        return base, lambda base: base[..., 1:-2]
    if layout == "offset":
        base = values.new_full((values.numel() + 1,), filler)
        base[1:] = values.reshape(-1)
        return base, lambda base: base[1:].view(shape)
    one = values[:1] if layout == "repeated" or len(shape) == 1 else values[..., :1]
    return one.contiguous(), lambda base: base.expand(shape)
