"""Log-probabilities of given tokens, and what else a row of logits is asked for, from one pass that holds no logits.

linear_log_probs -> torch.ops.flce.linear_log_probs -> composite -> linear_cross_entropy_forward -> ATen over N numbers

log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_ops.arguments import check_head, resolve_ignore_index
from flce_ops.dtensor import any_dtensor
from flce_ops.functional import autocast_operands, entry_of
from flce_ops.learnt_scale import apply_learnt_scale, refuse_tensors
from flce_ops.loss import surprisal
from flce_ops.scalars import Number, logit_scalars

# N tokens, D hidden, V vocabulary

OP = "linear_log_probs"


class LinearLogProbs(NamedTuple):
    """Each of target's shape; float32 (float64 for float64 input), argmax int64."""

    log_probs: Tensor  # log p(target), nats; 0 at ignored tokens
    lse: Tensor  # logsumexp of the logits; 0 at ignored tokens
    entropy: Tensor | None  # of the distribution, nats; 0 at ignored tokens
    argmax: Tensor | None  # class of the largest logit, at ignored tokens too


def linear_log_probs(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    argmax: bool = False,
) -> LinearLogProbs:
    r"""Same as ``log_softmax(F.linear(input, linear_weight, linear_bias), -1)`` at target, without the (N, V) logits.

    With ``z`` the logits, scaled, capped and divided by the temperature as in ``linear_cross_entropy``, per token::

        lse      = logsumexp_j z_j
        log_prob = z_target - lse
        entropy  = lse - sum_j softmax(z)_j z_j

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: the tokens, (...), int64 or int32, in [0, V) or ``ignore_index``.
        linear_bias: (V,), in input's dtype.
        ignore_index: target value of tokens without results: 0, and no gradient. None is -100.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient and is
            multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        entropy: also return the entropy of each token's distribution.
        argmax: also return the class of the largest logit (the first of equals).

    Returns:
        ``LinearLogProbs(log_probs, lse, entropy, argmax)``, each of target's shape, None where not asked for.
        log_probs, lse and entropy are differentiable, float32 (float64 for float64 input).

    Raises:
        As ``linear_cross_entropy``. NotImplementedError: second derivatives through the entropy.

    Composability:
        As ``linear_cross_entropy``. 1 GEMM pass of 2NDV, 4 with gradients: backward recomputes the logits. A vocabulary
        sharded over ranks exchanges 2 to 5 numbers per token. entropy and argmax cost nothing when not asked for.
    """
    refuse_tensors(OP, softcap=softcap)
    input, linear_bias, logit_scale, temperature = apply_learnt_scale(
        OP, input, linear_bias, logit_scale, temperature, softcap
    )
    entry = entry_of(torch.ops.flce.linear_log_probs, composite, input, linear_weight, target, linear_bias)
    log_probs, lse, entropies, largest = entry(
        input,
        linear_weight,
        target,
        linear_bias,
        ignore_index=resolve_ignore_index(OP, ignore_index, target),
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        entropy=entropy,
        argmax=argmax,
    )
    return LinearLogProbs(log_probs, lse, entropies if entropy else None, largest if argmax else None)


def composite(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    entropy: bool = False,
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Body of torch.ops.flce.linear_log_probs; (0,) in place of what is not asked for."""
    if any_dtensor(input, linear_weight, target, linear_bias):
        from flce_ops.distributed import dtensor_log_probs  # builds on torch.distributed.tensor: only for its users

        return dtensor_log_probs(
            input,
            linear_weight,
            target,
            linear_bias,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            entropy=entropy,
            argmax=argmax,
        )
    input, linear_weight, linear_bias = autocast_operands(input.device.type, input, linear_weight, linear_bias)
    check_head(OP, input, linear_weight, target, linear_bias, softcap, temperature)
    flat_target = target.reshape(target.numel())
    target_logit, lse, _, expected, _, largest, lse_rest = torch.ops.flce.linear_cross_entropy_forward(
        input.reshape(target.numel(), input.shape[-1]),
        linear_weight,
        flat_target,
        linear_bias,
        None,
        ignore_index=ignore_index,
        **logit_scalars(logit_scale, softcap, temperature, input),
        expected_logit=entropy,
        argmax=argmax,
    )
    valid = (flat_target != ignore_index).reshape(target.shape)
    rows = (target_logit, lse, expected if entropy else None, largest if argmax else None, lse_rest)
    return per_token(valid, *(None if row is None else row.reshape(target.shape) for row in rows))


def per_token(
    valid: Tensor,  # (...)
    target_logit: Tensor,  # (...), as the others
    lse: Tensor,
    expected_logit: Tensor | None,
    argmax: Tensor | None,
    lse_rest: Tensor | None = None,  # what the rounding of lse took from it
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs, lse, entropy and argmax from the row statistics; (0,) for those that are not there."""
    entropy = lse.new_zeros(0) if expected_logit is None else torch.where(valid, lse - expected_logit, 0.0)
    return (
        torch.where(valid, -surprisal(target_logit, lse, lse_rest), 0.0),
        torch.where(valid, lse, 0.0),
        entropy,
        lse.new_zeros(0, dtype=torch.int64) if argmax is None else argmax,
    )
