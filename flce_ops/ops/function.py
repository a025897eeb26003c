"""OperatorFunction, the base class of every operator's derivative: what the operator saves for backward, and its kernel
on the autograd keys.

Each operator has one OperatorFunction, a `torch.autograd.Function` with `setup_context` and `vmap`. It is called from
the Autograd key (eager, AOTAutograd) and from the key on which torch.func intercepts calls.
`torch.library.register_autograd` reaches only the first.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from .._ops import add_op_namespace_prefix
from ..math.options import KlDivOptions, LogitOptions, numbers_of
from ..meta.call import Arguments, requested
from ..objectives.cross_entropy import LossOptions
from ..support.refusals import refuse_hole, running
from ..support.sizes import is_fake
from ..support.torch_private import (
    PROBE,
    below_autograd,
    functorch_is_active,
    has_tangent,
    plain_apply,
    runs_in_this_backward,
)
from ..support.workspace import step_bytes

# groups of options that hold numbers and tensors whose gradient is refused
GROUPS = (LogitOptions, LossOptions, KlDivOptions)
NUMBERS = tuple(name for group in GROUPS for name in numbers_of(group))
CONSTANTS = ("denominator", "main_grad")
OPERANDS = ("input", "linear_weight", "linear_bias")  # in the order of an output_mask


class OperatorFunction(Function):
    """The derivative of one operator. `arguments` is the class of its calls, and gradients are returned by argument
    name.

    Forward-mode differentiation is refused with an error that names the function. Under vmap it runs one batch element
    at a time.
    """

    arguments: ClassVar[type[Arguments]]
    function: ClassVar[str] = "linear_cross_entropy"  # named in errors if the operator itself is called
    reverse_modes: ClassVar[str] = "grad, jacrev, and jacrev of jacrev for a Hessian"
    with_derivative: ClassVar[tuple[str, ...]] = ()  # names of results
    learns: ClassVar[tuple[str, ...]] = ()  # options that get a gradient

    # (ctx, *cotangents): raises an error for gradients of results that must have none
    check_cotangents: ClassVar[Callable | None] = None
    # (ctx) -> the gradients of the arguments that `apply` takes beside the operator's
    gradients_beside: ClassVar[Callable | None] = None
    check: ClassVar[Callable | None] = None  # (values): raises the operator's own errors
    with_gradient: ClassVar[Callable | None] = None  # (values): changes them if a gradient may be requested

    derivatives: ClassVar[list[bool]]  # for each result, whether it is among `with_derivative`
    always: ClassVar[bool]  # whether every call requests these
    applied: ClassVar[Callable]  # `apply` without torch.func
    constants: ClassVar[list[tuple[int, str]]]  # places and names of numbers whose gradient is refused
    head: ClassVar[int]  # places of linear_weight and logit_scale
    scale: ClassVar[int]

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "arguments"):
            arguments, names = cls.arguments, cls.with_derivative
            cls.derivatives = [result.name in names for result in arguments.results]
            cls.always = all(result.asked is None for result in arguments.results if result.name in names)
            cls.backward = staticmethod(cls.backward_function())  # type: ignore[assignment]
            cls.applied = plain_apply(cls)
            refused = {*NUMBERS, *CONSTANTS} - {*cls.learns}
            cls.constants = [(index, name) for name, index in arguments.index.items() if name in refused]
            cls.head, cls.scale = (arguments.index[name] for name in ("linear_weight", "logit_scale"))

    @classmethod
    def called(cls) -> str:
        """The function that the user called."""
        return running.function or cls.function

    @classmethod
    def for_backward(cls, ctx, values: list[Any], results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the results that backward reads. Removes from `values`, which are saved, what backward does not
        read.
        """
        return ()

    @classmethod
    def gradients(
        cls, ctx, values: list[Any], saved: Sequence[Tensor], *cotangents: Tensor | None
    ) -> dict[str, Tensor | None]:
        """The gradients by argument name. `cotangents` belong to the results; they are None except for differentiable
        ones.
        """
        return {}

    @classmethod
    def forward(cls, *values):
        # calls the operator again below autograd; if more torch.func transforms follow, they must see it, too
        positional, named = cls.arguments.split(values)
        with nullcontext() if functorch_is_active() else below_autograd():
            found = cls.arguments.operator(*positional, **named)
        show_step_memory(cls.arguments, values)
        return found

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.function, ctx.differentiable, values = running.function, cls.derivatives, list(inputs)
        if not cls.always:
            call = cls.arguments.of(inputs)
            ctx.differentiable = [
                has and requested(result, call) for has, result in zip(cls.derivatives, cls.arguments.results)
            ]
        without = []
        for result, has in zip(output, ctx.differentiable):
            if not has:
                without.append(result)
        ctx.mark_non_differentiable(*without)
        save(ctx, cls.arguments, values, *cls.for_backward(ctx, values, output))

    @classmethod
    def backward_function(cls) -> Callable:
        """The function that autograd calls. Compiled autograd takes no method."""

        # Dynamo cannot look into an attribute of a Function
        arguments, check, beside = cls.arguments, cls.check_cotangents, cls.gradients_beside

        def backward(ctx, *cotangents):
            if check is not None:
                check(ctx, *cotangents)
            found = cls.of_cotangents(arguments, ctx, *cotangents)
            return found if beside is None else (*found, *beside(ctx))

        return backward

    @classmethod
    def of_cotangents(cls, arguments: type[Arguments], ctx, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the operator's arguments, None for those without one. Compiled autograd traces this method,
        and what it calls; Dynamo cannot trace super() in a Function's class method.
        """
        given, asked = [], False
        for cotangent, has in zip(cotangents, ctx.differentiable):
            given.append(cotangent if has else None)
            asked = asked or given[-1] is not None
        if not asked:
            return arguments.gradients()
        values, saved = restore(ctx, arguments)
        outer, running.function = running.function, ctx.function
        try:
            return arguments.gradients(**cls.gradients(ctx, values, saved, *given))
        finally:
            running.function = outer

    @classmethod
    def jvp(cls, ctx, *_):
        cls.refuse_forward_mode()

    @classmethod
    def refuse_forward_mode(cls) -> NoReturn:
        refuse_hole(cls.called(), "forward mode", modes=cls.reverse_modes)

    @classmethod
    def vmap(cls, info, in_dims, *args):
        if info.batch_size == 0:
            refuse_hole("flce_ops", "empty vmap")
        return vmap_by_loop(cls, info.batch_size, in_dims, args)

    @classmethod
    def run(cls, values: list[Any]) -> Any:
        """What the operator's autograd keys run: this Function if a gradient can flow, otherwise the kernel below."""
        arguments, forward_mode = cls.arguments, unpack_dual(PROBE).primal is not PROBE
        grad_enabled, functorch = torch.is_grad_enabled(), functorch_is_active()
        if grad_enabled or functorch or forward_mode:
            tensors = []
            for index in arguments.tensor_places:
                tensors.append(values[index])
            for index in arguments.tensor_lists:  # constants
                for place, tensor in enumerate(values[index] or ()):
                    if grad_enabled and tensor.requires_grad:
                        name = f"{arguments.arguments[index].name}[{place}]"
                        refuse_hole(add_op_namespace_prefix(arguments.op), "constant", name=name)
                    tensors.append(tensor)
            if forward_mode and has_tangent(*tensors):
                cls.refuse_forward_mode()
            if cls.check is not None:
                cls.check(values)
            constants = cls.constants
            if values[cls.head] is None:  # given logits, whose scale gets no gradient
                constants = [*constants, (cls.scale, "logit_scale")]
            for index, name in constants:
                if grad_enabled and values[index] is not None and values[index].requires_grad:
                    refuse_hole(add_op_namespace_prefix(arguments.op), "number", name=name)
            if functorch:
                try:
                    return cls.apply(*values)
                except RuntimeError as error:
                    if "Functionalize rule" in str(error):
                        refuse_hole(cls.called(), "functionalize")
                    raise
            for tensor in tensors:
                if grad_enabled and tensor is not None and tensor.requires_grad:
                    if cls.with_gradient is not None:
                        cls.with_gradient(values)
                    return cls.applied(*values)
        with below_autograd():
            found = arguments.dispatched(values)
            show_step_memory(arguments, values)
            return found


def show_step_memory(arguments: type[Arguments], values: Sequence[Any]) -> None:
    """Under a user's FakeTensorMode: allocates the temporary memory of the operator that has just returned.

    A fake kernel allocates results alone, and torch's MemTracker sees no allocation inside of an operator. So this one
    is an operator of its own, while the results are alive.
    """
    index = arguments.index
    weight = values[index["linear_weight"]]
    if weight is None or not is_fake(weight):  # given logits need only vectors
        return
    tokens, vocab = values[index["input"]].shape[0], weight.shape[0]
    models = 2 if "teacher_probs" in index and values[index["teacher_probs"]] is None else 1
    if isinstance(tokens, int) and isinstance(vocab, int):  # a comparison of symbolic sizes would be a guard
        nbytes = step_bytes(models * tokens, vocab * weight.itemsize, weight.device.type)
        weight.new_empty(nbytes, dtype=torch.uint8)


def save(ctx, arguments: type[Arguments], values: list[Any], *results: Tensor) -> None:
    """Saves the values of a call, which this changes, and the results that backward reads."""
    tensors = []
    for index in arguments.tensor_places:
        tensors.append(values[index])
        values[index] = None
    for index in arguments.tensor_lists:
        tensors += values[index] or ()
        values[index] = values[index] and len(values[index])
    ctx.values = values
    ctx.save_for_backward(*tensors, *results)


def restore(ctx, arguments: type[Arguments]) -> tuple[list[Any], tuple[Tensor, ...]]:
    """The values of the call, and the saved results."""
    values, saved = list(ctx.values), saved_tensors(ctx)
    for index, tensor in zip(arguments.tensor_places, saved):
        values[index] = tensor
    after = len(arguments.tensor_places)
    for index in arguments.tensor_lists:
        count = values[index]
        if count:
            values[index] = list(saved[after : after + count])
            after += count
    return values, saved[after:]


def saved_tensors(ctx) -> tuple[Tensor, ...]:
    """The saved tensors. If one is an output of unbind, as the heads of a K-dimensional loss are, torch's error for an
    in-place change says only that the output is a view.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "is a view and its base or another view of its base" not in str(error):
            raise
        raise RuntimeError(
            f"{ctx.function or 'flce_ops'}: one of the variables needed for gradient computation has been modified by "
            "an inplace operation since the loss was computed; change a clone of it, or change it after backward"
        ) from error


def gradients_asked_for(ctx) -> Sequence[bool]:
    """For each argument, whether the running backward wants its gradient. ctx.needs_input_grad says only that it
    requires one: torch.autograd.grad may ask for others, as a zero-bubble pipeline does, which runs one backward for
    the gradient of input and a later one for those of parameters.
    """
    needs = ctx.needs_input_grad  # read once, because each access makes a new tuple
    if torch.compiler.is_compiling():  # compiled autograd knows no nodes; a traced backward makes every gradient
        return needs
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # of the arguments that require a gradient
    return [need and runs_in_this_backward(next(nodes)) for need in needs]


def wanted(ctx, arguments: type[Arguments], *names: str) -> list[bool]:
    asked = gradients_asked_for(ctx)
    return [asked[arguments.index[name]] for name in names]


class WithoutDerivative(OperatorFunction):
    """Saves nothing; the derivative is refused by name."""

    second_derivative: ClassVar[str]  # the entry of HOLES with the reason

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        """Saves no tensor."""
        ctx.function = running.function

    @classmethod
    def of_cotangents(cls, arguments, ctx, *_):
        refuse_hole(ctx.function or cls.function, cls.second_derivative)


def where_wanted(
    gradients: Sequence[Tensor | None], mask: Sequence[bool], names: Sequence[str] = OPERANDS
) -> dict[str, Tensor | None]:
    return {name: gradient if want else None for name, gradient, want in zip(names, gradients, mask)}


def vmap_by_loop(function: type[Function], batch: int, in_dims, args):
    """One call for each batch element: correct for every argument, but no faster than a Python loop."""
    results = []
    for index in range(batch):
        element = [
            arg.select(dim, index) if isinstance(arg, Tensor) and dim is not None else arg
            for arg, dim in zip(args, in_dims)
        ]
        results.append(function.apply(*element))
    stacked = tuple(torch.stack(parts) for parts in zip(*results))
    return stacked, (0,) * len(stacked)
