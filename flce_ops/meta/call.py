"""A call of an operator, declared as a class. The schema is generated from the class. Kernels take an instance of it,
and autograd saves one.

class WithGrad(Arguments, keyword_from="ignore_index"):      the schema, in the same order; a group becomes its fields
    operands: Operands                                       (Tensor input, Tensor linear_weight, ...,
    reduction: Reduction                                      Tensor? row_scale, Tensor? denominator=None, *,
    ignore_index: int = -100                                  int ignore_index=-100,
    loss: LossOptions                                         float label_smoothing=0.0, Tensor? z_loss=None, ...)

@takes(WithGrad)
def with_grad(call: WithGrad): ...                           called with the operator's arguments, written with groups

A kind of result says how the result appears in the schema, how it is allocated, and what it is at ignored tokens:

scalar     ()                token        (N,), or (0,) if not requested
topk       (N,) or (N, K)    class_index  (N,) int64
lse_pair   (N, 2)
gradient   of an operand, or (0,) if output_mask does not want it

Fake kernels and real ones begin with `outputs`, which checks the shapes and devices that kernels rely on, by an
argument's name, and allocates the results. The entry operators have checked what the user passed. A caller of an inner
operator, such as a sharded head, comes without these checks, and a kernel must not read beyond a tensor.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..math.options import Cotangents, accumulation_dtype
from ..support.path import Choice
from .checks import holds

SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[Tensor] | None: "Tensor[]?",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    str | None: "str?",
}
REQUIRED = object()


# N tokens, K classes of a target, D hidden, V vocabulary


BY_TOKEN = ("input", "logits")  # operands (N, ...) that may have a gradient


class Result(NamedTuple):
    name: str
    shape: Callable[[Any], Sequence[int]] | tuple[()] | None = None  # of a call; None: (N,), or the operand's shape
    # Whether a call requests it, otherwise it is (0,). None: always requested. An integer: a place in output_mask.
    asked: Callable[[Any], Any] | int | None = None
    at_ignored: float | None = 0.0  # its value at ignored tokens; None: it has no entry for each token
    dtype: torch.dtype | None = None  # None: the accumulation dtype, or the operand's
    operand: str = ""  # for a gradient: the name of its operand


def requested(result: Result, call: Any) -> bool:
    asked = result.asked
    return asked is None or bool(call.output_mask[asked] if isinstance(asked, int) else asked(call))


def scalar(name: str) -> Result:
    return Result(name, (), at_ignored=None)


def token(name: str, asked_by: str = "") -> Result:
    """`asked_by` is the attribute of a call that requests it."""
    return Result(name, asked=attrgetter(asked_by) if asked_by else None)


def class_index(name: str, asked_by: str) -> Result:
    return token(name, asked_by)._replace(at_ignored=-1.0, dtype=torch.int64)


def lse_pair(name: str, asked: Callable[[Any], Any] | None = None) -> Result:
    """Two numbers whose sum is lse: a reference near the row's maximum, and the log of the softmax's denominator
    relative to it. In float32 an lse of 1000 has an error of 3e-5, and every probability exp(z - lse) would have it,
    too. The reference counts as a constant: the derivative of lse is the one of the second number.
    """
    return Result(name, lambda call: (call.operands[0].shape[0], 2), asked)


def topk(name: str, asked_by: str = "") -> Result:
    return token(name, asked_by)._replace(shape=attrgetter("operands.target.shape"))


def gradients(*operands: str) -> tuple[Result, ...]:
    """The gradients of operands, in the order of an output_mask."""

    def of(operand: str, place: int) -> Result:
        at_ignored = 0.0 if operand in BY_TOKEN else None
        return Result(f"grad_{operand}", None, place, at_ignored, operand=operand)

    return tuple(of(operand, place) for place, operand in enumerate(operands))


Self = TypeVar("Self", bound="Arguments")


class Argument(NamedTuple):
    name: str
    type: str
    default: Any
    path: str  # of the value within a call: "ignore_index", or "operands.input"

    def declared(self, with_default: bool = True) -> str:
        default = f"={self.default!r}" if with_default and self.default is not REQUIRED else ""
        return f"{self.type} {self.name}{default}"


class Arguments:
    """A call of an operator. The dispatcher and autograd see its values, in the order of the schema."""

    choice: Choice = Choice()  # the chosen path and notes on its run, for flce_ops.last_path()
    notes: tuple[str, ...] = ()
    all_count = False  # whether all tokens are known to be valid

    op: ClassVar[str] = ""
    operator: ClassVar[Callable]  # the dispatcher's
    # What the operator's autograd keys run, given its values. The bodies of entry operators call it without the
    # dispatcher, which takes 5 us.
    applied: ClassVar[Callable[[list[Any]], Any]]
    results: ClassVar[tuple[Result, ...]] = ()
    written: ClassVar[str] = ""  # the argument that the operator writes to

    arguments: ClassVar[tuple[Argument, ...]]
    positional: ClassVar[int]  # the number of positional arguments
    index: ClassVar[dict[str, int]]
    keywords: ClassVar[tuple[tuple[str, Any], ...]]  # names and defaults
    defaults: ClassVar[list[Any]]
    fields: ClassVar[list[tuple[str, Any, Any]]]  # name, group or None, index or slice
    usual: ClassVar[list[tuple[str, bool, Any]]]  # each field's name, whether it is a group, and its default
    tensor_places: ClassVar[list[int]]  # indices of arguments that are tensors, or None
    lists: ClassVar[list[int]]  # indices of arguments that are lists
    tensor_lists: ClassVar[list[int]]  # of tensors
    fills: ClassVar[tuple[float | None, ...]]  # for each result, its value at ignored tokens
    made: ClassVar[tuple[str, ...]]  # the operands whose gradients are among the results
    made_at: ClassVar[list[int]]  # the places of these results

    def __init_subclass__(cls, keyword_from: str = "") -> None:
        arguments: list[Argument] = []
        cls.fields, cls.positional = [], -1
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if name in Arguments.__annotations__:
                continue
            start = len(arguments)
            if name == keyword_from:
                cls.positional = start
            if not hasattr(hint, "_fields"):
                arguments.append(Argument(name, schema_type(hint), getattr(cls, name, REQUIRED), name))
                cls.fields.append((name, None, start))
                continue
            hints, defaults = get_type_hints(hint, include_extras=True), hint._field_defaults
            for field in hint._fields:
                default = defaults.get(field, REQUIRED)
                arguments.append(Argument(field, schema_type(hints[field]), default, f"{name}.{field}"))
            cls.fields.append((name, hint, slice(start, len(arguments))))
        cls.arguments = tuple(arguments)
        cls.positional = len(arguments) if cls.positional < 0 else cls.positional
        cls.index = {argument.name: index for index, argument in enumerate(arguments)}
        cls.defaults = [argument.default for argument in arguments]
        cls.keywords = tuple(zip(tuple(cls.index)[cls.positional :], cls.defaults[cls.positional :]))
        cls.usual = [(name, group is not None, cls.defaults[place]) for name, group, place in cls.fields]
        types = [argument.type for argument in arguments]
        cls.tensor_places = [index for index, kind in enumerate(types) if kind in ("Tensor", "Tensor?")]
        cls.lists = [index for index, kind in enumerate(types) if kind.rstrip("?").endswith("]")]
        cls.tensor_lists = [index for index in cls.lists if types[index].startswith("Tensor[]")]
        cls.fills = tuple(result.at_ignored for result in cls.results)
        cls.made_at = [place for place, result in enumerate(cls.results) if result.operand]
        cls.made = cls.__dict__.get("made") or tuple(result.operand for result in cls.results if result.operand)

    @classmethod
    def schema(cls) -> str:
        parts: list[str] = []
        defaults = True  # an argument has no default if a later positional one has none
        for argument in cls.arguments[: cls.positional][::-1]:
            defaults &= argument.default is not REQUIRED
            parts.insert(0, argument.declared(defaults))
        if cls.positional < len(cls.arguments):
            parts += ["*", *(argument.declared() for argument in cls.arguments[cls.positional :])]
        schema = f"({', '.join(parts)})"
        return schema.replace(f"Tensor {cls.written}", f"Tensor(a!) {cls.written}", 1) if cls.written else schema

    @classmethod
    def results_schema(cls) -> str:
        return f"({', '.join(f'Tensor {result.name}' for result in cls.results)})"

    @classmethod
    def bind(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        """From arguments that fit the schema."""
        values = [*args, *cls.defaults[len(args) :]]
        for name, value in kwargs.items():
            values[cls.index[name]] = value
        call, make = cls.__new__(cls), tuple.__new__
        fields = call.__dict__
        for name, group, place in cls.fields:
            fields[name] = values[place] if group is None else make(group, values[place])
        return call

    @classmethod
    def of(cls: type[Self], values: Sequence[Any]) -> Self:
        return cls.bind(*values)

    @classmethod
    def like(cls, call: Any, **own: Any) -> list[Any]:
        """The values of a call of this operator with the fields `own`. Other fields are copied from `call`, which may
        be a call of another operator, or a TokenLosses.
        """
        values: list[Any] = []
        known = vars(call) | own
        for name, is_group, default in cls.usual:
            if is_group:
                values += known[name] if name in known else default
            else:
                values.append(known.get(name, default))
        return values

    @property
    def num_classes(self) -> int:
        """V, of all ranks."""
        operands, whole = vars(self)["operands"], vars(self).get("vocab_size")
        return operands.num_classes if whole is None else whole

    def changed(self: Self, change: Callable[[str, Any], Any]) -> Self:
        """A copy of the call in which change(name, value) replaces each value."""
        call = self.of([change(name, value) for name, value in zip(self.index, self.values())])
        call.choice, call.notes = self.choice, self.notes
        return call

    def values(self) -> list[Any]:
        fields, values = self.__dict__, []
        for name, group, _ in self.fields:
            if group is None:
                values.append(fields[name])
            else:
                values += fields[name]
        return values

    @classmethod
    def split(cls, values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Positional and keyword arguments of the operator. Leaves out keywords at their defaults: the dispatcher fills
        those in faster than it takes them.
        """
        named = {}
        for (name, default), value in zip(cls.keywords, values[cls.positional :]):
            if value is not default:
                named[name] = value
        return values[: cls.positional], named

    @classmethod
    def dispatched(cls, values: Sequence[Any]) -> Any:
        """What its operator returns."""
        positional, named = cls.split(values)
        return cls.operator(*positional, **named)

    @classmethod
    def gradients(cls, **by_name: Tensor | None) -> tuple[Tensor | None, ...]:
        """The result of an autograd backward: one entry for each value, None for those not named."""
        found: list[Tensor | None] = [None] * len(cls.arguments)
        for name, gradient in by_name.items():
            found[cls.index[name]] = gradient
        return tuple(found)


