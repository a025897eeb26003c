"""linear_log_probs and its documentation."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from ..entry import metrics
from ..entry.log_probs import OP
from ..math.sparse_gradient import Mode, Operand
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
    names = () if return_metrics is None else metrics.checked_names(OP, return_metrics, metrics.OF_LOG_PROBS)
    asked = {name: name in names for name in metrics.OF_LOG_PROBS}
    wanted = [given.get(name, False) for name in ("entropy", "argmax", "tail")]
    log_probs, lse, entropy, argmax, *others, of_tail = call_entry(OP, given, asked=asked)
    results = (result if want else None for result, want in zip((entropy, argmax, of_tail), wanted))
    found = LinearLogProbs(log_probs, lse, *results)
    if return_metrics is None:
        return found
    by_name = dict(zip(metrics.OF_LOG_PROBS, others))
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
