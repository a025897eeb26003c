"""What each operator saves and what comes back; nothing here computes a logit.

    forward            saves its arguments, lse, retained logits                 <- backward
    with_grad          saves its arguments, the gradients made in the same pass  <- times one scalar
    backward           saves its arguments                                       <- double_backward
    double_backward    saves its arguments but the first three, in which         <- their change along a direction;
                       it is linear                                                 third derivatives are refused

One Formula per operator, a `torch.autograd.Function` with `setup_context` and `vmap`, is called from the Autograd key
(eager, AOTAutograd) and from the key on which torch.func intercepts calls; `torch.library.register_autograd` reaches
only the first.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from flce_ops.aten.backward_tangent import Direction, backward_tangent
from flce_ops.math.loss import losses_of_rows
from flce_ops.math.options import NUMBERS, Cotangents, Statistics, TokenStatistics
from flce_ops.math.statistics import asked_of_forward, statistics_of_forward
from flce_ops.meta.arguments import Arguments, Backward, BackwardInPlace, DoubleBackward, Forward, GradGrads, WithGrad
from flce_ops.ops.paths import choice_of
from flce_ops.ops.retained import retained_rows
from flce_ops.support.differentiated import differentiated, has_tangent
from flce_ops.support.torch_private import (
    apply_function,
    below_autograd,
    functorch_is_active,
    graph_is_kept_after_this_backward,
    is_batched,
    runs_in_this_backward,
)
from flce_ops.support.vendor import has_triton, made_by_nvidia

# N tokens, D hidden, V vocabulary

FORWARD_MODE_REFUSAL = (
    "linear_cross_entropy: forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; "
    "use reverse mode (grad, jacrev, and jacrev of jacrev for a Hessian)"
)

SPARSE_SECOND_DERIVATIVE_REFUSAL = (
    "linear_cross_entropy: second derivatives of a loss with gradient_threshold are not implemented, as its gradient "
    "is a sample; leave gradient_threshold out"
)


SPARSE_ENTROPY_REFUSAL = (
    "linear_log_probs: the gradient of the entropy with gradient_threshold is not implemented, as it is not made of "
    "probabilities alone; detach the entropy, or leave gradient_threshold out"
)


class Formula(Function):
    """The derivative of one operator: `arguments` are its own, and each gradient is returned by its name.

    Refuses forward-mode differentiation by name, and runs under vmap one element at a time.
    """

    op: ClassVar[str]
    arguments: ClassVar[type[Arguments]]
    forward_mode_refusal = FORWARD_MODE_REFUSAL

    @classmethod
    def check(cls, op: torch._ops.OpOverload, values: list) -> None:
        """Refusals of its own."""

    @classmethod
    def with_gradient(cls, values: list) -> None:
        """Changes what its operator is called with where a gradient may be asked for."""

    def __init_subclass__(cls) -> None:
        if "op" not in vars(cls):
            return

        def forward(*values):
            # the operator itself; a transform of torch.func that is still to come has to see it once more
            with nullcontext() if functorch_is_active() else below_autograd():
                return cls.arguments.run(getattr(torch.ops.flce, cls.op), values)

        cls.forward = staticmethod(forward)  # type: ignore[method-assign]

    @classmethod
    def jvp(cls, ctx, *_):
        raise NotImplementedError(cls.forward_mode_refusal)

    @classmethod
    def vmap(cls, info, in_dims, *args):
        return vmap_by_loop(cls, info, in_dims, args)


def save(ctx, values: Sequence[Any], *results: Tensor) -> None:
    """The values of a call, and of its results what backward reads."""
    ctx.constants = list(values)
    tensors: list[Tensor | None] = []
    for index, value in enumerate(ctx.constants):
        if isinstance(value, Tensor):
            tensors.append(value)
            ctx.constants[index] = None
        else:
            tensors.append(None)
    ctx.save_for_backward(*tensors, *results)


def saved(ctx, arguments: type[Arguments]) -> tuple[Arguments, tuple[Tensor, ...]]:
    count = len(ctx.constants)
    tensors = ctx.saved_tensors
    values = [constant if tensor is None else tensor for constant, tensor in zip(ctx.constants, tensors)]
    return arguments.of(values), tensors[count:]


def wanted(ctx, arguments: type[Arguments], *names: str) -> list[bool]:
    return [ctx.needs_input_grad[arguments.index[name]] for name in names]


CONSTANTS = ("denominator", "main_grad")  # tensors that a gradient is refused for
OPERANDS = ("input", "linear_weight", "linear_bias")  # in the order of an output_mask


def where_wanted(gradients: Sequence[Tensor], mask: Sequence[bool]) -> dict[str, Tensor | None]:
    return {name: gradient if want else None for name, gradient, want in zip(OPERANDS, gradients, mask)}


class ForwardFormula(Formula):
    """target_logit, lse, logit_sum and expected_logit have a gradient; the others are constants."""

    arguments = Forward
    op = "linear_cross_entropy_forward"

    @classmethod
    def with_gradient(cls, values):
        retain = Forward.index["retain"]
        values[retain] = values[retain] or retained_rows(Forward.of(values))

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = Forward.of(inputs)
        _, lse, logit_sum, expected_logit, *others = output
        ctx.set_materialize_grads(False)
        *constants, lse_rest, retained = others
        constants += [lse_rest, retained]
        constants += [] if call.logit_sum else [logit_sum]
        constants += [] if call.expected_logit else [expected_logit]
        ctx.mark_non_differentiable(*constants)
        # Not saved: autograd would refuse it once the backward of another micro-batch has added to it.
        ctx.main_grad, call.main_grad = call.main_grad, None
        save(ctx, call.values(), lse, expected_logit, lse_rest, *([retained] if call.retain else []))

    @staticmethod
    def backward(ctx, grad_target_logit, grad_lse, grad_logit_sum, grad_expected_logit, *_):
        call, (lse, expected_logit, lse_rest, *retained) = saved(ctx, Forward)
        grad_logit_sum = grad_logit_sum if call.logit_sum else None
        grad_expected_logit = grad_expected_logit if call.expected_logit else None
        cotangents = Cotangents(grad_target_logit, grad_lse, grad_logit_sum)
        if all(cotangent is None for cotangent in (*cotangents, grad_expected_logit)):
            return Forward.gradients()
        if call.sparse.gradient_threshold and grad_expected_logit is not None:
            raise NotImplementedError(SPARSE_ENTROPY_REFUSAL)
        expected_logit = None if grad_expected_logit is None else expected_logit
        if call.vocab_size is not None and call.operands.linear_bias is not None:
            if expected_logit is not None:
                expected_logit = finite_in_empty_rows(expected_logit, lse)
            lse = finite_in_empty_rows(lse, lse)
        mask = wanted(ctx, Forward, *OPERANDS)
        backward, into = torch.ops.flce.linear_cross_entropy_backward, {}
        if ctx.main_grad is not None and mask[1]:
            # as .grad, it stays as it is in a backward that was asked for other gradients alone
            mask[1] = runs_in_this_backward(ctx.next_functions[1][0])
            if mask[1]:
                backward, into = torch.ops.flce.linear_cross_entropy_backward_, {"main_grad": ctx.main_grad}
        gradients = backward(
            *cotangents,
            *call.operands,
            lse,
            ignore_index=call.ignore_index,
            **call.logits._asdict(),
            vocab_start=call.vocab_start,
            output_mask=mask,
            grad_expected_logit=grad_expected_logit,
            expected_logit=expected_logit,
            lse_rest=lse_rest,
            retained=retained[0] if retained else None,
            **call.sparse._asdict(),
            **into,
        )
        if into:
            mask[1] = False
            # Not a tracer's: a compiled graph saves the buffer, and has to find its version of forward in backward.
            if type(ctx.main_grad) is Tensor:
                torch.autograd.graph.increment_version(ctx.main_grad)
        return Forward.gradients(**where_wanted(gradients, mask))


def finite_in_empty_rows(numbers: Tensor, lse: Tensor) -> Tensor:  # (N,), of a vocabulary shard
    """A bias of -inf may switch off all classes of one shard: exp(-inf - lse) is to be 0 there, not nan."""
    return numbers.masked_fill(lse == -torch.inf, 0.0)


class BackwardFormula(Formula):
    arguments = Backward
    op = "linear_cross_entropy_backward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = Backward.of(inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for result, want in zip(output, call.output_mask) if not want))
        ctx.has_expectation = call.grad_expected_logit is not None
        call.grad_expected_logit = call.expected_logit = call.retained = None
        save(ctx, call.values())

    @staticmethod
    def backward(ctx, *grad_grads):
        call, _ = saved(ctx, Backward)
        grad_grads = [grad if want else None for grad, want in zip(grad_grads, call.output_mask)]
        if all(grad is None for grad in grad_grads):
            return Backward.gradients()
        if call.sparse.gradient_threshold:
            raise NotImplementedError(SPARSE_SECOND_DERIVATIVE_REFUSAL)
        if ctx.has_expectation:
            raise NotImplementedError(
                "linear_log_probs: second derivatives through the entropy are not implemented; detach the entropy, or "
                "compute it from F.linear's logits"
            )
        found = torch.ops.flce.linear_cross_entropy_double_backward(
            *grad_grads,
            *call.cotangents,
            *call.operands,
            call.lse,
            ignore_index=call.ignore_index,
            **call.logits._asdict(),
            vocab_start=call.vocab_start,
            lse_rest=call.lse_rest,
        )
        names = (*Cotangents._fields, *OPERANDS)
        needs = wanted(ctx, Backward, *names)
        return Backward.gradients(**{name: grad if need else None for name, grad, need in zip(names, found, needs)})


class BackwardInPlaceFormula(Formula):
    """None: what was added to main_grad has no derivative."""

    arguments = BackwardInPlace
    op = "linear_cross_entropy_backward_"

    @classmethod
    def check(cls, op, values):
        tensors = (value for value in values if isinstance(value, Tensor))
        if differentiated(*tensors):
            raise NotImplementedError(
                "linear_cross_entropy: a backward that adds to main_grad cannot be differentiated (create_graph=True); "
                "leave main_grad out where a second derivative is wanted"
            )


class WithGradFormula(Formula):
    """loss of linear_cross_entropy_with_grad; its other results carry no gradient.

    The gradients exist already, up to the scalar d(objective)/d(loss). They are multiplied in place when nobody can
    read them again, which keeps one copy of grad_linear_weight in memory, and out of place under retain_graph.
    """

    arguments = WithGrad
    op = "linear_cross_entropy_with_grad"

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, *output[1:5])

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return WithGrad.gradients()
        call, (losses, *made) = saved(ctx, WithGrad)
        *needs, needs_row_scale = wanted(ctx, WithGrad, *OPERANDS, "row_scale")
        if torch.is_grad_enabled():  # create_graph: the saved gradients have no graph
            if call.sparse.gradient_threshold:
                raise NotImplementedError(SPARSE_SECOND_DERIVATIVE_REFUSAL)
            gradients, losses = differentiable_gradients(call, grad_loss)
        else:
            input, linear_weight, _, linear_bias, _ = call.operands
            leaf = linear_weight if needs[1] else linear_bias if needs[2] else input
            gradients = multiply_by_upstream(made, call.output_mask, grad_loss, leaf)
        grad_row_scale = losses * grad_loss if needs_row_scale else None
        return WithGrad.gradients(**where_wanted(gradients, needs), row_scale=grad_row_scale)


def differentiable_gradients(call: WithGrad, grad_loss: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The gradients, times grad_loss, and the losses of tokens, as functions of the operands.

    They are built from the operators that have derivatives, not by asking autograd for the gradient by the operands:
    these carry the graph that made them, and a path from one to another would be taken here and again by the caller.
    """
    call.statistics = Statistics()  # they are known
    forward, backward = torch.ops.flce.linear_cross_entropy_forward, torch.ops.flce.linear_cross_entropy_backward
    return recomputed_step(call, forward, backward, grad_loss)[:2]


