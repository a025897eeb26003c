"""For how many tokens forward saves logits for backward: the table SAVE_LOGITS, and the bytes available.

Autograd holds the saved logits, as any saved tensor (`save` in function.py), and frees them after backward.
"""

import torch

from ..math.shards import shard_rows
from ..meta import saved_columns
from ..meta.arguments import Backward, BackwardInPlace, Forward
from ..meta.call import Arguments
from ..support.path import Choice
from ..support.table import choose
from ..support.workspace import rows_to_retain
from .call_facts import CallFacts, loss_facts
from .paths import PRODUCT_SAVED, SAVE_LOGITS, UNCAPPED


def saved_rows(call: Forward) -> int:
    """Rows whose logits the forward operator saves, if a gradient may be requested."""
    input, linear_weight, _, linear_bias, _ = call.operands
    facts = loss_facts(input, linear_weight, linear_bias)._replace(
        one_class=linear_weight.shape[0] == 1,
        softcap=call.logits.softcap is not None,
        topk=call.operands.target.dim() == 2,
        sparse=call.sparse.gradient_threshold != 0.0,
    )
    # as many on every rank
    num_classes = linear_weight.shape[0] if call.ranks == 1 else shard_rows(call.num_classes, call.ranks)
    return rows_to_save(facts, input.shape[0], num_classes)


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


def rows_to_save(facts: CallFacts, tokens: int, num_classes: int) -> int:
    """The number of rows. If N is symbolic, this is an expression of N. The bytes that set_workspace allows are a
    constant in it.
    """
    (paths,) = SAVE_LOGITS.values()
    if choose(paths, facts).name == "recompute":
        return 0
    return torch.sym_min(tokens, rows_to_retain(saved_columns(num_classes, facts.dtype)))
