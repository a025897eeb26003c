"""Modes: what one timed step computes, forward alone, or forward and backward with some gradients.

N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .data import Problem
from .policy import on_losses
from .shapes import Shape

# (input, linear_weight, target, reduction) -> loss. For "log_probs" it returns a pair: log-probabilities and entropies.
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]
Step = Callable[[], Tensor | None]  # runs one step, leaves gradients in .grad, returns the loss


class Mode(NamedTuple):
    name: str
    gemms: int  # GEMMs of 2NDV FLOPs that an implementation without stored logits needs: the floor
    reduction: str
    input_grad: bool
    weight_grad: bool
    options: dict[str, Any] = {}  # keywords of linear_cross_entropy
    kind: str = ""  # kind of divergence

    @property
    def backward(self) -> bool:
        return self.input_grad or self.weight_grad

    @property
    def per_token(self) -> bool:
        return self.reduction in ("none", "log_probs")

    def gradient_bytes(self, shape: Shape, itemsize: int) -> int:
        return itemsize * shape.D * (shape.N * self.input_grad + shape.V * self.weight_grad)

    def tflop(self, shape: Shape, valid: int) -> float:
        """TFLOP of the floor, over the valid tokens."""
        return self.gemms * 2 * valid * shape.D * shape.V / 1e12


# names of return_metrics
METRICS = ("token_accuracy", "is_top1", "argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit", "z_loss")
KINDS = ("forward", "reverse", "jsd", "tv", "nla")
SMOOTHING, CAP, INVARIANT = {"label_smoothing": 0.1}, {"softcap": 30.0}, {"batch_invariant": True}


def with_metrics(*names: str) -> dict[str, Any]:
    return {"return_metrics": names} | ({"z_loss": 1e-4} if "z_loss" in names else {})


MODES = {
    mode.name: mode
    for mode in (
        Mode("fwd_bwd", 3, "mean", True, True),  # logits, dX, dW
        Mode("new_n", 3, "mean", True, True),  # the same in a loop whose steps have different numbers of tokens: run.py
        Mode("fwd", 1, "mean", False, False),  # evaluation
        Mode("lora", 2, "mean", True, False),  # the head is frozen: no dW
        Mode("soft64", 3, "mean", True, True),  # 64 classes per token: soft.py
        Mode("policy", 3, "none", True, True),  # a policy's loss, from losses per token or in one call: policy.py
        # per-token losses, whose gradient is known in backward only: logits are saved or recomputed
        Mode("none", 3, "none", True, True),
        Mode("log_probs", 3, "log_probs", True, True),  # with entropies, both differentiated, as RL needs
        Mode("smoothing", 3, "mean", True, True, SMOOTHING),
        Mode("softcap", 3, "mean", True, True, CAP),
        Mode("softcap_smoothing", 3, "mean", True, True, SMOOTHING | CAP),
        *(Mode(f"metric_{name}", 3, "mean", True, True, with_metrics(name)) for name in METRICS),
        Mode("metrics", 3, "mean", True, True, with_metrics(*METRICS)),
        Mode("invariant", 3, "mean", True, True, INVARIANT),
        Mode("invariant_log_probs", 3, "log_probs", True, True, INVARIANT),
        *(Mode(f"kl_{kind}", 4, "mean", True, True, kind=kind) for kind in KINDS),  # with a teacher's head: kl_div.py
    )
}


def prepare(problem: Problem, mode: Mode) -> None:
    """Marks the tensors that need a gradient. For forward alone it marks none, not even the weight: some
    implementations look at requires_grad instead of the grad mode and would make gradients nobody wants.
    """
    problem.clear_gradients()
    problem.input.requires_grad_(mode.input_grad)
    problem.linear_weight.requires_grad_(mode.weight_grad)


def step_of(loss: Loss, problem: Problem, mode: Mode) -> Step:
    """A training or evaluation step with this loss. Gradients start as None, as after zero_grad()."""
    if mode.name == "policy":
        loss, mode = on_losses(loss, problem), mode._replace(reduction="mean")
    tensors = (problem.input, problem.linear_weight, problem.target, mode.reduction)

    def forward() -> Tensor:
        with torch.no_grad():
            return loss(*tensors)

    def forward_backward() -> Tensor:
        problem.clear_gradients()
        value = loss(*tensors)
        if mode.reduction == "log_probs":
            log_probs, entropy = value
            torch.autograd.backward([log_probs, entropy], [problem.cotangent, problem.entropy_cotangent])
            return log_probs.detach()
        value.backward(problem.cotangent.to(value.dtype) if mode.per_token else problem.grad_output)
        return value.detach()

    return forward_backward if mode.backward else forward