def recomputed_step(
    call: WithGrad, forward: Callable, backward: Callable, grad_loss: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, TokenStatistics]:
    """The gradients, times grad_loss, losses and statistics of `call`, from the forward and backward operators."""
    operands = call.operands
    logits = {"ignore_index": call.ignore_index, **call.logits._asdict()}
    found = forward(
        *operands, logit_sum=call.loss.label_smoothing != 0.0, **asked_of_forward(call.statistics), **logits
    )
    target_logit, lse, logit_sum, *_, lse_rest, retained = found
    rows = (target_logit, lse, logit_sum, lse_rest)
    terms, losses, valid = losses_of_rows(
        operands, call.ignore_index, call.loss, operands.linear_weight.shape[0], *rows, call.target_weight
    )
    scale = call.reduction.scale_of_tokens(valid, lse.dtype)
    cotangents = terms.cotangents(target_logit, lse, scale if grad_loss is None else scale * grad_loss)
    gradients = backward(
        *cotangents,
        *operands,
        lse,
        **logits,
        output_mask=call.output_mask,
        lse_rest=lse_rest,
        retained=retained if retained.shape[0] else None,
    )
    return gradients, losses, statistics_of_forward(call.statistics, found)


class DoubleBackwardFormula(Formula):
    """Derivatives by the first three arguments only.

    They are cotangents, in which it is linear: torch.autograd.functional.hvp differentiates by them.
    """

    arguments = DoubleBackward
    op = "linear_cross_entropy_double_backward"

    @staticmethod
    def setup_context(ctx, inputs, output):
        call = DoubleBackward.of(inputs)
        ctx.tensors = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.set_materialize_grads(False)
        call.grad_grads = GradGrads(None, None, None)  # it is linear in them
        save(ctx, call.values())

    @staticmethod
    def backward(ctx, *direction):
        edges = zip(ctx.tensors, ctx.next_functions)
        others = any(runs_in_this_backward(node) for index, (node, _) in edges if index >= 3 and node is not None)
        if others or torch.is_grad_enabled():
            raise NotImplementedError(
                "linear_cross_entropy: third derivatives are not implemented; use F.cross_entropy(F.linear(...)) for "
                "them"
            )
        call, _ = saved(ctx, DoubleBackward)
        call.choice = choice_of(DoubleBackwardFormula.op, call)
        changes = backward_tangent(Direction(*direction), call)
        needs = ctx.needs_input_grad
        named = zip(GradGrads._fields, changes, needs)
        return DoubleBackward.gradients(**{name: change if need else None for name, change, need in named})


