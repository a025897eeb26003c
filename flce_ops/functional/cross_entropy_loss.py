"""linear_cross_entropy, and cross_entropy of given logits, with their documentation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..entry.arguments import OP, ReductionName, check_torch_options
from ..entry.bodies import NAMES, OF_ARGMAX, OP_OF_LOGITS, by_name, checked_names, statistics_for
from ..math.sparse_gradient import Mode, Operand
from ..ops import autocast_operands
from ..support.refusals import refuse_hole
from .public import call_entry, public

# N tokens, D hidden, V vocabulary


class LinearCrossEntropyMetrics(NamedTuple):
    """Metrics of the loss. They are constants: no gradient flows through them.

    Attributes:
        token_accuracy: share of valid tokens whose target has the largest logit, (), float32.
        argmax: class of the largest logit, of target's shape, int64; -1 at ignored tokens.
    """

    token_accuracy: Tensor
    argmax: Tensor


def call(given: dict[str, Any]) -> Any:
    options, return_metrics = given.pop("options", None), given.pop("return_metrics", False)
    if options is not None:
        check_torch_options(OP, options, given["input"].dtype)
        if options.acc_policy == "accurate" and given["input"].device.type == "cpu":
            return call_in_float32(given, return_metrics)
    return call_with_metrics(given, return_metrics)


def call_in_float32(given: dict[str, Any], return_metrics: Any) -> Any:
    """On a CPU the product of 16-bit operands is rounded. Here float32 copies are multiplied, and their gradients are
    rounded once. linear_weight takes a float32 copy and a float32 gradient, each of twice its bytes.
    """
    names = [name for name in ("input", "linear_weight", "linear_bias") if given.get(name) is not None]
    operands = autocast_operands("cpu", *(given[name] for name in names))
    dtypes = {of.dtype for of in operands}
    if dtypes in ({torch.bfloat16}, {torch.float16}):
        if given.get("main_grad") is not None:
            refuse_hole(OP, "accurate main_grad", dtype=operands[0].dtype)
        operands = tuple(of.float() for of in operands)
    given |= dict(zip(names, operands))
    with torch.autocast("cpu", enabled=False):
        return call_with_metrics(given, return_metrics)


def call_with_metrics(given: dict[str, Any], return_metrics: Any) -> Any:
    if return_metrics is False:
        return call_entry(OP, given)
    flag = return_metrics is True
    names = OF_ARGMAX if flag else checked_names(OP, return_metrics, NAMES)
    asked = statistics_for(names)._asdict()
    loss, *found = call_entry(OP, given, metrics="_metrics", asked=asked)
    named = by_name(names, found, given.get("z_loss", 0.0))
    if flag:
        return loss, LinearCrossEntropyMetrics(named["token_accuracy"], named["argmax"])
    return loss, named


@public(call, only_for=("options", "return_metrics"))
def linear_cross_entropy(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D), or (V, d_1, ..., d_K, D)
    target: Tensor,  # (...), (..., K) with target_weight, or (..., V) of probabilities
    linear_bias: Tensor | None = None,  # (V,)
    *,
    weight: Tensor | None = None,  # (V,)
    reduction: ReductionName = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,  # ()
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...)
    target_weight: Tensor | None = None,  # (..., K)
    normalizer: Tensor | float | None = None,  # ()
    shift: bool = False,
    main_grad: Tensor | None = None,  # (V, D)
    gradient_threshold: float = 0.0,
    gradient_mode: Mode = "unbiased",
    gradient_seed: Tensor | None = None,  # ()
    gradient_sparse: Operand = "both",
    gradient_class_order: Tensor | None = None,  # (V,)
    batch_invariant: bool = False,
    return_metrics: bool | Sequence[str] = False,
    options: object = None,
) -> Any:  # a Tensor; with return_metrics a pair
    r"""Same as ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)``, without the (N, V) logits.

    The loss of each token::

        z    = logit_scale * (input @ linear_weight.T + linear_bias)
        z    = softcap * tanh(z / softcap) / temperature
        lse  = logsumexp_j z_j
        loss = token_weight * [
                   (1 - label_smoothing) * weight_y * (lse - z_y)
                   + label_smoothing / V * sum_j weight_j * (lse - z_j)
                   + z_loss * lse ** 2 ]

    docs/arguments.md has the details.

    Args:
        input: hidden states, (..., D).
        linear_weight: (V, D); (V, d_1, ..., d_K, D) for several targets a token.
        target: classes, (...), int64, int32 or uint8; with target_weight (..., K); or probabilities, (..., V).
        linear_bias: (V,).
        weight: constant class weights, (V,).
        reduction: "mean", "sum", "none".
        ignore_index: target of tokens that do not count; None is -100.
        label_smoothing: in [0, 1].
        options: torch.nn.LinearCrossEntropyOptions; docs/from_torch.md.

    Args: Logits
        softcap: bound on the logits' magnitude.
        logit_scale: factor before the cap: a number or a 0-d tensor.
        temperature: divisor after the cap; without softcap also a 0-d tensor.

    Args: Training
        z_loss: factor of the squared logsumexp (PaLM).
        token_weight: differentiable factors, (...).
        target_weight: constant weights of a token's K classes, (..., K).
        normalizer: number or 0-d tensor that divides the sum instead of the count.
        shift: scores position t against label t + 1.
        main_grad: buffer to which backward adds linear_weight's gradient, contiguous, (V, D), float32 or its dtype;
            docs/clients.md.
        batch_invariant: equal bits of input's gradient beside any tokens; docs/agreement.md.
        return_metrics: True for accuracy and argmax, or names of docs/log_probs.md.

    Args: Sparse gradient, see docs/numerics.md
        gradient_threshold: probability below which gradient entries are drawn or dropped.
        gradient_mode: "unbiased" (drawn) or "drop".
        gradient_seed: 0-d int64 tensor on input's device; another in each step.
        gradient_sparse: "both", "input" or "linear_weight".
        gradient_class_order: permutation of the classes, (V,), int64.

    Returns:
        The loss in nats, float32 or float64, () or, for "none", (...). With ``return_metrics`` a pair with
        ``LinearCrossEntropyMetrics`` or a dict.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the argument.
        IndexError: a target outside [0, V); on CUDA a device-side assert.

    Composability:
        docs/index.md; of DTensors docs/distributed.md.

    Source:
        Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024; docs/kernels.md.
    """


def call_of_logits(given: dict[str, Any]) -> Any:
    in_place = "_" if given.pop("inplace_backward", False) else ""
    if not given.pop("return_metrics", False):
        return call_entry(OP_OF_LOGITS, given, metrics=in_place)
    loss, token_accuracy, argmax = call_entry(OP_OF_LOGITS, given, metrics="_metrics" + in_place)
    return loss, LinearCrossEntropyMetrics(token_accuracy, argmax)


@public(call_of_logits, only_for=("inplace_backward", "return_metrics"))
def cross_entropy(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...)
    *,
    weight: Tensor | None = None,  # (V,)
    reduction: ReductionName = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,  # ()
    shift: bool = False,
    inplace_backward: bool = False,
    return_metrics: bool = False,
) -> Any:  # a Tensor; with return_metrics a pair
    r"""Same as ``F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())``, without a copy of the logits.

    For models that must have logits, and for heads that are not linear. (``linear_cross_entropy`` never holds logits.)
    The loss is that of ``linear_cross_entropy``, with the given logits in place of the product (docs/arguments.md).

    Forward makes the gradient of a scalar loss in the same pass: each logit is read from memory once, and its gradient,
    in the logits' dtype, is written once.

    Args:
        logits: (..., V); float64, float32, bfloat16 or float16. Logits that cannot be viewed as (N, V), such as
            ``logits[:, :-1]`` of several sequences, are copied: pass ``shift=True`` instead.
        target: classes, (...), int64, int32 or uint8.
        weight, reduction, ignore_index, label_smoothing, softcap, z_loss: as in ``linear_cross_entropy``.
        logit_scale: a number. Multiply the logits by a learnt one yourself.
        temperature: a number that divides the logits after the cap.

    Args: Training
        token_weight, normalizer, shift: as in ``linear_cross_entropy``.
        inplace_backward: hands the logits over: their gradient may be written over them, so that no second matrix of
            their size exists. What the logits hold after the call is not defined. docs/quickstart.md says when the
            gradient is written there; ``last_path()`` says whether it was.
        return_metrics: also return the accuracy and the argmax, from the same pass and without a host synchronisation.

    Returns:
        The loss in nats, float32 (float64 for float64 logits), of shape () or, for "none", target's. With
        ``return_metrics`` a pair of that loss and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``.

    Raises:
        ValueError, TypeError, IndexError: as in ``linear_cross_entropy``.
        NotImplementedError: second derivatives of a scalar loss whose gradient forward made. With reduction="none"
            they are right.
        RuntimeError: logits that were handed over had other readers: another operation had saved them (as tanh saves
            its result), something computed from them afterwards is differentiated, or retain_grad() or a hook was set
            on them after the loss.

    Composability:
        As ``linear_cross_entropy``. The logits are not saved for backward, except in float16, under checkpointing,
        torch.func, with sharded classes and for reduction="none": backward reads them again there.

    Source:
        docs/quickstart.md, Given logits, has the cost and who needs it.
    """