def schema_type(hint: Any) -> str:
    metadata = getattr(hint, "__metadata__", None)
    return metadata[0] if metadata else SCHEMA_TYPES[hint]


def takes(arguments: type[Arguments]) -> Callable[[Callable], Callable]:
    """Decorates a function that takes an instance of `arguments`, so that it can be called with the operator's
    arguments instead.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and type(args[0]) is arguments:
                return function(args[0], **kwargs)
            return function(arguments.bind(*args, **kwargs))

        run.of_call = function  # type: ignore[attr-defined]
        return run

    return decorate


Outputs = tuple[Tensor, ...]  # the results of a call, in the order of its class
# of input (N, D), linear_weight (V, D), linear_bias (V,) and logit_scale (); (0,) if not wanted
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]

AXES = {  # aten/chunks.py finds the tensors with rows of tokens by it, too
    **{"input": "ND", "linear_weight": "VD", "linear_bias": "V", "weight": "V", "target": "N"},
    **{"teacher_input": "NE", "teacher_weight": "VE", "teacher_bias": "V", "teacher_probs": "NV", "valid": "N"},
    **dict.fromkeys(("expected_log_prob", "grad_expected_log_prob", "row_scale", "grad", "divergence"), "N"),
    **dict.fromkeys((*Cotangents._fields, "target_weight"), "N"),
    "main_grad": "VD",
    "lse_pair": "N2",
}
BY_CLASS = ("target", "target_weight", "grad_target_logit")  # (N, K) if a head's target names K classes of a token


def outputs(call: Any) -> Any:
    """Checks the call's shapes. Returns its uninitialised results, Outputs."""
    check_shapes(call)
    return allocate(call.results, call)


