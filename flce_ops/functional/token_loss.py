"""linear_token_loss and its documentation."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..entry.arguments import ReductionName
from ..math.options import number_tensor
from ..objectives.token_function import token_loss_of
from .policy import LinearPolicyResult
from .public import call_entry, public

# N tokens, K classes of a token, D hidden, V vocabulary

OP = "linear_token_loss"


def call_with_function(given: dict[str, Any]) -> LinearPolicyResult:
    loss = token_loss_of(given["function"])
    tensors = [tensor_of(loss.name_of_tensor(i), value, given["input"]) for i, value in enumerate(given["tensors"])]
    return LinearPolicyResult(*call_entry(OP, {**given, "function": loss.name, "tensors": tensors}))


def tensor_of(name: str, value: Any, like: Tensor) -> Tensor:
    """A number becomes a tensor: a new number then compiles no new graph."""
    if isinstance(value, bool) or not isinstance(value, Tensor | float | int):
        raise TypeError(
            f"{OP}: expected {name} to be a tensor or a number, got {type(value).__name__}; what chooses a "
            "formula makes another function: functools.partial(function, name=value)"
        )
    return number_tensor(OP, name, value, like, may_be_inf=True)


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
