"""linear_policy_loss and its documentation."""

from typing import NamedTuple

from torch import Tensor

from ..entry.arguments import ReductionName
from ..math.sparse_gradient import Mode, Operand
from ..objectives.policy import KlEstimator, Objective
from .public import call_entry, public

# N tokens, D hidden, V vocabulary


class LinearPolicyResult(NamedTuple):
    """The loss, and log-probabilities through which no gradient flows.

    Attributes:
        loss: (), or of target's shape with reduction="none".
        log_probs: log p(target), nats, of target's shape; 0 at tokens that are ignored or left out by weight 0.
    """

    loss: Tensor
    log_probs: Tensor


@public(lambda given: LinearPolicyResult(*call_entry("linear_policy_loss", given)))
def linear_policy_loss(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    advantages: Tensor,  # (...)
    old_log_probs: Tensor | None = None,  # (...)
    ref_log_probs: Tensor | None = None,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    objective: Objective = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    reduction: ReductionName = "mean",
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,  # ()
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,  # ()
    gradient_threshold: float = 0.0,
    gradient_mode: Mode = "unbiased",
    gradient_seed: Tensor | None = None,  # ()
    gradient_sparse: Operand = "both",
    batch_invariant: bool = False,
) -> LinearPolicyResult:
    r"""The token losses of PPO, GRPO, DAPO and CISPO with their KL term, without the (N, V) logits.

    Same as the formulas below on ``linear_log_probs(input, linear_weight, target, linear_bias).log_probs``, in 3 GEMM
    passes for loss and gradients. The loss of each valid token, with A its advantage::

        r     = exp(log_prob - old_log_prob)
        clip  = min(max(r, 1 - clip_low), 1 + clip_high)

        "ppo"    loss = max(-A * r, -A * clip)
                 with dual_clip, where A < 0: at most -A * dual_clip
        "cispo"  loss = -clip * A * log_prob, clip is a constant

        d     = log_prob - ref_log_prob
        KL    "k1": d,  "k2": d ** 2 / 2,  "k3": exp(-d) + d - 1
        loss  = token_weight * (loss + beta * KL)

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: the tokens that were sampled, (...), int64, int32 or uint8, in [0, V) or ``ignore_index``.
        advantages: (...), constants. Multiply the advantages by a weight that the objective alone should have, such as
            the correction for another sampler's probabilities.
        old_log_probs: log-probabilities of the policy that sampled, (...), constants. None stands for this policy: r
            is 1 then, with its gradient.
        ref_log_probs: log-probabilities of the reference model, (...), constants. Read where beta is not 0.
        linear_bias: (V,), in input's dtype.
        objective: "ppo" (also GRPO's, Dr. GRPO's and DAPO's) or "cispo".
        clip_low: the ratio's lower bound is 1 - clip_low; ``math.inf`` for none. Not negative.
        clip_high: the ratio's upper bound is 1 + clip_high. Not negative.
        dual_clip: for "ppo", a bound on the ratio where the advantage is negative; greater than 1.
        beta: factor of the KL term; 0 for none.
        kl_estimator: "k1", "k2" or "k3" (Schulman, "Approximating KL divergence", 2020); differentiated as written.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of valid
            tokens, nan without one. "sum".
        ignore_index: target value of tokens that do not count, whatever the other arguments hold there. None is -100.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient.
        temperature: divides the logits after the cap, as sampling does: a number; without softcap a 0-d tensor, which
            gets its gradient.
        token_weight: factor per token, (...), on the objective and on the KL term, differentiable: 1 / the completion's
            length for GRPO's mean of means. The denominator of "mean" does not contain token_weight. Tokens of weight
            0 are left out like ignored ones, unless token_weight gets a gradient.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum".
        gradient_threshold, gradient_mode, gradient_seed, gradient_sparse: as in ``linear_cross_entropy``;
            backward makes the gradients then.
        batch_invariant: as in ``linear_cross_entropy``, for the bits of input's gradient.

    Returns:
        ``LinearPolicyResult(loss, log_probs)``; float32 (float64 for float64 input). log_probs are constants, for the
        share of clipped tokens or an estimate of the KL. They are 0 at tokens of weight 0.

    Raises:
        ValueError, TypeError, IndexError: as in ``linear_cross_entropy``; an objective of whole sequences (GSPO, DPO),
            by its name.
        NotImplementedError: advantages, old_log_probs or ref_log_probs that require a gradient (detach them);
            forward-mode derivatives; a sharded vocabulary with gradient_threshold.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, double backward, activation checkpointing, CUDA
        graphs, DTensor. Forward makes the gradients of a scalar loss, in the same pass over the logits. In float16,
        under checkpointing, torch.func, for reduction="none" and over a sharded vocabulary backward makes them, as
        those of ``linear_log_probs``. Where a ratio overflows, the loss is that of the formula; the gradient of a token
        beyond its bound is 0 all the same.

    Source:
        Schulman et al., "Proximal Policy Optimization Algorithms", 2017; Shao et al., "DeepSeekMath", 2024 (GRPO); Yu
        et al., "DAPO", 2025; MiniMax, "MiniMax-M1", 2025 (CISPO); Ye et al., "Mastering Complex Control in MOBA
        Games", 2020 (dual clip). See docs/policy_loss.md.
    """
