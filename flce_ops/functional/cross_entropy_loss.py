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

    The loss of each valid token, whose target is not ``ignore_index``::

        u    = input @ linear_weight.T + linear_bias
        z    = logit_scale * u, with softcap: softcap * tanh(z / softcap)
        z    = z / temperature
        lse  = logsumexp_j z_j
        loss = token_weight * [
                   (1 - label_smoothing) * weight_y * (lse - z_y)
                   + label_smoothing / V * sum_j weight_j * (lse - z_j)
                   + z_loss * lse ** 2 ]

    With soft targets, several classes y_k a token and their weights q as target and target_weight, the second line of
    the loss is a sum over k::

                   (1 - label_smoothing) * sum_k q_k * weight_yk * (lse - z_yk)

    With class probabilities q as target::

        p    = (1 - label_smoothing) * q + label_smoothing / V
        loss = token_weight * sum_j weight_j * p_j * (lse - z_j)

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast). For a
            K-dimensional loss (V, d_1, ..., d_K, D): a head for each position, which run one after the other. target,
            loss and token_weight are (..., d_1, ..., d_K) then, and linear_bias is (V, d_1, ..., d_K).
        target: class indices in [0, V) or ``ignore_index``, (...), int64, int32 or uint8. With ``target_weight``: K
            classes a token, (..., K). A class that is ``ignore_index`` counts for nothing, and a token with only such
            classes is ignored. Or class probabilities, (..., V) or (..., V, d_1, ..., d_K), of any floating dtype.
            Probabilities are constants, need not add up to 1, and give nan where they are negative.
        linear_bias: (V,), in input's dtype.
        weight: class weights, (V,), as F.cross_entropy's. Constants: class weights get no gradient.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of valid
            tokens, or, for one class per token, by the sum of their class weights. "sum".
        ignore_index: target value of tokens that contribute neither loss nor gradient, whatever input holds there.
            None is -100, as torch's.
        label_smoothing: in [0, 1].
        softcap: bound on the logits' magnitude (Gemma 2), applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap (Cohere, Granite): a number, or a 0-d tensor (CLIP), which
            gets its gradient.
        temperature: divides the logits after the cap, as sampling does: a number; without softcap a 0-d tensor, which
            gets its gradient.
        z_loss: factor of the squared logsumexp (PaLM), inside the sum that "mean" divides.
        token_weight: factor per token, (...), differentiable. The denominator of "mean" does not contain token_weight.
            Tokens of weight 0 are left out like ignored ones, unless token_weight gets a gradient or metrics are
            returned.
        target_weight: q, a weight for each class of target, (..., K), of any floating dtype. Weights are constants,
            need not add up to 1 (a teacher's top K), and give nan where they are negative. Equal classes of a token
            add up. A weight beside ``ignore_index`` is not read. A hard target beside soft ones is one more class:
            ``torch.cat([target.unsqueeze(-1), classes], -1)``, with its weight beside theirs.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum". Pass the
            number of valid tokens in the whole batch under gradient accumulation or data parallelism.
        shift: target holds the labels of the same positions as input, (..., T). The token at position t is scored
            against the label at t + 1, as causal language models are, and the last token of each sequence is ignored.
            token_weight stays that of position t. In packed sequences label the first token of each
            sequence ``ignore_index``. Only labels are copied. Not for probabilities, soft targets, K-dimensional
            losses, and labels whose sequences are sharded.
        main_grad: (V, D), contiguous, float32 (float64 for float64) or linear_weight's dtype. Backward adds
            linear_weight's gradient to this buffer, inside the GEMM, and ``linear_weight.grad`` stays as it is.
            Megatron's ``weight.main_grad``; see docs/clients.md.
        gradient_threshold: 0, or the smallest probability at which an entry of softmax(z) - q enters the gradients of
            input and linear_weight unchanged, such as 2^-10; q is the distribution that the target stands for. The
            loss and linear_bias's gradient stay exact. Not in float16; see docs/numerics.md.
        gradient_mode: what happens to an entry g below the threshold. "unbiased": with probability |g| / threshold the
            entry becomes the threshold with g's sign, otherwise 0, so gradients have the right mean and some noise.
            "drop": 0.
        gradient_seed: 0-d int64 tensor on input's device, for "unbiased": the same seed keeps the same entries. Pass
            another seed in every step, and on every rank that has other tokens (DTensors do that here).
        gradient_sparse: "input" or "linear_weight" if only the gradient of that one is to be sparse.
        gradient_class_order: (V,) int64, a permutation of the classes, in whose order blocks of classes are formed.
            Frequent classes first is a good order, and tokenizers that merge number them so already. Costs a copy of
            linear_weight and of its gradient.
        batch_invariant: whether the bits of a token's row of input's gradient are to be the same whatever the other
            tokens are, and how many, as those of losses and log-probabilities always are. For "sum", "none", and "mean"
            with a normalizer. 16-bit dtypes on one NVIDIA GPU. See docs/agreement.md.
        return_metrics: also return by-products of the same pass, without a host synchronisation: True for the accuracy
            and the argmax, or names. With ``p = softmax(z)``, in nats::

                "lse"               logsumexp_j z_j
                "entropy"           -sum_j p_j log p_j
                "log_sum_sq_probs"  log sum_j p_j ** 2
                "mean_logit"        mean_j z_j
                "z_loss"            z_loss * lse ** 2, before token_weight
                "argmax"            class of the largest logit, -1 if ignored
                "is_top1"           whether target is the argmax, bool
                "token_accuracy"    (): share of valid tokens that are top 1

            Metrics are constants of target's shape, 0 at ignored tokens; docs/log_probs.md has what each costs. Not
            for probabilities; with target_weight not the last three.
        options: torch.nn.LinearCrossEntropyOptions, for calls written for torch's function. Its chunk sizes have no
            effect: ``set_workspace`` bounds the memory. acc_policy "accurate" has an effect on a CPU alone, where
            logits of 16-bit operands are rounded: float32 copies are multiplied instead. linear_weight's copy and
            gradient take 4 bytes a number each then. An acc_dtype that would change the sums is refused.

    Returns:
        The loss in nats, float32 (float64 for float64 input), of shape () or, for "none", that of the tokens. With no
        valid token "mean" is nan and "sum" is 0, as F.cross_entropy's are, and gradients are 0.
        With ``return_metrics=True`` a pair of the loss and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``. With
        names a pair of the loss and a dict of the named metrics.

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        IndexError: a target outside [0, V). On CUDA a device-side assert instead, without a host synchronisation.
        NotImplementedError: forward-mode derivatives; a gradient for ``weight``, ``target_weight`` or
            probabilities; second derivatives of the loss of probabilities; probabilities or a K-dimensional loss beside
            DTensors; target_weight with a K-dimensional loss. main_grad under torch.func or create_graph=True, beside
            DTensors, for probabilities or a K-dimensional loss. gradient_threshold for probabilities, a K-dimensional
            loss, float16, main_grad, create_graph=True, and over a sharded vocabulary. batch_invariant over a sharded
            vocabulary and on a CPU.

    Composability:
        torch.compile(fullgraph=True), torch.export, autocast, torch.func.grad / vmap, double backward, activation
        checkpointing, CUDA graphs, DTensor with tokens or vocabulary sharded. Forward makes the gradients of a scalar
        loss, in the same pass over the logits. In float16, under checkpointing, torch.func, with main_grad and for
        reduction="none" backward makes them, from saved logits (``set_workspace``) or from logits that it makes again.

    Source:
        Memory idea: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024. See docs/kernels.md.
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
        docs/quickstart.md, Given logits, has the cost and who needs it.
    """