def multiply_by_upstream(
    made: Sequence[Tensor], output_mask: Sequence[bool], factor: Tensor, leaf: Tensor
) -> list[Tensor | None]:
    """made * factor, None where not wanted, in the same memory where these are the last users of it."""
    grads = [grad if want else None for grad, want in zip(made, output_mask)]
    if is_batched(factor):  # is_grads_batched: a batch of factors
        return [None if grad is None else grad * factor for grad in grads]
    plain = {type(tensor) for tensor in (factor, *grads) if tensor is not None} == {Tensor}
    if not plain:
        # A subclass is a tracer (functional, fake): record ordinary multiplications. AOTAutograd refuses a second
        # derivative only where the backward graph reads a tensor that requires one; gradients made in forward do not,
        # and would be differentiated as constants in silence.
        factor = torch.ops.flce.linear_cross_entropy_upstream(factor, leaf)
    if not plain or graph_is_kept_after_this_backward():
        return [None if grad is None else grad * factor for grad in grads]
    here = [grad for grad in grads if grad is not None]
    on_gpu = bool(here) and here[0].device.type == "cuda"  # row_scale alone may want a gradient
    if on_gpu and made_by_nvidia() and here[0].dtype != torch.float64 and has_triton():
        from flce_ops.triton import launch_scale_in_place

        launch_scale_in_place(here, factor)
    else:
        for grad in here:
            grad.mul_(factor)
    return grads


