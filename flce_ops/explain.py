"""Which path a call would take, and which condition rules the others out: the tables of ops/paths.py, for arguments.

Where Triton makes a scalar loss, also how it takes the tokens: those of triton/cut.py.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flce_ops.entry.logits import rows_of
from flce_ops.entry.low_rank import operands_of
from flce_ops.entry.metrics import metric_names, statistics_for
from flce_ops.entry.schemas import LowRankCrossEntropy
from flce_ops.functional import (
    cross_entropy,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    linear_policy_loss,
)
from flce_ops.math.sparse_gradient import SparseGradient
from flce_ops.ops.paths import KERNELS, LOSS, RETAIN
from flce_ops.ops.retained import rows_to_retain
from flce_ops.ops.situations import (
    Situation,
    given_logits_situation,
    loss_situation,
    needs_gradient,
    pair_situation,
    sharding_of,
)
from flce_ops.support.dtensor import any_dtensor
from flce_ops.support.table import Path, choose


def explain(function: Callable, *args, **kwargs) -> str:
    """What ``function(*args, **kwargs)`` would run and why, without running it.

    Args:
        function: ``flce_ops.linear_cross_entropy``, ``linear_log_probs``, ``linear_policy_loss``, ``linear_kl_div`` or
            ``cross_entropy``; or ``torch.ops.flce.linear_cross_entropy_low_rank``.
        args, kwargs: its arguments; tensors on "meta" stand for what no device holds.

    Returns:
        A table to print: each choice with its paths, the first of which that nothing rules out runs. ``last_path()``
        says what did run, and in how many chunks.

    Raises:
        TypeError: another function, or arguments that it does not take.

    Example::

        >>> print(flce_ops.explain(flce_ops.linear_cross_entropy, hidden, weight, target))
        a scalar loss
          one pass      runs
          recompute     not needed
        flce::linear_cross_entropy_with_grad
          triton        ruled out: expects an NVIDIA GPU, half operands
          aten          runs
    """
    if function is torch.ops.flce.linear_cross_entropy_low_rank:
        return of_pair(LowRankCrossEntropy.bind(*args, **kwargs))
    if function not in (linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_kl_div, cross_entropy):
        raise TypeError(
            "explain: expected linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_kl_div or "
            f"cross_entropy of flce_ops, got {getattr(function, '__name__', function)!r}"
        )
    named = inspect.signature(function).bind(*args, **kwargs)
    named.apply_defaults()
    call = named.arguments
    if function is cross_entropy:
        return of_given_logits(call)
    call, positions = of_one_position(call)
    lines = of_head(function, call)
    if positions > 1:
        lines.append(f"for each of {positions} positions")
    return "\n".join(lines)


def of_head(function: Callable, call: dict) -> list[str]:
    situation = situation_of_call(call)
    policy = function is linear_policy_loss
    probabilities = function is linear_cross_entropy and call["target"].is_floating_point()
    divergence = function is linear_kl_div or probabilities  # whose operators compute the loss of probabilities
    if divergence:
        situation = situation._replace(label_smoothing=False)  # it is in the probabilities
    tables: dict[str, tuple[Path, ...]] = {}
    stem, op = "linear_kl_div" if divergence else "linear_cross_entropy", "forward"
    if call.get("reduction", "none") != "none":
        sharded = situation.vocabulary_dimensions > 0 and not (divergence or policy)
        title = "a scalar loss over a sharded vocabulary" if sharded else "a scalar loss"
        title += " of a policy" * policy
        tables[title] = LOSS[title]
        if choose(LOSS[title], situation).name != "recompute":
            op = "vocab_parallel_with_grad" if sharded else "with_grad"
            stem = "linear_policy_loss" if policy else stem
    retaining = op == "forward" and not divergence and situation.wants_gradient
    if retaining:
        tables |= RETAIN
    backward = "backward_" if situation.main_grad else "backward"
    ops = [op] if "with_grad" in op or not situation.wants_gradient else ["forward", backward]
    tables |= {f"flce::{stem}_{op}": KERNELS[f"{stem}_{op}"] for op in ops}
    lines = [line for title, paths in tables.items() for line in verdicts(title, paths, situation)]
    if retaining and not any_dtensor(call["input"], call["linear_weight"]):
        tokens = math.prod(call["input"].shape[:-1])
        rows = rows_to_retain(situation, tokens, call["linear_weight"].shape[0])
        lines.append(f"logits of {rows} of {tokens} tokens retained")
    one_pass_step = op == "with_grad" and not (divergence or situation.sparse)
    if one_pass_step and choose(KERNELS[f"{stem}_{op}"], situation).name == "triton":
        lines += tokens_in_triton(call, situation)
    return lines


def of_one_position(call: dict) -> tuple[dict, int]:
    """Of a K-dimensional loss, the call of its first position, and how many there are."""
    linear_weight, positions = call["linear_weight"], 1
    if linear_weight.dim() > 2:
        heads = linear_weight.flatten(1, -2)
        positions, first = heads.shape[1], call["input"].dim() - 1 + call["target"].is_floating_point()
        call = call | {"linear_weight": heads[:, 0], "target": call["target"].flatten(first)[..., 0]}
    return call, positions


def of_given_logits(call: dict) -> str:
    logits, copied = rows_of(call["logits"])
    situation = given_logits_situation(logits, call["inplace_backward"] or copied)
    situation = situation._replace(empty=logits.numel() == 0, one_class=logits.shape[1] == 1)
    tables: dict[str, tuple[Path, ...]] = {}
    path = "recompute"
    if call["reduction"] != "none":
        title = "a scalar loss of given logits"
        tables[title] = LOSS[title]
        path = choose(LOSS[title], situation).name
    ops = {"in place": ["with_grad_"], "one pass": ["with_grad"]}.get(path, ["forward", "backward"])
    if path == "recompute" and not situation.wants_gradient:
        ops = ["forward"]
    tables |= {f"flce::cross_entropy_{op}": KERNELS[f"cross_entropy_{op}"] for op in ops}
    return "\n".join(line for title, paths in tables.items() for line in verdicts(title, paths, situation))


def of_pair(call: LowRankCrossEntropy) -> str:
    situation = pair_situation(operands_of(call))._replace(
        dtype=dtype_in_operators(call.input),
        empty=call.input.numel() == 0,
        one_class=call.linear_weight.shape[0] == 1,
        label_smoothing=call.numbers.label_smoothing != 0.0,
        softcap=call.numbers.softcap is not None,
    )
    title, ops = "a scalar loss of a head with a low-rank pair", ["low_rank_with_grad"]
    tables = {title: LOSS[title]}
    if choose(LOSS[title], situation).name == "concatenated":
        tables["a scalar loss"] = LOSS["a scalar loss"]
        in_forward = call.reduction != "none" and choose(LOSS["a scalar loss"], situation).name == "one pass"
        ops = ["with_grad"] if in_forward else ["forward", "backward"]
    tables |= {f"flce::linear_cross_entropy_{op}": KERNELS[f"linear_cross_entropy_{op}"] for op in ops}
    return "\n".join(line for title, paths in tables.items() for line in verdicts(title, paths, situation))


def situation_of_call(call: dict) -> Situation:
    input = call["input"]
    sharding = {}
    if any_dtensor(input, call["linear_weight"]):
        from flce_ops.distributed.layout import layout_of

        layout = layout_of(input, call["linear_weight"])
        sharding = sharding_of(layout.vocabulary, layout.mesh.shape, call["linear_weight"].shape[0])
        if not layout.splits_vocabulary:
            sharding = {}
    situation = loss_situation(input, call["linear_weight"], call["linear_bias"], **sharding)
    teacher = call.get("teacher_input")
    return situation._replace(
        dtype=dtype_in_operators(input),
        empty=input.numel() == 0 or (teacher is not None and teacher.numel() == 0),
        one_class=call["linear_weight"].shape[0] == 1,
        label_smoothing=bool(call.get("label_smoothing")),
        softcap=call["softcap"] is not None,
        main_grad=call.get("main_grad") is not None,
        wants_gradient=situation.wants_gradient or learnt(call),
        teacher=None if teacher is None else dtype_in_operators(teacher),
        slots=has_slots(call),
        sparse=any(sparse_products(call)),
    )


def sparse_products(call: dict) -> tuple[bool, bool]:
    """Whether the gradients of input and linear_weight are sparse."""
    names = [name for name in SparseGradient._fields if name in call]
    wanted = [needs_gradient(call["input"]) or learnt(call), needs_gradient(call["linear_weight"])]
    return SparseGradient(**{name: call[name] for name in names}).products(wanted)


def has_slots(call: dict) -> bool:
    """Several classes a token. (linear_kl_div's target, which may be None, says which tokens count.)"""
    target = call.get("target")
    return target is not None and not target.is_floating_point() and target.dim() == call["input"].dim()


def dtype_in_operators(tensor: Tensor) -> torch.dtype:
    """As autocast hands it to them."""
    device, dtype = tensor.device.type, tensor.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


def learnt(call: dict) -> bool:
    """A scale with a gradient is multiplied into input."""
    scales = (call["logit_scale"], call["temperature"])
    return torch.is_grad_enabled() and any(isinstance(scale, Tensor) and scale.requires_grad for scale in scales)


def tokens_in_triton(call: dict, situation: Situation) -> list[str]:
    """How a step takes them, where it runs on the operands as they are: no copies in another dtype or with zeros."""
    from flce_ops.triton.cut import CUTS, problem_of
    from flce_ops.triton.row_statistics import sum_pairs

    input, linear_weight = call["input"], call["linear_weight"]
    hidden, size = linear_weight.shape[1], linear_weight.dtype.itemsize
    if any_dtensor(input, linear_weight) or linear_weight.dtype != situation.dtype or hidden * size % 16:
        return []
    wanted = [needs_gradient(call[name]) for name in ("input", "linear_weight", "linear_bias")]
    wanted[0] |= learnt(call)
    problem = problem_of(
        input.numel() // hidden,
        linear_weight,
        wanted,
        smoothed=situation.label_smoothing,
        sum_pairs=sum_pairs(statistics_for(metric_names("explain", call["return_metrics"]))),
    )
    return [line for title, paths in CUTS.items() for line in verdicts(title, paths, problem)]


def verdicts(title: str, paths: tuple[Path, ...], situation: Any) -> list[str]:
    chosen, lines = choose(paths, situation), [title]
    for path in paths:
        reasons = path.ruled_out_by(situation)
        verdict = "runs" if path is chosen else f"ruled out: expects {', '.join(reasons)}" if reasons else "not needed"
        lines.append(f"  {path.name:<14}{verdict}")
    return lines