def allocate(results: Sequence[Result], call: Any) -> tuple[Tensor, ...]:
    """Allocates results, uninitialised."""
    operands, found = call.operands, []
    first = operands[0]
    tokens, accumulate = first.shape[0], accumulation_dtype(first.dtype)
    for _, shape, asked, _, dtype, operand in results:
        like, size = first, tokens
        if operand in operands._fields:
            of = getattr(operands, operand)
            # grad_linear_bias has this shape even without a linear_bias; without a head it is (0,)
            of_none = 0 if operands[1] is None else operands[1].shape[0]
            like, size = (first, of_none) if of is None else (of, of.shape)
            dtype = like.dtype
        if asked is not None and not (call.output_mask[asked] if isinstance(asked, int) else asked(call)):
            size = 0
        elif shape is not None:
            size = shape(call) if shape else ()
        found.append(like.new_empty(size, dtype=dtype or accumulate))
    return tuple(found)


@functools.cache
def checked(arguments: type[Arguments]) -> list[tuple[Callable, str, str, int]]:  # getter, name, axes, most dimensions
    """The tensors of an operator that are checked. Its operands come first, so that others are compared with them."""
    known = [argument for argument in arguments.arguments if argument.name in AXES and "Tensor" in argument.type]
    known.sort(key=lambda argument: not argument.path.startswith("operands."))
    more = BY_CLASS if "input" in arguments.index else ()
    return [(attrgetter(path), name, AXES[name], len(AXES[name]) + (name in more)) for name, _, _, path in known]


