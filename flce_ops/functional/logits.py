"""cross_entropy of given logits, and its documentation."""

from typing import Any

from torch import Tensor

from ..entry.arguments import ReductionName
from ..entry.logits import OP
from .loss import LinearCrossEntropyMetrics
from .public import call_entry, public

# N tokens, V vocabulary


def call(given: dict[str, Any]) -> Any:
    in_place = "_" if given.pop("inplace_backward", False) else ""
    if not given.pop("return_metrics", False):
        return call_entry(OP, given, metrics=in_place)
    loss, token_accuracy, argmax = call_entry(OP, given, metrics="_metrics" + in_place)
    return loss, LinearCrossEntropyMetrics(token_accuracy, argmax)


@public(call, only_for=("inplace_backward", "return_metrics"))
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
    The loss is that of linear_cross_entropy's docstring, with the given logits as ``u``.

    Forward makes the gradient of a scalar loss in the same pass: each logit is read from memory once, and its gradient,
    in the logits' dtype, is written once.

    Args:
        logits: (..., V); float64, float32, bfloat16 or float16. Logits that cannot be viewed as (N, V), such as
            ``logits[:, :-1]`` of several sequences, are copied: pass ``shift=True`` instead.
        target: class indices in [0, V) or ``ignore_index``, (...), int64, int32 or uint8.
        weight, reduction, ignore_index, label_smoothing, softcap, z_loss, token_weight, normalizer, shift: as in
            ``linear_cross_entropy``.
        logit_scale: a number. Multiply the logits by a learnt one yourself.
        temperature: a number that divides the logits after the cap.
        inplace_backward: hands the logits over: their gradient may be written over them, so that no second matrix of
            their size exists. What the logits hold after the call is not defined. Forward writes the gradient if a
            scalar loss is differentiated, not in float16, a checkpoint or torch.func, and if the logits are all of
            their memory and the result of an operation (no leaf, no input of a compiled graph, no retain_grad()).
            Elsewhere the logits stay. ``last_path()`` says which. Autograd raises if another operation had saved the
            logits (as tanh saves its result), if something computed from them afterwards is differentiated, or if
            retain_grad() or a hook was set on them after the loss.
        return_metrics: also return the accuracy and the argmax, from the same pass and without a host synchronisation.

    Returns:
        The loss in nats per token, float32 (float64 for float64 logits), of shape () or, for "none", target's.
        With ``return_metrics`` a pair of that loss and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``.

    Raises:
        ValueError, TypeError, IndexError: as in ``linear_cross_entropy``.
        NotImplementedError: second derivatives of a scalar loss whose gradient forward made. With reduction="none"
            they are right.
        RuntimeError: logits that were handed over had other readers, as above.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, activation checkpointing, CUDA graphs, DTensor
        with tokens or classes sharded. The logits are not saved for backward, except in float16, under checkpointing,
        torch.func, with sharded classes and for reduction="none": backward reads them again there.

    Source:
        docs/logits.md has the cost and who needs it.
    """
