"""linear_cross_entropy: what its arguments mean."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor
from typing_extensions import Unpack

from flce_ops.entry import metrics
from flce_ops.entry.arguments import OP, ReductionName, check_torch_options
from flce_ops.functional.keywords import CrossEntropyKeywords
from flce_ops.functional.public import call_entry, public
from flce_ops.math.sparse_gradient import Mode, Operand

# N tokens, D hidden, V vocabulary


class LinearCrossEntropyMetrics(NamedTuple):
    """By-products of the loss; constants, no gradient flows through them."""

    token_accuracy: Tensor  # (), float32: share of the tokens not ignored whose target has the largest logit
    argmax: Tensor  # target's shape, int64: class of the largest logit, -1 at ignored tokens


def call(given: dict[str, Any]) -> Any:
    options, return_metrics = given.pop("options"), given.pop("return_metrics")
    if options is not None:
        check_torch_options(OP, options, given["input"].dtype)
    if return_metrics is False:
        return call_entry(OP, given)
    names = metrics.metric_names(OP, return_metrics)
    asked = metrics.statistics_for(names)._asdict()
    loss, *found = call_entry(OP, given, metrics="_metrics", asked=asked)
    by_name = metrics.by_name(names, found, given["z_loss"])
    if return_metrics is True:
        return loss, LinearCrossEntropyMetrics(by_name["token_accuracy"], by_name["argmax"])
    return loss, by_name


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    return_metrics: Literal[False] = False,
    **options: Unpack[CrossEntropyKeywords],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    return_metrics: Literal[True],
    **options: Unpack[CrossEntropyKeywords],
) -> tuple[Tensor, LinearCrossEntropyMetrics]: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    return_metrics: Sequence[str],
    **options: Unpack[CrossEntropyKeywords],
) -> tuple[Tensor, dict[str, Tensor]]: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    return_metrics: bool,
    **options: Unpack[CrossEntropyKeywords],
) -> Tensor | tuple[Tensor, LinearCrossEntropyMetrics]: ...


@public(call)
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
    temperature: float | Tensor = 1.0,
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
    return_metrics: bool | Sequence[str] = False,
    options: object = None,
) -> Tensor | tuple[Tensor, LinearCrossEntropyMetrics | dict[str, Tensor]]:
    r"""Same as ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)``, without the (N, V) logits.

    Per token that is not ignored, with ``u = input @ linear_weight.T + linear_bias``::

        z    = logit_scale * u                    then, with softcap:  softcap * tanh(z / softcap)
        z    = z / temperature
        lse  = logsumexp_j z_j
        loss = token_weight * [ (1 - label_smoothing) * weight_y * (lse - z_y)
                                + label_smoothing / V * sum_j weight_j * (lse - z_j)
                                + z_loss * lse ** 2 ]

    With several classes y_k a token and their weights q as target and target_weight (soft targets)::

        loss = token_weight * [ (1 - label_smoothing) * sum_k q_k * weight_yk * (lse - z_yk)
                                + label_smoothing / V * sum_j weight_j * (lse - z_j)
                                + z_loss * lse ** 2 ]

    With class probabilities q as target::

        loss = token_weight * sum_j weight_j * [(1 - label_smoothing) * q_j + label_smoothing / V] * (lse - z_j)

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast). For a
            K-dimensional loss (V, d_1, ..., d_K, D), a head for each position, which run one after the other;
            target, loss and token_weight are (..., d_1, ..., d_K) then, and linear_bias (V, d_1, ..., d_K).
        target: class indices in [0, V) or ``ignore_index``, (...), int64 or int32. With ``target_weight`` (..., K): K
            classes a token, of which those that are ``ignore_index`` count for nothing; a token without another is
            ignored. Or class probabilities, (..., V) or (..., V, d_1, ..., d_K), of any floating dtype, not negative
            (that gives nan); they need not add up to 1, and are constants.
        linear_bias: (V,), in input's dtype.
        weight: class weights, (V,), as F.cross_entropy's; constants, they get no gradient.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of tokens not
            ignored, or, of one class a token, by the sum of their class weights. "sum".
        ignore_index: target value that contributes neither loss nor gradient, whatever input holds there. None is -100,
            as torch's.
        label_smoothing: in [0, 1].
        softcap: bound on the logits' magnitude (Gemma 2), applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap (Cohere, Granite): a number, or a 0-d tensor (CLIP), which
            gets its gradient and is multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        z_loss: factor of the squared logsumexp (PaLM), inside the sum that "mean" divides.
        token_weight: factor per token, (...); it does not enter the denominator of "mean". Tokens of weight 0 are left
            out like ignored ones, unless token_weight gets a gradient or metrics are returned.
        target_weight: q, one for each class of target, (..., K), any floating dtype, not negative (that gives nan).
            They need not add up to 1 (a teacher's top K), equal classes of a token add up, 0 is fine, and what stands
            beside ``ignore_index`` is not read. Constants. A hard target beside soft ones is one more slot:
            ``torch.cat([target.unsqueeze(-1), classes], -1)`` with its weight beside theirs.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum": the number
            of target tokens in the whole batch under gradient accumulation or data parallelism.
            Over 0 the loss and its gradients are those of losses.sum() / normalizer.
        shift: target holds the labels of the same positions as input, (..., T): the token at position t is scored
            against the label at t + 1, as causal language models are, and the last one of each sequence is ignored; its
            loss is 0, its argmax -1. token_weight stays that of position t. Several sequences packed into one: label
            the first token of each ``ignore_index``. Nothing is copied but the labels. Not for probabilities, soft
            targets and K-dimensional losses, nor for labels whose sequences are sharded.
        main_grad: (V, D), contiguous, float32 (float64 for float64) or linear_weight's dtype: backward adds
            linear_weight's gradient to it, inside the GEMM and without rounding where it is float32, and autograd gets
            none: ``linear_weight.grad`` stays as it is. Forward leaves it alone. Megatron's ``weight.main_grad``; see
            docs/clients.md.
        gradient_threshold: 0, or a probability from which on entries of softmax(z) - q enter the gradients of input and
            linear_weight as they are: 2^-10, say; q is the target's distribution, onehot(y) or with target_weight and
            label smoothing what these make of it. The loss and linear_bias's gradient stay exact. Not in float16; see
            docs/numerics.md.
        gradient_mode: what becomes of an entry g below the threshold. "unbiased": with probability |g| / threshold it
            is threshold with g's sign, otherwise 0, so gradients have the right mean and some noise; where many
            tokens keep a block of 128 classes, CUDA kernels make its exact gradient, which is faster. "drop": 0.
            "tiles": only where all of a tile of 128 tokens by 128 classes is below it, and none of the tokens has its
            target there, the tile becomes 0: Cut Cross-Entropy's filter, whose threshold is 2^-12.
        gradient_seed: 0-d int64 tensor on input's device, for "unbiased": the same seed keeps the same entries.
            Another one in every step, and on every rank that has other tokens (of DTensors that is done here).
        gradient_sparse: "input" or "linear_weight" where only the gradient of that one is to be sparse.
        gradient_class_order: (V,) int64, a permutation of the classes, in whose order blocks and tiles are formed:
            frequent classes first makes others' tiles small. Costs a copy of linear_weight, of its gradient too; not
            needed where ids stand in such an order, as tokenizers that merge number them. No other effect on "drop".
        return_metrics: also return by-products of the same pass, without a host sync: True for the accuracy and the
            argmax, or names. Of target's shape and, with ``p = softmax(z)``, in nats::

                "lse"               logsumexp_j z_j
                "entropy"           -sum_j p_j log p_j
                "log_sum_sq_probs"  log sum_j p_j ** 2
                "mean_logit"        mean_j z_j
                "z_loss"            z_loss * lse ** 2, before token_weight
                "argmax"            class of the largest logit, the first of equals; -1 at ignored tokens
                "is_top1"           whether target is the argmax, bool
                "token_accuracy"    (), float32: share of the tokens not ignored whose target is

            Constants, 0 at ignored tokens; docs/log_probs.md says what each costs. Not for probabilities, nor is
            ``z_loss``; with target_weight not the last three.
        options: torch.nn.LinearCrossEntropyOptions, for calls written for torch's function. Its chunk sizes bound
            memory as ``set_workspace`` does here, and have no effect; what would change the sums is refused.

    Returns:
        float32 (float64 for float64 input): shape () or, for "none", that of the tokens. In nats per token.
        With ``return_metrics=True`` a pair: that loss, and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``; with
        names a pair of the loss and a dict of what they name.

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        IndexError: a target outside [0, V); on CUDA a device-side assert instead, without a host sync.
        NotImplementedError: forward-mode or third derivatives; a gradient for ``weight``, ``target_weight`` or
            probabilities, and second derivatives of the latter's loss; probabilities or a K-dimensional loss beside
            DTensors; target_weight with a K-dimensional loss. main_grad under torch.func or create_graph=True, beside
            DTensors, for probabilities or a K-dimensional loss; gradient_threshold for probabilities, a
            K-dimensional loss, in float16, with main_grad, create_graph=True, and over a sharded vocabulary but for a
            scalar loss of one class a token.

    Composability:
        torch.compile(fullgraph=True), torch.export, autocast, torch.func.grad / vmap, double backward, activation
        checkpointing, CUDA graphs. Gradients of a scalar loss are made during forward, in the same pass over the
        logits; in float16, under checkpointing, torch.func, with main_grad and reduction="none" backward makes them,
        from logits that forward retained (``set_workspace``) or that it makes again.

    Source:
        Memory idea: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024. See DESIGN.md.
    """