def check_shapes(call: Any) -> None:
    device = call.operands[0].device
    sizes = {"2": 2}
    if call.operands.linear_weight is None:  # given logits
        sizes["V"] = call.operands.input.shape[-1]
        if call.operands.linear_bias is not None or call.sparse.gradient_threshold:
            raise ValueError(f"{call.op}: expected neither linear_bias nor gradient_threshold without linear_weight")
    for get, name, axes, most in checked(call.__class__):
        tensor = get(call)
        if tensor is None or (name == "weight" and vars(call).get("group") is not None):  # of all ranks
            continue
        shape = tensor.shape
        fits = len(axes) <= len(shape) <= most
        for axis, size in zip(axes, shape):
            fits &= sizes.setdefault(axis, size) == size
        if not holds(fits):
            known = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)
            raise ValueError(f"{call.op}: expected {name} of shape ({', '.join(axes)}), {known}, got {tuple(shape)}")
        if tensor.device != device:
            raise ValueError(f"{call.op}: expected {name} on {device}, got {tensor.device}")
    for place, tensor in enumerate(vars(call).get("tensors") or ()):
        if tensor.device != device or not holds(not tensor.dim() or tensor.shape[0] == sizes["N"]):
            raise ValueError(
                f"{call.op}: expected tensors[{place}] on {device} with {sizes['N']} rows or as a 0-d tensor, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
