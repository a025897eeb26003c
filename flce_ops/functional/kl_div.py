"""linear_kl_div and its documentation.

Padded vocabularies: each operand is replaced by a view of its classes below vocab_size = v.

    linear_weight[:v]   linear_bias[:v]   teacher_weight[:v]   teacher_bias[:v]   teacher_probs[..., :v]

Classes from v on have no probability on either side. Forward copies nothing. In backward, autograd puts the gradient of
v rows into a tensor of all rows, with zeros for the others.
"""

from typing import Any

from torch import Tensor

from ..distributed import any_dtensor
from ..entry.arguments import ReductionName
from ..entry.kl_div import OP
from ..meta.checks import check_dense, check_per_class
from ..objectives.divergence import Kind
from ..support.refusals import refuse_hole
from .public import call_entry, public

# N tokens, D and E hidden, V vocabulary (padding included)


# for each argument: the dimension that holds the classes, and for a bias its weight
CLASSES = {
    "linear_weight": (0, ""),
    "linear_bias": (0, "linear_weight"),
    "teacher_weight": (0, ""),
    "teacher_bias": (0, "teacher_weight"),
    "teacher_probs": (-1, ""),
}


def first_classes(op: str, vocab_size: int, given: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of `given` that have classes, cut to vocab_size; they may differ in V."""
    tensors: dict[str, Tensor] = {name: given[name] for name in CLASSES if given.get(name) is not None}
    if vocab_size < 1:
        raise ValueError(f"{op}: expected vocab_size to be positive or None, got {vocab_size}")
    if any_dtensor(*tensors.values()):
        refuse_hole(op, "vocab_size of DTensors", vocab_size=vocab_size)
    found = {}
    for name, tensor in tensors.items():
        dim, beside = CLASSES[name]
        check_dense(op, **{name: tensor})
        if beside in tensors and tensors[beside].dim() == 2:
            check_per_class(op, name, tensor, tensors[beside].shape[0], beside)
        if tensor.dim() and tensor.shape[dim] < vocab_size:
            raise ValueError(
                f"{op}: expected vocab_size to be at most the {tensor.shape[dim]} classes of {name}, got {vocab_size}"
            )
        whole = tensor.dim() == 0 or tensor.shape[dim] == vocab_size
        found[name] = tensor if whole else tensor.narrow(dim, 0, vocab_size)
    return found


def call(given: dict[str, Any]) -> Tensor:
    learnt = isinstance(given.get("logit_scale"), Tensor)
    if learnt and given.get("teacher_logit_scale") is None and given.get("teacher_probs") is None:
        raise ValueError(
            f"{OP}: logit_scale is a tensor, which the student's alone can be; pass the teacher's as a number: "
            "teacher_logit_scale=1.0, say"
        )
    vocab_size = given.pop("vocab_size", None)
    if vocab_size is not None:
        given.update(first_classes(OP, vocab_size, given))
    return call_entry(OP, given)


@public(call)
def linear_kl_div(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    teacher_input: Tensor | None = None,  # (..., E)
    teacher_weight: Tensor | None = None,  # (V, E)
    *,
    teacher_probs: Tensor | None = None,  # (..., V)
    linear_bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V,)
    kind: Kind = "forward",
    beta: float = 0.5,
    target: Tensor | None = None,  # (...)
    ignore_index: int | None = -100,
    token_weight: Tensor | None = None,  # (...)
    reduction: ReductionName = "mean",
    normalizer: Tensor | float | None = None,  # ()
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    r"""Divergence between a student's and a teacher's distributions, without the logits of either.

    Same as ``F.kl_div(F.log_softmax(F.linear(input, linear_weight), -1), F.log_softmax(F.linear(teacher_input,
    teacher_weight), -1), log_target=True, reduction="none").sum(-1).mean()`` without the (N, V) matrices.

    The loss of each valid token, with q the student's and p the teacher's probabilities over the vocabulary::

        z = logit_scale * (input @ linear_weight.T + linear_bias)
        z = softcap * tanh(z / softcap), with softcap
        q = softmax(z / temperature)
        p = the same with the teacher's tensors, or teacher_probs
        m = beta * p + (1 - beta) * q

        "forward"  KL(p || q) = sum p (log p - log q)
        "reverse"  KL(q || p) = sum q (log q - log p)
        "jsd"      beta * KL(p || m) + (1 - beta) * KL(q || m)
        "tv"       total variation, sum |p - q| / 2
        "nla"      -log(sum min(p, q)), negative log-acceptance

    Args:
        input: the student's hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the student's head, (V, D), in input's dtype (any floating dtype under autocast).
        teacher_input: the teacher's hidden states, (..., E): as many tokens; E need not be D, nor the dtype input's.
        teacher_weight: weight of the teacher's head, (V, E), in teacher_input's dtype; the vocabulary is the student's.
        teacher_probs: the teacher's probabilities, (..., V), instead of its pair. Exact zeros are fine. Probabilities
            that do not add up to 1, such as a truncated top-k, give the value and the gradient of the sums above.
        linear_bias, teacher_bias: biases of the two heads, (V,).
        kind: "forward", "reverse", "jsd", "tv" or "nla". Where p = q, "tv" and "nla" have the middle of their
            subgradients.
        beta: weight of the teacher in the mixture of "jsd", as in TRL's generalized_jsd_loss, Liger's fused linear JSD
            and Agarwal et al.: 0 stands for "forward" and 1 for "reverse".
        target: (...), int64, int32 or uint8, read only to see which tokens are ignored: those equal to
            ``ignore_index``.
        ignore_index: target value of tokens that do not count. None is -100.
        token_weight: factor per token, (...), differentiable. The denominator of "mean" does not contain token_weight.
            Tokens of weight 0 are left out like ignored ones, unless token_weight gets a gradient.
        reduction: "none": divergence per token, 0 where ignored. "mean": sum over tokens divided by the number of valid
            tokens (F.kl_div's "batchmean" of flattened tokens). Without a valid token it is 0, as in distillation
            trainers, where F.cross_entropy gives nan. "sum".
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum".
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient;
            teacher_logit_scale must then be given.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        temperature: a number that divides the student's and the teacher's logits after the caps. Multiply the loss by
            temperature ** 2 yourself if you want the gradient's size kept (Hinton et al.).
        teacher_logit_scale: factor on the teacher's logits; logit_scale by default.
        teacher_softcap: bound on the teacher's logits; none by default, also if the student has one.
        vocab_size: the number of classes if the student's or the teacher's vocabulary is padded. Classes from
            vocab_size on have no probability on either side, whatever the weights hold there, and gradient 0; what
            teacher_probs has there is left out. linear_weight, teacher_weight and teacher_probs may then differ in V.
            If linear_weight is longer, its gradient is copied; nothing else is. Not with DTensors.
        shift: as in ``linear_cross_entropy``: position t is left out if label t + 1 is ``ignore_index``, and so is the
            last position of each sequence.
        batch_invariant: as in ``linear_cross_entropy``, for the bits of input's gradient.

    Returns:
        The divergence in nats per token, float32 (float64 for float64 input), of shape () or, for "none", (...). The
        result is inf, with a gradient of nan, if the first distribution has probability on a class to which the second
        gives exactly 0 (teacher_probs under "reverse"). A class to which both give 0 has no part in value or gradient,
        where F.kl_div of the logits makes nan.

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        NotImplementedError: a teacher tensor that requires a gradient (the teacher is constant: detach it);
            forward-mode or second derivatives; a layout of DTensors that docs/distillation.md does not list.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, activation checkpointing, DTensor with tokens
        or vocabulary sharded. Forward makes the gradients of a scalar loss, in the same pass over the logits. In
        float16, under checkpointing, torch.func and for reduction="none" backward makes the logits again instead.

    Source:
        Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; Agarwal et al., "On-Policy Distillation of
        Language Models", 2024. See docs/distillation.md.
    """
