"""Checks the public functions' arguments and refuses them by name, before any work and without reading tensor data.

This file checks each argument by itself and against the shapes of others. refusals.py has the combinations that are not
implemented.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from ..math import options
from ..math.options import TEACHER, KlDivOperands, Number, accumulation_dtype
from ..math.sparse_gradient import SparseGradient
from ..meta import checks
from ..meta.arguments import CrossEntropy, KlDiv, LogitsCrossEntropy, LogProbs, PolicyLoss, TokenLoss
from ..meta.checks import holds, same_shape
from ..objectives import cross_entropy, divergence, policy, token_function
from ..support.refusals import hint_of_target, refuse_hole
from ..support.sizes import SYMBOLIC, known_only_when_it_runs
from ..support.torch_private import check_value
from .loss import wants_gradient

OP = "linear_cross_entropy"
RANGES = options.RANGES | cross_entropy.RANGES | policy.RANGES
ReductionName = Literal["none", "mean", "sum"]
REDUCTIONS = get_args(ReductionName)
DENSE = SparseGradient()  # every entry is kept
CHOOSES = ("label_smoothing",)  # numbers whose value chooses a formula
FROM_DATA = (
    "{op}: {name} chooses a formula, so a graph cannot take it from data; pass a Python number that does not come from "
    ".item() inside the compiled function"
)


def check_arguments(call: CrossEntropy) -> None:
    target, weight, target_weight = call.target, call.weight, call.target_weight
    if weight is not None or target_weight is not None:
        checks.check_dense(OP, weight=weight, target_weight=target_weight)
    check_head(OP, call)
    if weight is not None:
        check_class_weight(OP, weight, call.input, "input", call.linear_weight.shape[0], "linear_weight")
    if target_weight is not None:
        checks.check_floating(OP, target_weight=target_weight)
        check_shape(OP, "target_weight", target_weight, target.shape, "one weight per class of target, got")
        checks.check_constants(OP, target_weight=target_weight)
        checks.check_device(OP, call.input, target_weight=target_weight)
    check_reduced(OP, call, call.input, token_weight=call.token_weight)


def check_logits(op: str, call: LogitsCrossEntropy) -> None:
    """Checks the arguments of a loss of given logits."""
    logits, target = call.logits, call.target
    checks.check_dense(op, logits=logits, target=target, weight=call.weight)
    if logits.dtype not in checks.SUPPORTED_DTYPES:
        checks.refuse_dtype(op, "logits", logits)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{op}: expected logits of shape (..., V) with at least one class, got {tuple(logits.shape)}")
    checks.check_target_dtype(op, target)
    if not same_shape(target.shape, logits.shape[:-1]):
        unknown = known_only_when_it_runs(*target.shape, *logits.shape)
        hint = "" if unknown else hint_of_target(target, logits, "logits", logits.shape[-1])
        what = f"one class index per row of logits {tuple(logits.shape)}, got"
        check_shape(op, "target", target, logits.shape[:-1], what, hint)
    checks.check_device(op, logits, "logits", target=target)
    if call.weight is not None:
        check_class_weight(op, call.weight, logits, "logits", logits.shape[-1], "classes of logits")
    check_ranges(op, call.numbers._fields, call.numbers)
    check_reduced(op, call, logits, of="logits", token_weight=call.token_weight)


def check_token_loss(op: str, call: TokenLoss, function: token_function.TokenLoss) -> None:
    check_head(op, call)
    tokens = call.input.shape[:-1]
    for place, tensor in enumerate(call.tensors):
        name = function.name_of_tensor(place)
        named: Any = {name: tensor}
        checks.check_dense(op, **named)
        checks.check_constants(op, **named)
        checks.check_device(op, call.input, **named)
        checks.check_real(op, **named)
        if tensor.dim() and not same_shape(tensor.shape[: len(tokens)], tokens):
            raise ValueError(
                f"{op}: expected {name} of shape {tuple(tokens)}, with dimensions of a token after these, or a 0-d "
                f"tensor, got {tuple(tensor.shape)}; one number a sequence is {name}[:, None].expand_as(target)"
            )
    check_reduced(op, call, call.input, token_weight=call.token_weight)


def check_policy_loss(op: str, call: PolicyLoss) -> None:
    advantages = call.tokens.advantages
    if call.target.is_floating_point() and advantages.dtype in checks.TARGET_DTYPES:
        raise TypeError(
            f"{op}: expected target of class indices in int64 or int32, got {call.target.dtype}, and advantages in "
            f"{advantages.dtype}; are the two swapped?"
        )
    check_head(op, call)
    constants = call.tokens._asdict()
    checks.check_constants(op, **constants)
    check_ranges(op, call.own._fields, cast(Any, call.own))
    hint = "; one a sequence is {name}[:, None].expand_as(target)"
    what = "one number per token, got"
    check_reduced(op, call, call.input, what=what, hint=hint, **constants, token_weight=call.token_weight)


def check_divergence(op: str, call: KlDiv, operands: KlDivOperands) -> None:
    """Checks that only the entry of linear_kl_div can make, or must make before it reshapes `operands`."""
    target, input = call.target, operands.input
    checks.check_dense(op, **operands._asdict(), target=target)
    if input.dim() < 1:
        raise ValueError(f"{op}: expected input of shape (..., D), got a 0-d tensor")
    checks.check_linear(op, input, operands.linear_weight, operands.linear_bias)
    check_teacher(op, operands)
    checks.check_constants(op, "teacher", **{name: getattr(operands, name) for name in TEACHER})
    for name in ("teacher_logit_scale", "teacher_softcap"):
        if operands.teacher_probs is not None and getattr(call, name) is not None:
            raise ValueError(f"{op}: {name} is of the teacher's logits, but teacher_probs are given; leave {name} out")
    if target is not None:
        checks.check_target_dtype(op, target)
    checks.check_device(op, **operands._asdict())
    check_reduced(
        op, call, input, what="one entry per token of input, got", target=target, token_weight=call.token_weight
    )


def check_teacher(op: str, operands: KlDivOperands) -> None:
    """Checks that there is either teacher_input with teacher_weight, or teacher_probs, with the student's tokens and
    classes.
    """
    input, classes = operands.input, operands.linear_weight.shape[0]
    teacher_input, teacher_weight = operands.teacher_input, operands.teacher_weight
    if operands.teacher_probs is not None:
        if any(tensor is not None for tensor in (teacher_input, teacher_weight, operands.teacher_bias)):
            raise ValueError(
                f"{op}: teacher_probs came together with teacher_input, teacher_weight or teacher_bias; pass the "
                "probabilities or the pair that makes them, not both"
            )
        what = "a probability for each token of input and row of linear_weight, got"
        check_shape(op, "teacher_probs", operands.teacher_probs, (*input.shape[:-1], classes), what)
        checks.check_floating(op, teacher_probs=operands.teacher_probs)
        return
    if teacher_input is None or teacher_weight is None:
        given = [name for name in TEACHER[:3] if getattr(operands, name) is not None]
        raise ValueError(
            f"{op}: expected teacher_input and teacher_weight, or teacher_probs; got {' and '.join(given) or 'neither'}"
        )
    if teacher_input.dim() < 1 or not same_shape(teacher_input.shape[:-1], input.shape[:-1]):
        raise ValueError(
            f"{op}: expected teacher_input of shape {tuple(input.shape[:-1])} + (E,), with the tokens of input "
            f"{tuple(input.shape)}, got {tuple(teacher_input.shape)}"
        )
    names = ("teacher_input", "teacher_weight", "teacher_bias")
    checks.check_linear(op, teacher_input, teacher_weight, operands.teacher_bias, names, classes_at_least=0)
    if teacher_weight.shape[0] != classes:
        raise ValueError(
            f"{op}: student and teacher must have one vocabulary, but linear_weight has {classes} rows and "
            f"teacher_weight {teacher_weight.shape[0]}; where one is padded, pass vocab_size, the classes of both"
        )


def check_reduced(
    op: str,
    call: CrossEntropy | LogitsCrossEntropy | TokenLoss | PolicyLoss | KlDiv,
    rows: Tensor,  # (..., D) or (..., V)
    *,
    of: str = "input",
    what: str = "one factor per token, got",
    hint: str = "",
    **per_token: Tensor | None,  # (...)
) -> None:
    """Checks what a loss of tokens multiplies, adds and divides by."""
    for name, tensor in per_token.items():
        if tensor is not None:
            checks.check_dense(op, **{name: tensor})
            checks.check_device(op, rows, of, **{name: tensor})
            checks.check_real(op, **{name: tensor})
            check_shape(op, name, tensor, rows.shape[:-1], what, hint.replace("{name}", name))
    if call.reduction not in REDUCTIONS:
        check_reduction(op, call.reduction)
    if call.normalizer is not None:
        check_normalizer(op, call.normalizer, call.reduction, rows, of)


def check_class_weight(op: str, weight: Tensor, rows: Tensor, of: str, num_classes: int, of_classes: str) -> None:
    checks.check_per_class(op, "weight", weight, num_classes, of_classes)
    checks.check_device(op, rows, of, weight=weight)
    checks.check_constants(op, weight=weight)


def check_shape(op: str, name: str, tensor: Tensor | None, shape: Sequence[int], what: str, hint: str = "") -> None:
    if tensor is not None and not same_shape(tensor.shape, shape):
        raise ValueError(f"{op}: expected {name} of shape {tuple(shape)}, {what} {tuple(tensor.shape)}{hint}")


def check_head(op: str, call: CrossEntropy | LogProbs | TokenLoss | PolicyLoss) -> None:
    """Checks the arguments that make logits, and the targets."""
    input, linear_weight, target, linear_bias = call.input, call.linear_weight, call.target, call.linear_bias
    checks.check_dense(op, input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias)
    if input.dim() < 1:
        raise ValueError(f"{op}: expected input of shape (..., D), got a 0-d tensor")
    checks.check_linear(op, input, linear_weight, linear_bias)
    if isinstance(call, CrossEntropy) and target.is_floating_point():
        check_class_probabilities(call)
    elif isinstance(call, CrossEntropy):
        check_class_indices(op, target, input, linear_weight, topk=call.target_weight is not None)
    else:
        topk = isinstance(call, LogProbs | TokenLoss) and target.dim() == input.dim()
        check_class_indices(op, target, input, linear_weight, topk=topk)
    checks.check_device(op, input, linear_weight=linear_weight, target=target, linear_bias=linear_bias)
    check_ranges(op, call.numbers._fields, call.numbers)
    if call.sparse != DENSE:
        checks.check_sparse(op, call.sparse, call.input if wants_gradient(call) else None)


def check_class_indices(op: str, target: Tensor, input: Tensor, linear_weight: Tensor, *, topk: bool) -> None:
    """Checks a target of shape (...), or with `topk` (..., K)."""
    if target.dtype not in checks.TARGET_DTYPES:
        checks.check_target_dtype(op, target)
    tokens = tuple(input.shape[:-1])
    if topk and not (
        target.dim() == input.dim() and same_shape(target.shape[:-1], tokens) and holds(target.shape[-1] > 0)
    ):
        raise ValueError(
            f"{op}: expected target of shape {tokens} + (K,), K class indices (at least one) per token of input "
            f"{tuple(input.shape)}, got {tuple(target.shape)}"
        )
    if not topk and not same_shape(target.shape, tokens):
        hint = ""
        if not known_only_when_it_runs(*target.shape, *tokens):  # a comparison would be a guard
            hint = hint_of_target(target, input, "input", linear_weight.shape[0], probabilities=op == OP)
            if not hint and op == OP and target.dim() == input.dim() and target.shape[:-1] == tokens:
                hint = "; several classes a token need target_weight, a weight for each"
            if target.shape == linear_weight.shape[:-1]:
                hint = "; are input and linear_weight swapped?"
        check_shape(op, "target", target, tokens, f"one class index per token of input {tuple(input.shape)}, got", hint)


def check_class_probabilities(call: CrossEntropy) -> None:
    """Checks a floating target."""
    target, tokens, num_classes = call.target, call.input.shape[:-1], call.linear_weight.shape[0]
    if call.target_weight is not None:
        raise TypeError(
            f"{OP}: target_weight stands beside a target of class indices, of shape {tuple(tokens)} + (K,), but target "
            f"has dtype {target.dtype}; class probabilities are weights themselves: leave target_weight out"
        )
    if not same_shape(target.shape, (*tokens, num_classes)):
        raise TypeError(
            f"{OP}: expected target of class indices in int64 or int32, of shape {tuple(tokens)}, or of class "
            f"probabilities, of shape {(*tokens, num_classes)}; got {target.dtype} of shape {tuple(target.shape)}; for "
            "class indices pass target.long()"
        )
    checks.check_constants(OP, target=target)
    if call.ignore_index != -100:
        raise ValueError(
            f"{OP}: ignore_index is a class index, but target holds class probabilities; leave it out (got "
            f"{call.ignore_index}), and give tokens that do not count a token_weight of 0"
        )
    undeclared = set(cross_entropy.LossOptions._fields) - set(divergence.OPTIONS_OF_PROBABILITIES)
    for name in sorted(undeclared):
        if getattr(call.numbers, name) != cross_entropy.LossNumbers._field_defaults[name]:
            instead = "; add it from linear_log_probs' lse" if name == "z_loss" else ""
            refuse_hole(OP, "option of probabilities", name=name, instead=instead)


def check_ranges(op: str, names: Iterable[str], numbers: Iterable[Number | None]) -> None:
    for name, number in zip(names, numbers):
        if number is None or name not in RANGES:
            continue
        expected, least, largest = RANGES[name]
        if number is True or number is False:
            raise TypeError(f"{op}: expected {name} to be a number, got {number}")
        if isinstance(number, SYMBOLIC) and known_only_when_it_runs(number):
            if name in CHOOSES:
                raise ValueError(FROM_DATA.format(op=op, name=name))
            value = torch.ones((), dtype=torch.float64) * number
            check_value((value >= least) & (value <= largest), f"{op}: {expected}, got another number")
        elif not least <= number <= largest:
            raise ValueError(f"{op}: {expected}, got {number}")


def check_reduction(op: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: expected reduction to be one of {', '.join(REDUCTIONS)}, got {reduction!r}")


def resolve_ignore_index(op: str, ignore_index: int | None, target: Tensor | None) -> int:
    """The integer for ignore_index. None is the default of torch.nn.functional.linear_cross_entropy and means -100
    there, which no class is.
    """
    if ignore_index is None:
        return -100
    beyond_int32 = isinstance(ignore_index, int) and not -(2**31) <= ignore_index < 2**31
    # compared with int32 targets, it would wrap around: 2^32 - 100 to -100
    if beyond_int32 and target is not None and target.dtype == torch.int32:
        raise ValueError(f"{op}: expected ignore_index in the range of target's dtype torch.int32, got {ignore_index}")
    return ignore_index


def check_normalizer(op: str, normalizer: Tensor, reduction: str, input: Tensor, of: str = "input") -> None:
    if reduction == "none":
        raise ValueError(f"{op}: normalizer divides a sum, so it needs reduction='mean' or 'sum', got 'none'")
    if normalizer.dim() != 0:
        raise ValueError(
            f"{op}: expected normalizer to be a number or a 0-d tensor, got shape {tuple(normalizer.shape)}"
        )
    if normalizer.dtype == torch.bool:
        raise TypeError(f"{op}: expected normalizer to be a number, got one in torch.bool")
    checks.check_dense(op, normalizer=normalizer)
    checks.check_real(op, normalizer=normalizer)
    if normalizer.device.type != "cpu":
        checks.check_device(op, input, of, normalizer=normalizer)


def check_torch_options(op: str, options: object, dtype: torch.dtype | None = None) -> None:
    """Checks `options`, the torch.nn.LinearCrossEntropyOptions of torch.nn.functional.linear_cross_entropy, as far as
    they apply.

    allow_retain_graph                    always allowed here
    batch_chunk_size, chunking_method     torch's bound on memory: accepted, without effect; the workspace bounds memory
    acc_dtype                             must be the dtype of sums here: float32; float64 for float64 operands
    acc_policy                            "auto", "compact", "balanced"; "accurate" changes 16-bit operands on a CPU

    Without `dtype`, the input's, refuses only what can never be right.
    """
    if options is None:
        return
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", None)  # exists since torch 2.13
    if kind is None or not isinstance(options, kind):
        raise TypeError(f"{op}: expected options to be a torch.nn.LinearCrossEntropyOptions or None, got {options!r}")
    if dtype is None:
        return
    expected = accumulation_dtype(dtype)
    if options.acc_dtype not in (None, expected):
        refuse_hole(op, "acc_dtype", given=options.acc_dtype, dtype=dtype, expected=expected)
