"""Which path a call would take, and which conditions rule out the others: the tables of ops/paths.py, for given
arguments.

If Triton makes a scalar loss, also the tables of triton/steps/chunking.py: how a step divides its tokens.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .entry.logits import rows_of
from .entry.low_rank import operands_of
from .entry.metrics import metric_names, statistics_for
from .entry.schemas import LowRankCrossEntropy
from .functional import (
    cross_entropy,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    linear_policy_loss,
)
from .math.sparse_gradient import SparseGradient
from .meta.arguments import ROW_LOSSES
from .ops.autocast import autocast_operands
from .ops.call_facts import (
    CallFacts,
    given_logits_facts,
    loss_facts,
    needs_gradient,
    pair_facts,
    sharding_of,
)
from .ops.paths import KERNELS, LOSS, SAVE_LOGITS, rows_to_save
from .support.rank_check import any_dtensor
from .support.table import Path, choose


def explain(function: Callable, *args, **kwargs) -> str:
    """What ``function(*args, **kwargs)`` would run and why, without running it. Whether the call accepts its arguments
    is not checked.

    Args:
        function: ``flce_ops.linear_cross_entropy``, ``linear_log_probs``, ``linear_policy_loss``, ``linear_kl_div`` or
            ``cross_entropy``; or ``torch.ops.flce.linear_cross_entropy_low_rank``.
        args, kwargs: the arguments of the call. Tensors on "meta" stand for tensors that no device holds.

    Returns:
        A table to print: each choice with its paths. The first path that nothing rules out runs. ``last_path()`` says
        what did run, and in how many chunks.

    Raises:
        TypeError: another function, or arguments that the function does not take.
        NotImplementedError: arguments for which no operator exists, because the call refuses them together.

    Example::

        >>> print(flce_ops.explain(flce_ops.linear_cross_entropy, hidden, weight, target))
        a scalar loss
          one pass      runs
          recompute     not needed
        flce::linear_cross_entropy_with_grad
          triton        ruled out: expects an NVIDIA GPU, half operands
          aten          runs
    """
    if function is ops.linear_cross_entropy_low_rank:
        return "\n".join(of_pair(LowRankCrossEntropy.bind(*args, **kwargs)))
    if function not in (linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_kl_div, cross_entropy):
        raise TypeError(
            "explain: expected first linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_kl_div or "
            f"cross_entropy of flce_ops, got {getattr(function, '__name__', type(function).__name__)}; pass the "
            "function, then its arguments"
        )
    function.check(args, kwargs)  # type: ignore[attr-defined]
    try:
        named = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {function.__name__} is {error}") from None
    named.apply_defaults()
    call = named.arguments
    return "\n".join(of_given_logits(call) if function is cross_entropy else of_head(function, call))


def of_head(function: Callable, call: dict) -> list[str]:
    call, positions = of_one_position(call)
    facts = facts_of_call(call)
    policy = function.__name__ in ROW_LOSSES
    probabilities = function is linear_cross_entropy and call["target"].is_floating_point()
    # linear_kl_div's operators compute the loss of class probabilities
    divergence = function is linear_kl_div or probabilities
    if divergence:
        facts = facts._replace(label_smoothing=False)  # label smoothing is part of the probabilities
    stem, title, in_forward = "linear_kl_div" if divergence else "linear_cross_entropy", "", "with_grad"
    if call.get("reduction", "none") != "none":
        title = "a scalar loss of a policy" if policy else "a scalar loss"
        if facts.vocabulary_dimensions > 0 and not (divergence or policy):
            title, in_forward = "a scalar loss over a sharded vocabulary", "vocab_parallel_with_grad"
    if call.get("support") is not None:  # backward makes the gradients
        title = ""
    lines, path = of_loss(title, facts)
    if path != "recompute":
        op = f"{function.__name__}_{in_forward}" if policy else f"{stem}_{in_forward}"
        lines += of_operators(facts, op)
        one_pass_step = in_forward == "with_grad" and not (divergence or facts.sparse)
        if one_pass_step and choose(KERNELS[op], facts).name == "triton":
            lines += tokens_in_triton(call, facts)
    else:
        of_support = call.get("support") is not None
        stem = "linear_support" if of_support else stem
        saving = facts.wants_gradient and not (divergence or of_support)
        if saving:
            lines += [line for title, paths in SAVE_LOGITS.items() for line in verdicts(title, paths, facts)]
        lines += forward_and_backward(stem, facts)
        if saving and not any_dtensor(call["input"], call["linear_weight"]):
            tokens = math.prod(call["input"].shape[:-1])
            rows = rows_to_save(facts, tokens, call["linear_weight"].shape[0])
            lines.append(f"logits of {rows} of {tokens} tokens saved")
    return [*lines, f"for each of {positions} positions"] if positions > 1 else lines


def of_loss(title: str, facts: CallFacts) -> tuple[list[str], str]:
    """Lines that say of each path of a scalar loss whether it runs and why not; and the chosen path, "recompute" if the
    loss is not a scalar.
    """
    if not title:
        return [], "recompute"
    return verdicts(title, LOSS[title], facts), choose(LOSS[title], facts).name


def of_operators(facts: CallFacts, *names: str) -> list[str]:
    if not set(names) <= KERNELS.keys():
        raise NotImplementedError("explain: these arguments are not implemented together; the call itself says which")
    return [line for name in names for line in verdicts(add_op_namespace_prefix(name), KERNELS[name], facts)]


def forward_and_backward(stem: str, facts: CallFacts) -> list[str]:
    backward = f"{stem}_backward_" if facts.main_grad else f"{stem}_backward"
    return of_operators(facts, f"{stem}_forward", *([backward] if facts.wants_gradient else []))


def of_one_position(call: dict) -> tuple[dict, int]:
    """For a K-dimensional loss: the call of its first position, and the number of positions."""
    linear_weight, positions = call["linear_weight"], 1
    if linear_weight.dim() > 2:
        heads = linear_weight.flatten(1, -2)
        positions, first = heads.shape[1], call["input"].dim() - 1 + call["target"].is_floating_point()
        call = call | {"linear_weight": heads[:, 0], "target": call["target"].flatten(first)[..., 0]}
    return call, positions


def of_given_logits(call: dict) -> list[str]:
    logits, copied = rows_of(call["logits"])
    facts = given_logits_facts(logits, call["inplace_backward"] or copied)
    facts = facts._replace(empty=logits.numel() == 0, one_class=logits.shape[1] == 1)
    lines, path = of_loss("a scalar loss of given logits" if call["reduction"] != "none" else "", facts)
    if path == "recompute":
        return lines + forward_and_backward("cross_entropy", facts)
    return lines + of_operators(facts, f"cross_entropy_with_grad{'_' if path == 'in place' else ''}")


def of_pair(call: LowRankCrossEntropy) -> list[str]:
    facts = pair_facts(operands_of(call))._replace(
        dtype=dtype_in_operators(call.input),
        empty=call.input.numel() == 0,
        one_class=call.linear_weight.shape[0] == 1,
        label_smoothing=call.numbers.label_smoothing != 0.0,
        softcap=call.numbers.softcap is not None,
    )
    lines, path = of_loss("a scalar loss of a head with a low-rank pair", facts)
    if path != "concatenated":
        return lines + of_operators(facts, "linear_cross_entropy_low_rank_with_grad")
    of_head, path = of_loss("a scalar loss", facts)
    if path == "one pass" and call.reduction != "none":
        return lines + of_head + of_operators(facts, "linear_cross_entropy_with_grad")
    return lines + of_head + of_operators(facts, *[f"linear_cross_entropy_{op}" for op in ("forward", "backward")])


def facts_of_call(call: dict) -> CallFacts:
    input = call["input"]
    sharding = {}
    if any_dtensor(input, call["linear_weight"]):
        from .distributed.layout import layout_of

        layout = layout_of(input, call["linear_weight"])
        if layout.splits_vocabulary:
            sharding = sharding_of(layout.vocabulary, layout.mesh.shape, call["linear_weight"].shape[0])
    facts = loss_facts(input, call["linear_weight"], call["linear_bias"], **sharding)
    teacher = call.get("teacher_input")
    return facts._replace(
        dtype=dtype_in_operators(input),
        empty=input.numel() == 0 or (teacher is not None and teacher.numel() == 0),
        one_class=call["linear_weight"].shape[0] == 1,
        label_smoothing=bool(call.get("label_smoothing")),
        softcap=call["softcap"] is not None,
        main_grad=call.get("main_grad") is not None,
        wants_gradient=facts.wants_gradient or learnt(call),
        teacher=None if teacher is None else dtype_in_operators(teacher),
        topk=has_topk(call),
        sparse=any(sparse_products(call)),
    )


def sparse_products(call: dict) -> tuple[bool, bool]:
    """Whether the gradients of input and linear_weight are sparse."""
    names = [name for name in SparseGradient._fields if name in call]
    wanted = [needs_gradient(call["input"]) or learnt(call), needs_gradient(call["linear_weight"])]
    return SparseGradient(**{name: call[name] for name in names}).products(wanted)


def has_topk(call: dict) -> bool:
    """Whether target has several classes per token. (linear_kl_div's target, which may be None, only says which tokens
    count.)
    """
    target = call.get("target")
    return target is not None and not target.is_floating_point() and target.dim() == call["input"].dim()


def dtype_in_operators(tensor: Tensor) -> torch.dtype:
    """The tensor's dtype after autocast."""
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return autocast_operands(tensor.device.type, alike)[0].dtype


