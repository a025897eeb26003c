"""The object that a model's forward has in place of its logits.

    logits = self.lm_head(hidden)                 Logits(hidden)
    logits = logits.float() / self.scale          the same hidden states, steps: float, divide by scale
    shifted = logits[..., :-1, :].contiguous()    hidden[..., :-1, :], with the same steps
    F.cross_entropy(shifted.view(-1, V), labels)  self.lm_head(shifted hidden, target=labels, loss=Loss(steps, ...))

The model's own code runs, so nobody has to know it. What selects tokens is done to the hidden states. What scales, caps
or shifts logits is written down as a step, and the head does it in its loss (loss.py). Shape, dtype and device need
no logits. Everything else raises NotImplementedError, so no transformation is lost.

`logits *= scale` changes the object. Other Logits of the same memory, its views, are then out of date, and their use
raises.
"""

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .loss import Loss, Step
from .output_metrics import Metrics

# D hidden, V vocabulary

ADVICE = "leave the model unpatched"


class Call:
    """What logits know of the call of a model that makes them."""

    def __init__(self, model: str, metrics: Sequence[str] = (), label_smoothing=0.0, gradient_threshold=0.0) -> None:
        self.model, self.metrics = model, Metrics(metrics)
        self.label_smoothing, self.gradient_threshold = label_smoothing, gradient_threshold
        self.losses = 0  # computed so far