def vmap_by_loop(function: type[Function], info, in_dims, args):
    """One call per element of the batch: right for every argument, no faster than a Python loop."""
    if info.batch_size == 0:
        raise NotImplementedError(
            "flce_ops: vmap over an empty batch is not implemented; leave the call out where it is"
        )
    results = []
    for index in range(info.batch_size):
        element = [
            arg.select(dim, index) if isinstance(arg, Tensor) and dim is not None else arg
            for arg, dim in zip(args, in_dims)
        ]
        results.append(function.apply(*element))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results))
    return stacked, (0,) * len(stacked)


def kernel(op: torch._ops.OpOverload, formula: type[Formula]) -> Callable:
    """The kernel of `op` on the autograd keys: its formula where a gradient can flow, else straight down."""
    arguments = formula.arguments
    # constants of an operator; flce_ops/entry/learnt_scale.py and row_scale are the ways to a gradient
    numbers = [(index, name) for name, index in arguments.index.items() if name in (*NUMBERS, *CONSTANTS)]

    def run(*args, **kwargs):
        values = arguments.values_of(args, kwargs)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if has_tangent(*tensors):
            raise NotImplementedError(formula.forward_mode_refusal)
        grad_enabled = torch.is_grad_enabled()
        for index, name in numbers:
            if values[index] is not None and values[index].requires_grad and grad_enabled:
                raise NotImplementedError(f"{op._schema.name}: {name} gets no gradient here; pass it detached")
        formula.check(op, values)
        if functorch_is_active():
            return formula.apply(*values)
        if grad_enabled:
            for tensor in tensors:
                if tensor.requires_grad:
                    formula.with_gradient(values)
                    return apply_function(formula, *values)
        with below_autograd():
            return op(*args, **kwargs)

    return run