def learnt(call: dict) -> bool:
    """Whether a scale gets a gradient. Such a scale is multiplied into input."""
    scales = (call["logit_scale"], call["temperature"])
    return torch.is_grad_enabled() and any(isinstance(scale, Tensor) and scale.requires_grad for scale in scales)


def tokens_in_triton(call: dict, facts: CallFacts) -> list[str]:
    """How a step divides its tokens. Empty if the step would copy its operands, to another dtype or with padding."""
    from .triton.rows.row_statistics import sum_pairs
    from .triton.steps.chunking import CHUNKINGS, problem_of

    input, linear_weight = call["input"], call["linear_weight"]
    hidden, size = linear_weight.shape[1], linear_weight.dtype.itemsize
    if any_dtensor(input, linear_weight) or linear_weight.dtype != facts.dtype or hidden * size % 16:
        return []
    wanted = [needs_gradient(call[name]) for name in ("input", "linear_weight", "linear_bias")]
    wanted[0] |= learnt(call)
    problem = problem_of(
        input.numel() // hidden,
        linear_weight,
        wanted,
        smoothed=facts.label_smoothing,
        sum_pairs=sum_pairs(statistics_for(metric_names("explain", call.get("return_metrics", False)))),
        batch_invariant=bool(call.get("batch_invariant")),
    )
    return [line for title, paths in CHUNKINGS.items() for line in verdicts(title, paths, problem)]


def verdicts(title: str, paths: tuple[Path, ...], facts: Any) -> list[str]:
    chosen, lines = choose(paths, facts), [title]
    for path in paths:
        reasons = path.ruled_out_by(facts)
        verdict = "runs" if path is chosen else f"ruled out: expects {', '.join(reasons)}" if reasons else "not needed"
        lines.append(f"  {path.name:<14}{verdict}")
    return lines
