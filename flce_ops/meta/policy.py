"""Refusals by name of a policy's options, and of gradients of what is constant in it."""

import torch
from torch import Tensor

from flce_ops.objectives.policy import KL_ESTIMATORS, OBJECTIVES, PolicyOptions
from flce_ops.support.holes import refuse_hole

TOKEN_LEVEL = "its tokens' losses are those of objective='ppo', token_weight and normalizer add them up"
SEQUENCE_LEVEL = "a sequence's tokens share one ratio there; make it of flce_ops.linear_log_probs"
HINTS = dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo"), TOKEN_LEVEL)
HINTS |= dict.fromkeys(("gspo", "luspo", "vespo", "dpo"), SEQUENCE_LEVEL)


def check_policy(op: str, options: PolicyOptions, ref_log_probs: Tensor | None) -> None:
    objective, estimator = options.objective, options.kl_estimator
    if objective not in OBJECTIVES:
        hint = HINTS.get(objective)
        raise ValueError(
            f"{op}: expected objective to be one of {', '.join(OBJECTIVES)}, got {objective!r}"
            + (f"; {hint}" if hint else "")
        )
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"{op}: expected kl_estimator to be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    if options.dual_clip is not None and objective != "ppo":
        raise ValueError(f"{op}: dual_clip bounds the ratio of objective='ppo', got {objective!r}; leave it out")
    if options.beta is not None and ref_log_probs is None:
        raise ValueError(f"{op}: beta weighs the KL term, which needs ref_log_probs, of target's shape; got None")


def check_constants(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            refuse_hole(op, "constant", name=name)