class Logits:
    """Logits (..., V) of `head`, which are not computed."""

    def __init__(
        self,
        head: Callable,
        hidden: Tensor,  # (..., D)
        shape: tuple[int, ...],  # (..., V), with as many tokens as hidden
        call: Call,
        dtype: torch.dtype,
        steps: tuple[Step, ...] = (),
        made_by: tuple[Any, ...] | None = None,  # (other logits, function, arguments), to compute these
        memory: list[int] | None = None,  # shared with the logits that these are a view of: the changes in place so far
    ) -> None:
        self.head, self.hidden, self.shape, self.call = head, hidden, shape, call
        self.dtype, self.steps, self.made_by = dtype, steps, made_by
        self.memory = [0] if memory is None else memory
        self.seen = self.memory[0]

    device = property(lambda self: self.hidden.device)
    ndim = property(lambda self: len(self.shape))
    requires_grad = property(lambda self: torch.is_grad_enabled())

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def compute(self) -> Tensor:
        """The logits, by the operations of the model."""
        self.check_up_to_date()
        if self.made_by is None:
            return self.head(self.hidden)
        other, function, args = self.made_by
        return function(other.compute(), *args)

    # ------------------------------------------------------------ the same numbers in another form

    def float(self) -> "Logits":
        memory = self.memory if self.dtype == torch.float32 else None
        return self.changed(torch.Tensor.float, (), dtype=torch.float32, memory=memory)

    def to(self, *args: Any, **options: Any) -> "Logits":  # the operator computes in float32 on the head's device
        dtype = self.dtype
        for value in (*args, *options.values()):
            if isinstance(value, (Tensor, torch.dtype)):
                dtype = value.dtype if isinstance(value, Tensor) else value
        if not dtype.is_floating_point:
            self.refuse(f"a cast to {dtype}")
        memory = self.memory if self.dtype == dtype else None
        return self.changed(lambda logits: logits.to(*args, **options), (), dtype=dtype, memory=memory)

    def contiguous(self) -> "Logits":
        return self

    def view(self, *sizes: Any) -> "Logits":
        sizes = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
        rows, classes = prod(self.shape[:-1]), self.shape[-1]
        if -1 in sizes:
            known = -prod(sizes)
            sizes = tuple(rows * classes // known if size == -1 else size for size in sizes)
        if sizes[-1] != classes or prod(sizes[:-1]) != rows:
            raise ValueError(
                f"{self.call.model}: expected the head to have the {sizes[-1]} classes of the model's vocab_size, got "
                f"logits of shape {tuple(self.shape)}; resize with model.resize_token_embeddings"
            )
        return self.changed(torch.Tensor.reshape, (sizes,), shape=sizes, memory=self.memory)

    reshape = view

    def changed(self, function: Callable, args: tuple, **changes: Any) -> "Logits":
        self.check_up_to_date()
        kept: dict[str, Any] = {
            "hidden": self.hidden,
            "shape": self.shape,
            "dtype": self.dtype,
            "steps": self.steps,
        } | changes
        # as they are before a later change in place
        before = Logits(self.head, self.hidden, self.shape, self.call, self.dtype, self.steps, self.made_by)
        return Logits(self.head, call=self.call, made_by=(before, function, args), **kept)

    def check_up_to_date(self) -> None:
        if self.seen != self.memory[0]:
            self.refuse("logits that share memory with others, which were changed in place")

    # ------------------------------------------------------------ a part of the tokens, or the first classes

    def __getitem__(self, index: Any) -> "Logits":
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(part is None for part in parts):
            self.refuse("an index with None")
        ellipsis = [at for at, part in enumerate(parts) if part is ...]
        taken = sum(part.dim() if is_mask(part) else 1 for part in parts if part is not ...)
        of_classes: Any = slice(None)
        of_rows = [*parts] if ellipsis else [*parts, ...]
        if (ellipsis and ellipsis[0] < len(parts) - 1) or taken == self.ndim:  # the last part is that of the classes
            of_classes = parts[-1]
            of_rows = [*parts[:-1], slice(None)]
        if not isinstance(of_classes, slice) or of_classes.start not in (None, 0) or of_classes.step not in (None, 1):
            self.refuse("an index of classes")
        hidden = self.hidden.reshape(*self.shape[:-1], self.hidden.shape[-1])[tuple(of_rows)]
        classes, steps = self.shape[-1], self.steps
        if of_classes.stop is not None:
            classes = len(range(classes)[of_classes])
            steps = (*steps, ("first_classes", (classes,)))
        shape = (*hidden.shape[:-1], classes)
        return self.changed(operator.getitem, (index,), hidden=hidden, shape=shape, steps=steps, memory=self.memory)

    # ------------------------------------------------------------ steps between head and loss

    def step(self, name: str, *args: Any) -> "Logits":
        return self.changed(OPERATIONS[name], args, steps=(*self.steps, (name, args)))

    def __mul__(self, other: Any) -> "Logits":
        return self.step("multiply", other)

    def __truediv__(self, other: Any) -> "Logits":
        return self.step("divide", other)

    def __add__(self, other: Any) -> "Logits":
        return self.step("add", other)

    __rmul__, __radd__ = __mul__, __add__

    def become(self, changed: "Logits") -> "Logits":
        self.memory[0] += 1
        self.seen, self.steps, self.made_by = self.memory[0], changed.steps, changed.made_by
        return self

    def __imul__(self, other: Any) -> "Logits":
        return self.become(self * other)

    def __itruediv__(self, other: Any) -> "Logits":
        return self.become(self / other)

    def __iadd__(self, other: Any) -> "Logits":
        return self.become(self + other)

    def tanh(self) -> "Logits":
        return self.step("tanh")

    # ------------------------------------------------------------ the loss

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,  # type: ignore[valid-type]
        *,
        normalizer: Tensor | int | None = None,
    ) -> Tensor:
        """Same as F.cross_entropy of the logits and `target`, with one label for each token."""
        self.check_up_to_date()
        if size_average is not None or reduce is not None or target.is_floating_point():
            self.refuse("a cross-entropy with size_average, reduce or probabilities as targets")
        if target.numel() != prod(self.shape[:-1]):
            raise ValueError(
                f"{self.call.model}: expected a label for each of the {prod(self.shape[:-1])} positions that "
                f"logits_to_keep leaves, got {target.numel()}"
            )
        count = normalizer
        if isinstance(count, Tensor):
            normalizer = count.to(self.device).reshape(())
        options = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "normalizer": normalizer,
            "label_smoothing": label_smoothing or self.call.label_smoothing,
            "weight": weight,
        }
        loss = Loss(self.steps, self.shape[-1], self.call.metrics, self.call.gradient_threshold, options)
        labels = target.reshape(self.hidden.shape[:-1]).to(self.device)
        # by name, because hooks of tensor parallelism drop all positional arguments but the first
        found = self.head(self.hidden, target=labels, loss=loss)
        if found.shape != (labels.shape if reduction == "none" else ()):
            raise RuntimeError(
                f"{self.call.model}: expected its head to return a loss of shape (), got {tuple(found.shape)}: "
                f"something around its forward drops the targets; {ADVICE}"
            )
        self.call.losses += 1
        if reduction == "none":
            return found.reshape(target.shape)
        return found.reshape(count.shape) if isinstance(count, Tensor) else found

    def __eq__(self, other: object) -> NoReturn:
        self.refuse("`==`")

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f"`{name}`")

    def refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{self.call.model}: its forward uses its logits for something that flce_ops cannot do without them: "
            f"{what}; {ADVICE}"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        first = args[0] if args else options.pop("input", None)
        if isinstance(first, Logits):
            name = METHODS.get(func)
            if name is None or (options and name in ("__mul__", "__add__", "__truediv__")):
                first.refuse(f"`{getattr(func, '__name__', func)}`")
            return getattr(first, name)(*args[1:], **options)
        values = (*args, *options.values(), *(first if isinstance(first, list | tuple) else ()))  # torch.cat has a list
        second = next(value for value in values if isinstance(value, Logits))
        name = METHODS.get(func)
        if name not in ("__mul__", "__add__") or len(args) != 2 or options:
            second.refuse(f"`{getattr(func, '__name__', func)}`")
        return getattr(second, name)(first)


OPERATIONS: dict[str, Callable] = {
    "multiply": operator.mul,
    "divide": operator.truediv,
    "add": operator.add,
    "tanh": torch.tanh,
}

REFUSED = "sub rsub isub neg pow rpow ipow rtruediv matmul rmatmul floordiv rfloordiv mod rmod abs invert"
REFUSED += " lt le gt ge ne bool float int contains setitem delitem"


def refused(name: str) -> Callable:
    return lambda self, *args: self.refuse(f"`__{name}__`")


for each in REFUSED.split():  # Python looks operators up in the class, not by __getattr__
    setattr(Logits, f"__{each}__", refused(each))

METHODS: dict[Any, str] = {
    **dict.fromkeys((torch.tanh, F.tanh, torch.Tensor.tanh), "tanh"),
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), "__mul__"),
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), "__add__"),
    **dict.fromkeys((torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.__truediv__), "__truediv__"),
    torch.reshape: "view",
    F.cross_entropy: "cross_entropy",
}


def is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool
