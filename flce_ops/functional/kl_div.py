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

    Same as ``F.kl_div(log q, log p, log_target=True, reduction="none").sum(-1).mean()`` for q the student's and p the
    teacher's probabilities. The loss of each valid token::

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
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: (V, D), in input's dtype.
        teacher_input: (..., E), in any of these dtypes.
        teacher_weight: (V, E), in teacher_input's dtype.
        teacher_probs: probabilities, (..., V), instead of that pair; need not add up to 1.
        linear_bias, teacher_bias: (V,).
        kind: one of the five.
        beta: the teacher's weight in "jsd"; 0 stands for "forward", 1 for "reverse".
        target, ignore_index: tokens whose target, (...), is ``ignore_index`` do not count.
        reduction: as in ``linear_cross_entropy``, but the "mean" of no token is 0.
        logit_scale, softcap: as in ``linear_cross_entropy``, of the student.
        teacher_logit_scale: a number; logit_scale by default.
        teacher_softcap: none by default.
        temperature: a number, for both.
        vocab_size: classes from it on are padding, without probability; the padded sizes may differ.

    Args: Training
        token_weight, normalizer, shift, batch_invariant: as in ``linear_cross_entropy``.

    Returns:
        The divergence in nats, float32 or float64, () or, for "none", (...). inf, with a gradient of nan, where the
        second distribution is exactly 0 and the first is not.

    Raises:
        ValueError, TypeError: by the argument's name.
        NotImplementedError: a teacher tensor that requires a gradient; forward-mode or second derivatives; vocab_size
            with DTensors.

    Composability:
        As ``linear_cross_entropy``.

    Source:
        Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; Agarwal et al., "On-Policy Distillation of
        Language Models", 2024. See docs/distillation.md.
    """
