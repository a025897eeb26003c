"""flce_ops: eager, compiled, captured as a graph, with other budgets, on rows compacted by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..data import Problem
from ..kl_div import in_one_call as divergence_in_one_call
from ..modes import MODES, Loss, Mode, Step, step_of
from ..policy import in_one_call
from ..soft import in_one_call as of_soft_targets
from .unavailable import Unavailable

VERSION_OF = "flce_ops"
# A sparse gradient: (mode, exponent); the threshold is 2 to that power.
SPARSE = {
    **{f"ours_sparse_{-exponent}": ("unbiased", exponent) for exponent in (-10, -11, -12)},
    "ours_drop_12": ("drop", -12),
}
RETAINED = 4 << 30  # bytes, enough for the logits of all tokens of these shapes
WORKSPACE_MIB = {"ours_2GiB": 2048, "ours_256MiB": 256, "ours_128MiB": 128, "ours_6MiB": 6}


def _sparse_step(name: str, problem: Problem, mode: Mode) -> Step:
    from flce_ops import linear_cross_entropy

    if not mode.backward or mode.per_token or mode.options or mode.kind or mode.name == "soft64":
        raise Unavailable("a sparse gradient is that of a scalar loss of class indices")
    how, exponent = SPARSE[name]
    seed = torch.tensor(problem.seed, device=problem.input.device)
    sparse = {"gradient_threshold": 2.0**exponent, "gradient_mode": how, "gradient_seed": seed}

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return linear_cross_entropy(input, linear_weight, target, reduction=reduction, **sparse)

    return step_of(loss, problem, mode)


def _compacted_step(loss: Loss, problem: Problem, mode: Mode) -> Step:
    """The valid rows are gathered before the step. The step puts their gradients back in place."""
    if mode.reduction == "log_probs" or mode.kind:
        raise Unavailable("not in this mode")
    rows = problem.valid.nonzero()[:, 0]
    if rows.shape[0] > 0.9 * problem.shape.N:
        raise Unavailable("few tokens are ignored")
    part = replace(
        problem,
        shape=problem.shape._replace(N=rows.shape[0]),
        input=problem.input.detach()[rows].requires_grad_(mode.input_grad),
        target=problem.target[rows],
        cotangent=problem.cotangent[rows],
    )
    compacted = step_of(loss, part, mode)

    def step() -> Tensor | None:
        problem.clear_gradients()
        value = compacted()
        if mode.input_grad:
            problem.input.grad = torch.zeros_like(problem.input).index_copy_(0, rows, part.input.grad)
            part.input.grad = None
        return value.new_zeros(problem.shape.N).index_copy_(0, rows, value) if mode.reduction == "none" else value

    return step


def _captured_step(plain: Step, problem: Problem) -> Step:
    """A whole training step as one CUDA graph, which owns the memory of the gradients."""
    if not problem.input.is_cuda:
        raise Unavailable("a CUDA graph wants CUDA")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            plain()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = plain()
    leaves = problem.input, problem.linear_weight
    gradients = [leaf.grad for leaf in leaves]

    def step() -> Tensor:
        graph.replay()
        for leaf, gradient in zip(leaves, gradients):
            leaf.grad = gradient
        return value

    return step


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    import flce_ops

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor | tuple[Tensor, Tensor]:
        if reduction == "log_probs":
            found = flce_ops.linear_log_probs(input, linear_weight, target, entropy=True, **mode.options)
            return found.log_probs, found.entropy
        result = flce_ops.linear_cross_entropy(input, linear_weight, target, reduction=reduction, **mode.options)
        return result[0] if "return_metrics" in mode.options else result

    if name in SPARSE:
        return _sparse_step(name, problem, mode)
    if mode.kind:
        loss = divergence_in_one_call(problem, mode.kind)
    if mode.name == "soft64":
        if name == "ours_compacted":
            raise Unavailable("one class a token alone")
        loss = of_soft_targets(problem)
    if mode.name == "policy":  # the policy's formula on losses per token
        if name == "ours_compacted":
            raise Unavailable("one call for all tokens in this mode")
        loss, mode = in_one_call(problem), MODES["fwd_bwd"]

    if name == "ours":
        return step_of(loss, problem, mode)
    if name == "ours_compiled":
        return step_of(torch.compile(loss, dynamic=False, fullgraph=True), problem, mode)
    if name == "ours_captured":
        return _captured_step(step_of(loss, problem, mode), problem)

    if name == "ours_compacted":
        return _compacted_step(loss, problem, mode)

    if name == "ours_6MiB" and problem.input.is_cuda:
        raise Unavailable("for processors: a GPU's smallest chunk exceeds it")
    plain = step_of(loss, problem, mode)

    budget = {"retained": RETAINED} if name == "ours_retained" else {"nbytes": WORKSPACE_MIB[name] * 2**20}

    def step_in_workspace() -> Tensor:
        with flce_ops.workspace(**budget):
            return plain()

    return step_in_workspace
