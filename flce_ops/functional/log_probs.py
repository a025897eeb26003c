"""linear_log_probs, and the losses that are functions of a log-probability: linear_token_loss and linear_policy_loss,
with their documentation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from ..entry.arguments import ReductionName
from ..entry.bodies import OF_LOG_PROBS, OP_OF_LOG_PROBS, checked_names
from ..math.options import number_tensor
from ..math.sparse_gradient import Mode, Operand
from ..objectives.policy import KlEstimator, Objective
from ..objectives.token_function import token_loss_of
from .public import call_entry, public

# N tokens, K classes of a token, D hidden, V vocabulary


class LinearLogProbs(NamedTuple):
    """One number per token, (...); float32 (float64 for float64 input), argmax int64.

    entropy, argmax and tail_log_prob are None unless asked for. Their type is `Any` beside Tensor, so that a caller who
    asked for them need not convince a type checker.

    Attributes:
        log_probs: log p(target), nats, of target's shape; 0 at ignored tokens.
        lse: logsumexp of the logits; 0 at ignored tokens.
        entropy: entropy of the distribution, nats; 0 at ignored tokens.
        argmax: class of the largest logit; -1 at ignored tokens.
        tail_log_prob: log of the probability of all classes that target does not name, nats.
    """

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | Any
    argmax: Tensor | Any
    tail_log_prob: Tensor | Any = None


class LinearPolicyResult(NamedTuple):
    """The loss, and log-probabilities through which no gradient flows.

    Attributes:
        loss: (), or of target's shape with reduction="none".
        log_probs: log p(target), nats, of target's shape; 0 at tokens that are ignored or left out by weight 0.
    """

    loss: Tensor
    log_probs: Tensor


class Keywords(TypedDict, total=False):
    """The keywords beside return_metrics, for overloads: return_metrics makes the result a pair."""

    ignore_index: int | None
    softcap: float | None
    logit_scale: float | Tensor
    temperature: float | Tensor
    shift: bool
    entropy: bool
    argmax: bool
    tail: bool
    gradient_threshold: float
    gradient_mode: Mode
    gradient_seed: Tensor | None  # ()
    gradient_sparse: Operand
    batch_invariant: bool


def call(given: dict[str, Any]) -> Any:
    return_metrics = given.pop("return_metrics", None)
    names = () if return_metrics is None else checked_names(OP_OF_LOG_PROBS, return_metrics, OF_LOG_PROBS)
    asked = {name: name in names for name in OF_LOG_PROBS}
    wanted = [given.get(name, False) for name in ("entropy", "argmax", "tail")]
    log_probs, lse, entropy, argmax, *others, of_tail = call_entry(OP_OF_LOG_PROBS, given, asked=asked)
    results = (result if want else None for result, want in zip((entropy, argmax, of_tail), wanted))
    found = LinearLogProbs(log_probs, lse, *results)
    if return_metrics is None:
        return found
    by_name = dict(zip(OF_LOG_PROBS, others))
    return found, {name: by_name[name] for name in names}


@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    return_metrics: None = None,
    **options: Unpack[Keywords],
) -> LinearLogProbs: ...


@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    return_metrics: Sequence[str],
    **options: Unpack[Keywords],
) -> tuple[LinearLogProbs, dict[str, Tensor]]: ...


@public(call)
def linear_log_probs(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...) or (..., K)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,  # ()
    shift: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    tail: bool = False,
    gradient_threshold: float = 0.0,
    gradient_mode: Mode = "unbiased",
    gradient_seed: Tensor | None = None,  # ()
    gradient_sparse: Operand = "both",
    batch_invariant: bool = False,
    return_metrics: Sequence[str] | None = None,
) -> LinearLogProbs | tuple[LinearLogProbs, dict[str, Tensor]]:
    r"""Same as ``log_softmax(F.linear(input, linear_weight, linear_bias), -1)`` at target, without the (N, V) logits.

    With ``z`` the logits, scaled, capped and divided by the temperature as in ``linear_cross_entropy``, per token::

        lse           = logsumexp_j z_j
        log_prob      = z_target - lse
        entropy       = lse - sum_j softmax(z)_j z_j
        tail_log_prob = log(1 - sum_k softmax(z)_k)

    k runs over the distinct classes that target names for the token.

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype.
        target: the tokens, (...), int64, int32 or uint8. Or K classes of each, (..., K).
        linear_bias: (V,), in input's dtype.
        ignore_index: target of tokens without results: 0, argmax -1, and no gradient. None is -100. Among K classes
            such a class has log-probability 0, and a token with only such classes is ignored.
        softcap, logit_scale, temperature, shift, batch_invariant: as in ``linear_cross_entropy``.
        entropy: also return the entropy of each token's distribution.
        argmax: also return the class of the largest logit (the first of equals).
        tail: also return the log-probability of all classes together that target does not name. It ends at the
            logarithm of the dtype's eps (-15.9 in float32), below which it would be a rounding error, and has no
            gradient there.
        return_metrics: names of further constants: ``"log_sum_sq_probs"``, log sum_j softmax(z)_j ** 2, and
            ``"mean_logit"``, mean_j z_j.

    Args: Sparse gradient, see docs/numerics.md
        gradient_threshold, gradient_mode, gradient_seed, gradient_sparse: as in ``linear_cross_entropy``; of lse and
            of the tail, too, but not of the entropy (detach the entropy).

    Returns:
        ``LinearLogProbs(log_probs, lse, entropy, argmax, tail_log_prob)``, in nats, float32 or float64. log_probs has
        target's shape, the others are (...), or None where not asked for. All but argmax are differentiable. With
        ``return_metrics`` a pair of that result and a dict of the named metrics, (...) each, 0 at ignored tokens.

    Raises:
        ValueError, TypeError, IndexError, NotImplementedError: as in ``linear_cross_entropy``.

    Composability:
        As ``linear_cross_entropy``. What is not asked for costs nothing.

    Source:
        docs/log_probs.md has what each result is for and costs, docs/kernels.md the mathematics.
    """


OP_OF_TOKEN_LOSS = "linear_token_loss"


def call_with_function(given: dict[str, Any]) -> LinearPolicyResult:
    loss = token_loss_of(given["function"])
    tensors = [tensor_of(loss.name_of_tensor(i), value, given["input"]) for i, value in enumerate(given["tensors"])]
    return LinearPolicyResult(*call_entry(OP_OF_TOKEN_LOSS, {**given, "function": loss.name, "tensors": tensors}))


def tensor_of(name: str, value: Any, like: Tensor) -> Tensor:
    """A number becomes a tensor: a new number then compiles no new graph."""
    if isinstance(value, bool) or not isinstance(value, Tensor | float | int):
        raise TypeError(
            f"{OP_OF_TOKEN_LOSS}: expected {name} to be a tensor or a number, got {type(value).__name__}; what "
            "chooses a formula makes another function: functools.partial(function, name=value)"
        )
    return number_tensor(OP_OF_TOKEN_LOSS, name, value, like, may_be_inf=True)


@public(call_with_function)
def linear_token_loss(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...), or (..., K)
    function: Callable[..., Tensor],
    *tensors: Tensor | float,  # (...), (..., numbers of a token) or ()
    linear_bias: Tensor | None = None,  # (V,)
    reduction: ReductionName = "mean",
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,  # ()
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,  # ()
    batch_invariant: bool = False,
) -> LinearPolicyResult:
    r"""A loss that is your function of each token's log-probability, without the (N, V) logits.

    Same as ``function`` mapped over ``linear_log_probs(input, linear_weight, target, linear_bias).log_probs``, in 3
    GEMM passes for loss and gradients::

        def focal(log_prob, gamma):
            return -((1 - log_prob.exp()) ** gamma) * log_prob

        loss, log_probs = flce_ops.linear_token_loss(hidden, weight, target, focal, 2.0)

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype.
        target: class of each token, (...), int64, int32 or uint8; or K classes, (..., K).
        function: of **one token**: takes its log-probability, (K,) with K classes, and one entry of each of
            ``tensors``; returns its loss, 0-d. Keyword-only parameters named ``lse`` and ``entropy`` get the token's
            logsumexp and entropy, 0-d. torch.compile and torch.export take a function that is decorated with
            ``flce_ops.token_loss``.
        tensors: constants that the function gets after log_prob: tensors of target's shape, of which it gets a 0-d
            tensor; with more dimensions, of which it gets one token's; 0-d tensors and numbers, which all tokens share.
        linear_bias: (V,), in input's dtype.
        ignore_index: target of tokens that do not count, whatever the tensors hold there. None is -100. An ignored one
            of K classes has log_prob -1, without a gradient.
        reduction, softcap, logit_scale, temperature: as in ``linear_cross_entropy``.

    Args: Training
        token_weight, normalizer, batch_invariant: as in ``linear_cross_entropy``.

    Returns:
        ``LinearPolicyResult(loss, log_probs)``, float32 or float64. log_probs have target's shape and are constants, 0
        where ignored and at tokens of weight 0.

    Raises:
        ValueError, TypeError, IndexError: as in ``linear_cross_entropy``; a function whose result is no floating 0-d
            tensor, does not depend on log_prob, or means something else for a vector of tokens (``x - x.mean()`` is 0
            for one token).
        RuntimeError: a function that branches on a value, reads one (``.item()``), or draws random numbers.
        NotImplementedError: tensors that require a gradient (detach them), and a function that closes over one.

    Composability:
        As ``linear_cross_entropy``.

    Source:
        docs/token_losses.md has examples, costs and what a nan does.
    """


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

    Same as these formulas on ``linear_log_probs(input, linear_weight, target, linear_bias).log_probs``, in 3 GEMM
    passes. The loss of each valid token, with A its advantage::

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
        linear_weight: weight of the head, (V, D), in input's dtype.
        target: the sampled tokens, (...), int64, int32 or uint8.
        advantages: (...), constants.
        old_log_probs: of the policy that sampled, (...), constants. None: of this policy, so r is 1, with its gradient.
        ref_log_probs: of the reference model, (...), constants; for beta.
        linear_bias: (V,), in input's dtype.
        objective: "ppo" (also GRPO's, Dr. GRPO's and DAPO's) or "cispo".
        clip_low, clip_high: distances of the ratio's bounds from 1, not negative; clip_low may be ``math.inf``.
        dual_clip: bound on the ratio where the advantage is negative, above 1; for "ppo".
        beta: factor of the KL term.
        kl_estimator: "k1", "k2" or "k3", differentiated as written.
        reduction, ignore_index, softcap, logit_scale, temperature: as in ``linear_cross_entropy``.

    Args: Training
        token_weight, normalizer, batch_invariant: as in ``linear_cross_entropy``.

    Args: Sparse gradient, see docs/numerics.md
        gradient_threshold, gradient_mode, gradient_seed, gradient_sparse: as in ``linear_cross_entropy``.

    Returns:
        ``LinearPolicyResult(loss, log_probs)``, float32 or float64; log_probs are constants, 0 at tokens of weight 0.

    Raises:
        ValueError, TypeError, IndexError: as in ``linear_cross_entropy``; an objective of whole sequences (GSPO, DPO).
        NotImplementedError: advantages or log-probabilities that require a gradient (detach them).

    Composability:
        As ``linear_cross_entropy``.

    Source:
        PPO: Schulman et al., 2017; GRPO: Shao et al., "DeepSeekMath", 2024; DAPO: Yu et al., 2025; CISPO: "MiniMax-M1",
        2025; dual clip: Ye et al., 2020; KL: Schulman, "Approximating KL divergence", 2020. See docs/policy_loss.md.
    """
