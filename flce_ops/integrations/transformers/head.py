"""The modules that make a model's logits. Their forward returns the loss when it gets targets.

    nn.Linear                     its input and weight
    a container of a head         its own forward, on a stand-in whose head returns Logits: masked models
    PEFT's layers, other heads    their own forward, with F.linear written down (loss.py)

The loss runs inside the forward of the module that owns the weight. So libraries that gather parameters around a
module's forward (FSDP, ZeRO-3, accelerate) gather them for the loss, too.

A stand-in is another object with the attributes of a module, not a copy: what its code sets is set on the module. Only
its class differs, in which the head is a Recorder. So a forward may call super(), or pass self on.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ...entry.rewrites import next_labels
from .instance_forward import BoundForward, is_replaced, replace_forward
from .logits import ADVICE, Call, Logits
from .loss import Affine, Hidden, Loss

# D hidden, V vocabulary

STAND_IN = "_flce_stand_in"  # attribute of a model or container of a head: a StandIn
CLASSES: dict[tuple[type, str], type] = {}  # of stand-ins made so far
STAND_INS: weakref.WeakSet["StandIn"] = weakref.WeakSet()  # of the models and containers that are alive


def head_or_loss(
    self: nn.Module,
    input: Tensor,  # (..., D)
    *args: Any,
    target: Tensor | None = None,  # (...)
    loss: Loss | None = None,
    **kwargs: Any,
) -> Tensor:  # logits (..., V), or the loss
    if target is None:
        return type(self).forward(self, input, *args, **kwargs)
    if args or kwargs:
        raise NotImplementedError(
            f"expected the output embedding to be called with hidden states alone, got {[*args, *kwargs]} too; {ADVICE}"
        )
    loss = cast(Loss, loss)
    if is_linear(self):
        return loss.of(Affine(input, cast(Tensor, self.weight), cast(Tensor | None, self.bias)), target)
    cause: Exception | None = None
    if STAND_IN in self.__dict__:
        inner = type(self).forward(self.__dict__[STAND_IN].stand_in, input)
        if isinstance(inner, Logits):
            return inner.head(inner.hidden, target=target, loss=loss.after(inner.steps))
    else:
        try:
            found = type(self).forward(self, Hidden(input))
        except (AttributeError, TypeError) as error:  # of what only a tensor has
            found, cause = None, error
        if isinstance(found, Affine):
            return loss.of(found, target)
    raise NotImplementedError(
        f"expected the output embedding to be an nn.Linear, or to end in one, got {type(self).__module__}."
        f"{type(self).__qualname__}, whose result is not input @ weight.T + bias; {ADVICE}"
    ) from cause


head_or_loss.flce_original = nn.Module.forward  # type: ignore[attr-defined]


def forward_of_head(module: nn.Module) -> BoundForward:
    """The new forward of a head. While pickle loads the head, it may still be empty."""
    return BoundForward(head_or_loss, module, forward_of_head)


# ---------------------------------------------------------------- which modules


@torch.compiler.disable(reason="a patched class finds a model's head at its first loss, which must run in eager mode")
def find_head(model: PreTrainedModel) -> None:
    """Notes in the model and in its containers where the head is."""
    head = model.get_output_embeddings()
    if head is None:
        head = getattr(model, "lm_head", None)
    path = next((name for name, module in model.named_modules() if module is head), None)
    if path is None:
        raise NotImplementedError(f"{type(model).__name__}: expected an output embedding, got {head!r}; {ADVICE}")
    note_inner(model, path.split("."))


def note_inner(module: nn.Module, path: list[str]) -> None:
    if path and is_wrapper_of_peft(module):
        for copy in copies_in(module):
            note_inner(copy, path[1 if path[0] == "original_module" else 2 :])
    elif path:
        module.__dict__[STAND_IN] = StandIn(module, path[0])
        note_inner(getattr(module, path[0]), path[1:])


def makers_of_logits(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and the modules in it that compute its logits, from the outside in."""
    yield module
    if is_wrapper_of_peft(module):
        for copy in copies_in(module):
            yield from makers_of_logits(copy)
    elif STAND_IN in module.__dict__:
        yield from makers_of_logits(getattr(module, module.__dict__[STAND_IN].name))


def modules_that_see_logits(model: nn.Module) -> Iterator[nn.Module]:
    for module in list(makers_of_logits(model))[1:]:
        inside = STAND_IN in module.__dict__ or is_wrapper_of_peft(module)
        yield from [module] if inside else module.modules()


