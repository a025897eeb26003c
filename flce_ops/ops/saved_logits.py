"""Saved logits: for how many tokens a forward operator saves the logits that its backward operator reads.

    made     by forward, for the first valid tokens: as many as set_workspace(retained=...) allows
    kept     by autograd alone, beside the operator's arguments
    freed    by autograd: after backward, or with the graph under retain_graph; backward's own Function keeps none

For other tokens backward computes the logits again. A row of SAVE_LOGITS says when a call saves none at all.
"""

import torch
from torch import SymInt

from ..math.options import saved_columns
from ..meta.arguments import Backward, BackwardInPlace, Forward
from ..meta.call import Arguments
from ..support.path import Choice, Condition, PathRow, choose
from ..support.workspace import rows_to_retain
from .paths import HALF, NO_CHECKPOINT, NO_FUNCTORCH, NO_HOOKS, WANTS_GRADIENT, in_triton, loss_facts

# The Triton kernels save z, the logits after the cap, from which dz/du cannot be computed where the cap saturates.
UNCAPPED = Condition("no softcap (in Triton)", lambda s: not (s.softcap and in_triton(s)))
# lse must be computed from exactly the logits that are saved, so rounded copies cannot be saved. On other GPUs the
# product of 16-bit operands is float32. And one class has loss 0 only if logit and lse come from one product.
PRODUCT_SAVED = Condition(
    "an NVIDIA GPU and more than one class, a CPU, or operands that are not half",
    lambda s: in_triton(s) or s.device == "cpu" or not HALF.holds(s),
)
# A sparse backward makes its lists from exponentials, which it computes in any case.
DENSE_OR_CPU = Condition("no gradient_threshold (but on a CPU)", lambda s: not s.sparse or s.device == "cpu")
SAVE_LOGITS = {
    "logits between a forward operator and its backward one": (
        PathRow("save", (WANTS_GRADIENT, NO_FUNCTORCH, NO_HOOKS, NO_CHECKPOINT, UNCAPPED, PRODUCT_SAVED, DENSE_OR_CPU)),
        PathRow("recompute", ()),
    ),
}


def saves_logits(retain: int | SymInt) -> bool:
    """A symbolic number of rows is not compared with 0. The comparison would be a guard, which a number that depends on
    data cannot have. Backward takes saved logits of no row, too.
    """
    return isinstance(retain, SymInt) or retain > 0


def saved_rows(call: Forward) -> int:
    """How many rows' logits the forward operator saves, if a gradient may be requested. If N is symbolic, this is an
    expression of N. The bytes that set_workspace allows are a constant in it.
    """
    input, linear_weight, _, linear_bias, _ = call.operands
    if linear_weight is None:  # given logits are there in backward
        return 0
    facts = loss_facts(input, linear_weight, linear_bias)._replace(
        one_class=linear_weight.shape[0] == 1,
        softcap=call.logits.softcap is not None,
        topk=call.operands.target.dim() == 2,
        sparse=call.sparse.gradient_threshold != 0.0,
    )
    (paths,) = SAVE_LOGITS.values()
    if choose(paths, facts).name == "recompute":
        return 0
    return torch.sym_min(input.shape[0], rows_to_retain(saved_columns(linear_weight.shape[0], facts.dtype)))


def saved_notes(choice: Choice, call: Arguments) -> tuple[str, ...]:
    """For last_path(): how many rows are saved, or which condition prevents saving."""
    if isinstance(call, Forward) and call.retain:
        rows = call.retain
    elif isinstance(call, Backward):
        rows = 0 if call.retained is None else call.retained.shape[0]
    else:
        return ()
    note = f"logits of {rows} of {call.operands.input.shape[0]} tokens saved"
    if isinstance(call, BackwardInPlace):
        note = f"grad_linear_weight added to main_grad in {call.main_grad.dtype}, {note}"
    expected = [] if rows else [c.name for c in (UNCAPPED, PRODUCT_SAVED) if not c.holds(choice.facts)]
    return (f"{note} (expects {', '.join(expected)})" if expected else note,)
