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
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: the tokens, (...), int64, int32 or uint8, in [0, V) or ``ignore_index``. Or K classes of each, (..., K).
        linear_bias: (V,), in input's dtype.
        ignore_index: target value of tokens without results: 0, argmax -1, and no gradient. None is -100. Among K
            classes such a class has log-probability 0, and a token with only such classes is ignored.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient.
        temperature: divides the logits after the cap, as sampling does: a number; without softcap a 0-d tensor, which
            gets its gradient.
        shift: as in ``linear_cross_entropy``: position t has the log-probability of target's token t + 1.
        entropy: also return the entropy of each token's distribution.
        argmax: also return the class of the largest logit (the first of equals).
        tail: also return the log-probability of all classes together that target does not name. The result ends at the
            logarithm of the dtype's eps (-15.9 in float32), below which it would be a rounding error, and has no
            gradient there.
        gradient_threshold, gradient_mode, gradient_seed, gradient_sparse: as in ``linear_cross_entropy``: a sparse
            gradient, of lse and of the tail, too, but not of the entropy (detach the entropy).
        batch_invariant: as in ``linear_cross_entropy``, for the bits of input's gradient.
        return_metrics: names of further results, constants: ``"log_sum_sq_probs"``, log sum_j softmax(z)_j ** 2, and
            ``"mean_logit"``, mean_j z_j. The result is a pair then.

    Returns:
        ``LinearLogProbs(log_probs, lse, entropy, argmax, tail_log_prob)``. log_probs has target's shape, the others are
        one number per token, (...), or None where not asked for. All but argmax are differentiable and float32 (float64
        for float64 input), in nats.
        With ``return_metrics`` a pair of that result and a dict of the named metrics, (...) each, 0 at ignored tokens.

    Raises:
        As ``linear_cross_entropy``. NotImplementedError: with gradient_threshold the gradient of the entropy, and
            DTensors of a sharded vocabulary.

    Composability:
        As ``linear_cross_entropy``. 1 GEMM pass of 2NDV; with gradients 3 for tokens with saved logits
        (``set_workspace``), 4 for the others. Ranks that share a vocabulary exchange 2 to 7 numbers per token, and
        K - 1 more for K classes. What is not asked for costs nothing.

    Source:
        docs/kernels.md has the mathematics, docs/log_probs.md what each result is for and costs.
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
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: class of each token, (...), int64, int32 or uint8, in [0, V) or ``ignore_index``; or K classes, (...,
            K).
        function: of **one token**: takes its log-probability and one entry of each of ``tensors``, returns its loss,
            all as 0-d tensors. ``torch.func.vmap`` maps it, autograd differentiates it. With K classes ``log_prob`` is
            (K,). Keyword-only parameters named ``lse`` (the logsumexp of the token's logits) and ``entropy`` (of its
            distribution) get these numbers, 0-d. Any callable; torch.compile and torch.export take one that is
            decorated with ``flce_ops.token_loss``.
        tensors: constants, which the function gets after log_prob: tensors of target's shape (...), of which it gets a
            0-d tensor; with more dimensions, of which it gets one token's; 0-d tensors and numbers, which all tokens
            share. Floating ones in the dtype of log_prob.
        linear_bias: (V,), in input's dtype.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of valid
            tokens, nan without one. "sum".
        ignore_index: target value of tokens that do not count, whatever the tensors hold there. None is -100. Of K
            classes some may be ignored: their log_prob is -1, and gets no gradient.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient.
        temperature: divides the logits after the cap: a number; without softcap a 0-d tensor, which gets its gradient.
        token_weight: factor per token, (...), differentiable. The denominator of "mean" does not contain token_weight.
            Tokens of weight 0 are left out like ignored ones, unless token_weight gets a gradient.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum".
        batch_invariant: as in ``linear_cross_entropy``, for the bits of input's gradient.

    Returns:
        ``LinearPolicyResult(loss, log_probs)``; float32 (float64 for float64 input). log_probs have target's shape and
        are constants, 0 where ignored and at tokens of weight 0.

    Raises:
        ValueError, TypeError, IndexError: as in ``linear_cross_entropy``; a function that returns something else than a
            floating 0-d tensor, whose result does not depend on log_prob, or that means something else for a vector of
            tokens (``x - x.mean()`` is 0 for one token).
        RuntimeError: a function that branches on a value, reads one (``.item()``), or draws random numbers.
        NotImplementedError: tensors that require a gradient (detach them), and a function that closes over one;
            forward-mode derivatives.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, double backward, activation checkpointing, CUDA
        graphs, DTensor. Forward makes the gradients of a scalar loss, in the same pass over the logits. In float16,
        under checkpointing, torch.func, for reduction="none", for a function of the entropy and over a sharded
        vocabulary backward makes them, as those of ``linear_log_probs``. The first call of a function compares it with
        a call for all tokens at once, which waits for the GPU; later calls do not. A nan of a token that counts is the
        loss's and the gradients': ``torch.where`` does not stop it in a derivative. See docs/token_losses.md.
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
