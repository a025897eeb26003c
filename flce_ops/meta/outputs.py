"""What every inner operator does first, in its fake kernel and in its real kernels: it checks the arguments and
allocates the results.

A check belongs to a group of arguments or to an argument's name. It runs for each operator that has such arguments.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..math.kl_div_arguments import KlDivOperands
from ..math.options import Cotangents, LogitOperands, Operands, accumulation_dtype
from ..math.sparse_gradient import SparseGradient
from ..objectives.row import RowObjective
from ..support.holes import refuse_hole
from . import checks, kl_div_checks
from .arguments import BackwardInPlace, RowOperands, VocabParallelWithGrad
from .call import Arguments, Result

# N tokens, K classes of a target, D hidden, V vocabulary, r rank of a low-rank pair

Check = Callable[[str, Any, Any], None]  # takes the operator, a call, and the group or argument that is checked
Outputs = tuple[Tensor, ...]  # the results of a call, in the order of its class
Gradients = tuple[Tensor, Tensor, Tensor]  # of input (N, D), linear_weight (V, D), linear_bias (V,); (0,) if not wanted
EXPECTATION = ("grad_expected_log_prob", "expected_log_prob")
TOKENS = (
    "lse",
    "lse_rest",
    *EXPECTATION,
    *Cotangents._fields[1:],
    *(name for objective in RowObjective.named.values() for name in objective.tokens_of._fields),
    "row_scale",
    "grad",
)  # arguments (N,)


def outputs(call: Any) -> Any:
    """Checks the call and returns its uninitialised results: a tuple, or the only one."""
    for check, of in checks_of(call.__class__):
        value = of(call)
        if value is not None:
            check(call.op, call, value)
    results = allocate(call.results, call)
    return results if len(results) > 1 else results[0]


@functools.cache
def checks_of(arguments: type[Arguments]) -> list[tuple[Check, Callable[[Any], Any]]]:
    """The checks of an operator. Each comes with a function that gets the checked group or argument from a call."""
    found: list[tuple[Check, Callable[[Any], Any]]] = []
    for kind, check in CHECKS.items():
        for name, group, _ in arguments.fields:
            if kind is group is not None and not (kind is SparseGradient and "output_mask" not in arguments.index):
                found.append((check, attrgetter(name)))
        for argument in arguments.arguments:
            if kind == argument.name and argument.type.startswith("Tensor"):
                found.append((check, attrgetter(argument.path)))
    return found


def allocate(results: Sequence[Result], call: Any) -> tuple[Tensor, ...]:
    """Allocates results, uninitialised."""
    operands, found = call.operands, []
    first = operands[0]
    tokens, accumulate = first.shape[0], accumulation_dtype(first.dtype)
    for _, shape, asked, _, dtype, operand in results:
        like, size = first, tokens
        if operand:
            of = getattr(operands, operand)
            # grad_linear_bias has this shape even without a linear_bias
            like, size = (first, operands[1].shape[0]) if of is None else (of, of.shape)
            dtype = like.dtype
        if asked is not None and not asked(call):
            size = 0
        elif shape is not None:
            size = shape(call)
        found.append(like.new_empty(size, dtype=dtype or accumulate))
    return tuple(found)


def check_head(op: str, call: Any, operands: Any) -> None:
    if isinstance(call, VocabParallelWithGrad):  # its class weights cover the classes of all ranks
        checks.check_operands(op, operands._replace(weight=None))
        return
    topk = isinstance(operands, Operands)
    checks.check_operands(op, operands if topk else Operands(*operands), topk=topk)
    if operands.target.dim() == 2 and getattr(call, "target_weight", operands) is None:
        check_target_weight(op, call, None)


def check_logits(op: str, call: Any, operands: LogitOperands) -> None:
    logits, target, weight = operands
    checks.check_dense(op, **operands._asdict())
    if logits.dtype not in checks.SUPPORTED_DTYPES:
        checks.refuse_dtype(op, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"{op}: expected logits of shape (N, V) with at least one class, got {tuple(logits.shape)}")
    checks.check_target_dtype(op, target)
    checks.check_per_row(op, operands, target=target)
    if weight is not None:
        checks.check_per_class(op, "weight", weight, logits.shape[1], "logits.T")
    checks.check_device(op, logits, "logits", target=target, weight=weight)


def check_row(name: str) -> Check:
    def check(op: str, call: Any, numbers: Tensor) -> None:
        checks.check_per_row(op, call.operands, **{name: numbers})
        if name not in EXPECTATION:
            return
        # batch_invariant may have the second alone, which says what forward summed
        missing = call.grad_expected_log_prob is None and not getattr(call, "batch_invariant", False)
        if missing or call.expected_log_prob is None:
            raise ValueError(f"{op}: expected {' and '.join(EXPECTATION)} together, got one of them")

    return check


def check_number(name: str) -> Check:
    def check(op: str, call: Any, number: Tensor) -> None:
        if number.dim():
            raise ValueError(f"{op}: expected {name} to be a 0-d tensor, got shape {tuple(number.shape)}")

    return check


def check_target_weight(op: str, call: Any, target_weight: Tensor | None) -> None:
    target = call.operands.target
    if (target.dim() == 2) != (target_weight is not None):
        raise ValueError(
            f"{op}: expected a target of shape (N, K) and target_weight together, got target of shape "
            f"{tuple(target.shape)} and target_weight {'None' if target_weight is None else tuple(target_weight.shape)}"
        )
    checks.check_per_target(op, target, target_weight=target_weight)
    checks.check_device(op, call.operands.input, target_weight=target_weight)


def check_retained(op: str, call: Any, retained: Tensor) -> None:
    columns = call.operands.saved_columns
    if retained.dim() != 2 or retained.shape[1] != columns or retained.dtype != torch.int16:
        raise ValueError(
            f"{op}: expected retained as the forward operator gives it, (R, {columns}) in torch.int16, "
            f"got {tuple(retained.shape)} in {retained.dtype}"
        )


def check_added(op: str, call: Any, main_grad: Tensor) -> None:
    checks.check_main_grad(op, call.operands, main_grad)
    if not isinstance(call, BackwardInPlace):
        return
    if call.sparse.gradient_threshold:
        refuse_hole(op, "threshold and main_grad")
    if not call.output_mask[1]:
        raise ValueError(f"{op}: expected output_mask to want grad_linear_weight, got {call.output_mask}")


def check_divergence_rows(op: str, call: Any, student_kl: Tensor) -> None:
    """Checks what forward returned for rows: teacher_shift and student_kl are empty if forward has none."""
    input = call.operands.input
    if call.options.of_student:
        checks.check_per_row(op, call.operands, student_kl=student_kl)
    shifts = {"shift": call.shift}
    if call.operands.teacher_probs is None:
        shifts["teacher_shift"] = call.teacher_shift
    for name, tensor in shifts.items():
        if tensor.shape != (2, input.shape[0]):
            raise ValueError(f"{op}: expected {name} of shape (2, {input.shape[0]}), got {tuple(tensor.shape)}")


CHECKS: dict[Any, Check] = {  # by group or argument, in this order
    Operands: check_head,
    RowOperands: check_head,
    LogitOperands: check_logits,
    KlDivOperands: lambda op, call, operands: kl_div_checks.check_operands(op, operands, call.options),
    "denominator": lambda op, call, _: checks.check_denominator(op, call.reduction),
    **{
        objective.options_of: lambda op, call, options: call.objective.check(op, options, call.tokens)
        for objective in RowObjective.named.values()
    },
    **{name: check_row(name) for name in TOKENS},
    **{name: check_number(name) for name in ("softcap", "logit_scale", "teacher_softcap", "teacher_logit_scale")},
    "target_weight": check_target_weight,
    "grad_target_logit": lambda op, call, grad: checks.check_per_target(
        op, call.operands.target, grad_target_logit=grad
    ),
    "student_kl": check_divergence_rows,
    "retained": check_retained,
    # forward only passes these options on to backward
    SparseGradient: lambda op, call, sparse: checks.check_sparse(op, sparse, call.operands.input),
    "main_grad": check_added,
}
