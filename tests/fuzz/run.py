"""Outputs and derivatives of a case: this package's in its mode, the oracle's by torch.autograd.grad."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz import oracle
from tests.fuzz.cases import SECOND_ORDER, Case
from tests.fuzz.ours import Ours
from tests.fuzz.problem import Problem, Tensors, accumulated

Function = Callable[[Case, Tensors], Tensors]

DIFFERENTIABLE = ("loss", "log_probs", "lse", "entropy", "tail")
BATCH = (1.0, -2.0, 0.5)  # grad_output of the mode "batched"


# --- the objective ---


def outputs_of(problem: Problem, function: Function, leaves: Tensors) -> tuple[Tensors, Tensors]:
    """What the function returns, and the arguments it was given."""
    case = problem.case
    at = problem.arguments(leaves)
    if "token_weight of losses" in case.relations:
        at["token_weight"] = torch.exp(-0.1 * function(problem.first_call, at)["loss"])
    if "two calls" in case.relations:
        half = case.tokens[0] // 2
        parts = [split_tokens(case, at, slice(0, half)), split_tokens(case, at, slice(half, None))]
        first, second = (function(case, part) for part in parts)
        found = {"loss": first["loss"] + second["loss"]}
        rows = [name for name in first if name in ("argmax", "is_top1", "logits") or name.startswith("metric ")]
        found |= {name: torch.cat([first[name], second[name]]) for name in rows}
    elif case.mode == "vmap" and isinstance(function, Ours):
        per_token = tokens_of(at)

        def one(part: Tensors) -> Tensors:
            return function(case, {**at, **part})

        found = torch.func.vmap(one, randomness="same")({name: at[name] for name in per_token})
    else:
        found = function(case, at)
    return found, at


def tokens_of(at: Tensors) -> list[str]:
    names = ("input", "target", "token_weight", "teacher_input", "teacher_probs", "target_weight")
    names += (*oracle.OF_POLICY, "a")
    return [name for name in names if name in at]


def split_tokens(case: Case, at: Tensors, rows: slice) -> Tensors:
    return {name: tensor[rows] if name in tokens_of(at) else tensor for name, tensor in at.items()}


def objective_of(problem: Problem, function: Function, leaves: Tensors) -> tuple[Tensor, Tensors]:
    case = problem.case
    found, at = outputs_of(problem, function, leaves)
    total: Tensor | float = 0.0
    for name in DIFFERENTIABLE:
        if name in found:
            total = total + (found[name] * leaves[f"cotangent of {name}"].to(found[name].dtype)).sum()
    if "penalty" in case.relations:
        total = total + 0.01 * (accumulated(at["input"]).square().sum() + accumulated(at["weight"]).square().sum())
    return case.factor * total, found


# --- derivatives ---


def run_ours(problem: Problem) -> Tensors:
    return run(problem, Ours(problem.case), problem.case.mode)


def run_oracle(problem: Problem, dtype: torch.dtype | None = None) -> Tensors:
    return run(problem, oracle.call, oracle_mode(problem.case.mode), dtype)


def run(problem: Problem, function: Function, mode: str, dtype: torch.dtype | None = None) -> Tensors:
    """Outputs under their names; "grad of x" and "second of x" for every leaf that needs a gradient. `dtype` is that of
    all leaves.
    """
    case = problem.case
    leaves = problem.leaves(dtype)
    wanted = {name: leaves[name] for name in problem.wanted}
    autocast = case.autocast if dtype is None else ""

    def objective(some: Tensors) -> tuple[Tensor, Tensors]:
        device_type = leaves["weight"].device.type
        with torch.autocast(device_type, getattr(torch, autocast)) if autocast else nullcontext():
            return objective_of(problem, function, {**leaves, **some})

    result = derive(mode, problem, objective, wanted, leaves.get("main_grad"))
    ours, way = isinstance(function, Ours), case.mode.removeprefix("compile_")
    if way in ("two_forwards", "two_backwards") and not ours:
        result |= {name: 2.0 * tensor for name, tensor in result.items() if name.startswith("grad of ")}
    if case.main_grad:  # autograd got no gradient of the weight
        of_weight, before = result.pop("grad of weight"), leaves["main_grad"].double()
        result["main_grad"] = leaves["main_grad"] if ours else of_weight + (0.0 if way == "zeroed" else before)
    return {name: tensor.detach() for name, tensor in result.items()}


def oracle_mode(mode: str) -> str:
    if mode in ("no_grad", "inference_mode", "batched", "retain_graph", "hvp"):
        return mode if mode != "hvp" else "second_only"
    return "create_graph" if mode in SECOND_ORDER else "grad"


def derive(
    mode: str, problem: Problem, objective: Callable, wanted: Tensors, main_grad: Tensor | None = None
) -> Tensors:
    names, tensors = list(wanted), list(wanted.values())

    def named(kind: str, grads: list[Tensor | None]) -> Tensors:
        return {
            f"{kind} of {name}": torch.zeros_like(tensor) if grad is None else grad
            for name, tensor, grad in zip(names, tensors, grads)
        }

    if mode in ("no_grad", "inference_mode"):
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            return objective(wanted)[1]
    if mode in ("func", "func_twice"):
        return by_torch_func(mode, problem, objective, wanted, named)
    if mode == "hvp":
        vectors = tuple(problem.bases[f"projection of {name}"].to(leaf.dtype) for name, leaf in wanted.items())
        products = torch.autograd.functional.hvp(
            lambda *some: objective(dict(zip(names, some)))[0], tuple(tensors), vectors
        )[1]
        return named("second", products)
    if mode == "forward_mode":
        tangents = {name: torch.ones_like(leaf) for name, leaf in wanted.items()}
        torch.func.jvp(
            lambda some: objective(some)[0], ({n: t.detach().contiguous() for n, t in wanted.items()},), (tangents,)
        )
        return {}
    if mode.startswith("compile"):
        torch._dynamo.reset()
        backend = "eager" if mode == "compile_eager" else "aot_eager"
        objective = torch.compile(objective, backend=backend, fullgraph=True)
        mode = mode.removeprefix("compile_")
    if mode in ("checkpoint", "reentrant_checkpoint"):
        value, found = checkpointed(objective, names, tensors, mode == "reentrant_checkpoint")
    else:
        with saved_tensor_hooks() if mode == "saved_tensor_hooks" else nullcontext():
            value, found = objective(wanted)
    if mode in ("backward", "reentrant_checkpoint", "two_forwards", "two_backwards", "zeroed"):
        again = objective(wanted)[0] if mode == "two_forwards" else value
        if mode == "zeroed":
            main_grad.zero_()
        value.backward(retain_graph=mode == "two_backwards")
        if mode in ("two_forwards", "two_backwards"):
            again.backward()
        return {**found, **named("grad", [tensor.grad for tensor in tensors])}
    if mode == "batched":
        factors = torch.tensor(BATCH, dtype=value.dtype, device=value.device)
        batched = torch.autograd.grad(value, tensors, factors, is_grads_batched=True, allow_unused=True)
        return {**found, **named("batched grad", batched)}
    higher = mode in ("create_graph", "create_graph_once", "second_only", "third")
    first = torch.autograd.grad(
        value, tensors, retain_graph=higher or mode == "retain_graph", create_graph=higher, allow_unused=True
    )
    found = {**found, **named("grad", first)}
    if mode == "retain_graph":
        again = torch.autograd.grad(value, tensors, torch.full_like(value, -2.0), allow_unused=True)
        return {**found, **named("second backward", again)}
    if mode in ("create_graph", "second_only", "third"):
        second = second_of(problem, names, tensors, first, create_graph=mode == "third")
        if mode == "third":
            second_of(problem, names, tensors, second, create_graph=False)
        second = named("second", second)
        return second if mode == "second_only" else {**found, **second}
    return found


def second_of(
    problem: Problem, names: list[str], tensors: list[Tensor], first: list[Tensor | None], *, create_graph: bool
) -> list[Tensor | None]:
    projected = projection(problem, dict(zip(names, first)))
    if not isinstance(projected, Tensor) or not projected.requires_grad:  # the gradient is constant
        return [None] * len(names)
    return torch.autograd.grad(projected, tensors, create_graph=create_graph, allow_unused=True)


def projection(problem: Problem, grads: dict[str, Tensor | None]) -> Tensor | float:
    total: Tensor | float = 0.0
    for name, grad in grads.items():
        if grad is not None:
            total = (
                total + (accumulated(grad) * problem.bases[f"projection of {name}"].to(accumulated(grad).dtype)).sum()
            )
    return total


def by_torch_func(mode: str, problem: Problem, objective: Callable, wanted: Tensors, named: Callable) -> Tensors:
    constant = {name: leaf.detach() for name, leaf in wanted.items()}
    gradient = torch.func.grad(objective, has_aux=True)
    if mode == "func":
        grads, found = gradient(constant)
        return {**found, **named("grad", grads.values())}

    def projected(some: Tensors) -> tuple[Tensor, tuple]:
        grads, found = gradient(some)
        return projection(problem, grads), (grads, found)

    second, (grads, found) = torch.func.grad(projected, has_aux=True)(constant)
    return {**found, **named("grad", grads.values()), **named("second", second.values())}


def checkpointed(
    objective: Callable, names: list[str], tensors: list[Tensor], reentrant: bool
) -> tuple[Tensor, Tensors]:
    keys: list[str] = []

    def flat(*some: Tensor) -> tuple[Tensor, ...]:
        value, found = objective(dict(zip(names, some)))
        keys[:] = found
        return value, *found.values()

    value, *found = checkpoint(flat, *tensors, use_reentrant=reentrant)
    return value, dict(zip(keys, found))


def saved_tensor_hooks() -> AbstractContextManager:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)