def is_linear(head: nn.Module) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def is_wrapper_of_peft(head: nn.Module) -> bool:
    """Whether this is PEFT's wrapper of a head that is trained whole, which holds copies of the head."""
    peft = sys.modules.get("peft.utils.other")
    return peft is not None and isinstance(head, peft.ModulesToSaveWrapper)


def copies_in(wrapper: nn.Module) -> list[nn.Module]:
    return [cast(nn.Module, wrapper.original_module), *cast(nn.ModuleDict, wrapper.modules_to_save).values()]


def prepare_head(module: nn.Module) -> None:
    if not is_wrapper_of_peft(module) and not is_replaced(module):
        replace_forward(module, forward_of_head(module))


def classes_of(head: nn.Module) -> int:
    innermost = list(makers_of_logits(head))[-1]
    for module in innermost.modules():
        if isinstance(module, nn.Linear):
            # a sharded weight has fewer rows, and one that is tied to a longer embedding has more
            return max(module.out_features, module.weight.shape[0] if module.weight.dim() == 2 else 0)
    raise NotImplementedError(f"expected the output embedding to be an nn.Linear, got {innermost!r}; {ADVICE}")


# ---------------------------------------------------------------- stand-ins


class StandIn(threading.local):
    """Holds the stand-in of a module, one for each thread. Copies and pickles make the stand-in of the copy."""

    def __init__(self, module: nn.Module, name: str) -> None:
        """name: of the child of `module` that makes the logits. While pickle loads the module, it may be empty."""
        self.module, self.name = module, name
        self.call: Call | None = None  # while the forward of a model runs without logits
        key = type(module), name
        if key not in CLASSES:
            CLASSES[key] = class_of_stand_in(*key)
        self.stand_in: Any = object.__new__(CLASSES[key])
        object.__setattr__(self.stand_in, "__dict__", module.__dict__)
        STAND_INS.add(self)

    def __reduce__(self) -> tuple:
        return StandIn, (self.module, self.name)


def class_of_stand_in(cls: type, name: str) -> type:
    def inner(self: Any) -> Any:
        child, call = self._modules[name], self.__dict__[STAND_IN].call or Call(cls.__name__)
        return InnerModel(child, call) if isinstance(child, PreTrainedModel) else Recorder(child, call)

    given_by_class = getattr(cls, "loss_function", None)
    getter: Any = given_by_class.fget if isinstance(given_by_class, property) else None

    def loss_function(self: Any) -> Any:
        given = getter(self)
        return functools.partial(loss_of_logits, given) if given in (ForCausalLMLoss, ForMaskedLMLoss) else given

    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, name: property(inner)}
    if getter is not None:
        names["loss_function"] = property(loss_function)
    return type(cls.__name__, (cls,), names)


def loss_of_logits(
    given: Any,
    logits: Any,
    labels: Tensor,  # (B, T)
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,  # (B, T)
    **kwargs: Any,
) -> Tensor:  # ()
    """Same as `given`, Transformers' ForCausalLMLoss or ForMaskedLMLoss. Divides by num_items_in_batch inside."""
    if not isinstance(logits, Logits):
        return given(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs)
    target = labels
    if given is ForCausalLMLoss:
        target = next_labels(labels, ignore_index) if shift_labels is None else shift_labels
    return logits.view(-1, vocab_size).cross_entropy(target, ignore_index=ignore_index, normalizer=num_items_in_batch)


class Recorder:
    """A head while the forward around it runs: returns Logits."""

    def __init__(self, head: nn.Module, call: Call) -> None:
        self.head, self.call = head, call

    def __getattr__(self, name: str) -> Any:  # the forward may read the weight's dtype
        return getattr(self.head, name)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Logits:  # (..., D) -> (..., V)
        if args or kwargs:
            raise NotImplementedError(
                f"{self.call.model}: expected its forward to call its head with hidden states alone; {ADVICE}"
            )
        return Logits(self.head, hidden, (*hidden.shape[:-1], classes_of(self.head)), self.call, hidden.dtype)


class InnerModel:
    """A model inside of a model while the outer forward runs: its output has Logits."""

    def __init__(self, model: PreTrainedModel, call: Call) -> None:
        self.model, self.call = model, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = self.model.__dict__[STAND_IN]
        holder.call = self.call
        try:
            return self.model(*args, **kwargs)
        finally:
            holder.call = None
