"""What one timed step is: forward alone, or forward and backward with which gradients.

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

# (input, linear_weight, target, reduction) -> loss; for "log_probs" a pair: log-probabilities and entropies
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]
Step = Callable[[], Tensor | None]  # runs once, leaves gradients in .grad, returns the loss


class Mode(NamedTuple):
    name: str
    gemms: int  # GEMMs of 2NDV FLOPs that an implementation without stored logits needs: the floor
    reduction: str
    input_grad: bool
    weight_grad: bool
    options: dict[str, Any] = {}  # keywords of linear_cross_entropy
    kind: str = ""  # of a divergence

    @property
    def backward(self) -> bool:
        return self.input_grad or self.weight_grad

    @property
    def per_token(self) -> bool:
        return self.reduction in ("none", "log_probs")

    def gradient_bytes(self, shape: Shape, itemsize: int) -> int:
        return itemsize * shape.D * (shape.N * self.input_grad + shape.V * self.weight_grad)

    def tflop(self, shape: Shape, valid: int) -> float:
        """Of the floor: of the valid tokens."""
        return self.gemms * 2 * valid * shape.D * shape.V / 1e12


METRICS = (  # names of return_metrics
    *("token_accuracy", "is_top1", "argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit", "z_loss"),
)
KINDS = ("forward", "reverse", "jsd")
SMOOTHING, CAP = {"label_smoothing": 0.1}, {"softcap": 30.0}


def with_metrics(*names: str) -> dict[str, Any]:
    return {"return_metrics": names} | ({"z_loss": 1e-4} if "z_loss" in names else {})


MODES = {
    mode.name: mode
    for mode in (
        Mode("fwd_bwd", 3, "mean", True, True),  # logits, dX, dW
        Mode("fwd", 1, "mean", False, False),  # evaluation
        Mode("lora", 2, "mean", True, False),  # the head is frozen: no dW
        Mode("soft64", 3, "mean", True, True),  # 64 classes a token: soft.py
        Mode("policy", 3, "none", True, True),  # a policy's loss, of losses per token or in one call: policy.py
        Mode("none", 3, "none", True, True),  # per-token losses, whose cotangent comes late: logits wait, or come twice
        Mode("log_probs", 3, "log_probs", True, True),  # and entropies, both differentiated: what RL asks a head for
        Mode("smoothing", 3, "mean", True, True, SMOOTHING),
        Mode("softcap", 3, "mean", True, True, CAP),
        Mode("softcap_smoothing", 3, "mean", True, True, SMOOTHING | CAP),
        *(Mode(f"metric_{name}", 3, "mean", True, True, with_metrics(name)) for name in METRICS),
        Mode("metrics", 3, "mean", True, True, with_metrics(*METRICS)),
        *(Mode(f"kl_{kind}", 4, "mean", True, True, kind=kind) for kind in KINDS),  # a teacher's head too: kl_div.py
    )
}


def prepare(problem: Problem, mode: Mode) -> None:
    """Marks what needs a gradient. Forward alone marks nothing, not even the weight: some implementations look at
    requires_grad instead of the grad mode and would make gradients nobody asked for."""
    problem.clear_gradients()
    problem.input.requires_grad_(mode.input_grad)
    problem.linear_weight.requires_grad_(mode.weight_grad)


def step_of(loss: Loss, problem: Problem, mode: Mode) -> Step:
    """A training (or evaluation) step around a loss: gradients start as None, as after zero_grad()."""
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
