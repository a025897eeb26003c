"""Second derivatives: the plain formula, with all logits in memory, differentiated twice by autograd.

The first derivative of an operator is its backward operator, chunk by chunk, under create_graph, too. Only who
differentiates that one pays for all logits. Operands are replaced by views: a path from one operand to another is the
caller's, and would be counted here once more.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.options import Cotangents, accumulation_dtype
from ..math.statistics import target_columns

# N tokens, D hidden, V vocabulary

COTANGENTS = (*Cotangents._fields, "grad_expected_log_prob")


def second_derivatives(
    call: Any, grad_grads: Sequence[Tensor | None], asked: Sequence[bool]
) -> dict[str, Tensor | None]:
    """The gradients of a backward operator's arguments by name: those that are `asked` for. `grad_grads` are the
    cotangents of its results.
    """
    cotangents = dict(zip(COTANGENTS, (*call.cotangents, vars(call).get("grad_expected_log_prob"))))
    cotangents = {name: tensor for name, tensor in cotangents.items() if tensor is not None}
    along = {name: tensor for name, tensor in zip(call.made, grad_grads) if tensor is not None}
    given = call.operands._asdict() | call.logits._asdict()
    leaves = {name: given[name] for name in call.made} | cotangents
    fixed = {name: leaf for name, leaf in leaves.items() if leaf is not None}

    def gradients(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = fixed | leaves

        def rows(operands: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: of for name, of in plain_rows(call, leaves | operands).items() if name in cotangents}

        found, pull, *_ = torch.func.vjp(rows, {name: leaves[name] for name in along})
        return pull({name: leaves[name].to(of.dtype) for name, of in found.items()})[0]

    wanted = {name: leaf for name, leaf in fixed.items() if asked[call.index[name]]}
    if not wanted:
        return {}
    with torch.autocast(call.lse_pair.device.type, enabled=False):
        return torch.func.vjp(gradients, wanted)[1](along)[0]


def plain_rows(call: Any, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """The numbers of rows by the names of their cotangents."""
    target, weight = call.operands.target, call.operands.weight
    rows, num_classes = operands["input"], call.operands.num_classes
    dtype = accumulation_dtype(rows.dtype)
    valid, hit, column = target_columns(target, call.ignore_index, vars(call).get("vocab_start", 0), num_classes)
    nbytes = rows.shape[0] * num_classes * dtype.itemsize
    warnings.warn(f"{call.op}: a second derivative keeps matrices of logits, {nbytes >> 20} MiB each", stacklevel=2)
    rows = torch.where(valid[:, None], rows, 0.0).to(dtype)
    if call.operands.linear_weight is not None:
        bias = operands.get("linear_bias")
        rows = torch.nn.functional.linear(
            rows, operands["linear_weight"].to(dtype), None if bias is None else bias.to(dtype)
        )
    z = capped(rows, call.logits.softcap, operands.get("logit_scale", call.logits.logit_scale))
    # a bias of -inf may switch off all classes of one shard
    z = torch.where((z == -torch.inf).all(1, keepdim=True), 0.0, z)
    # large logits would leave p the rounding of lse
    shift = z.detach().amax(1) if num_classes else z.new_zeros(z.shape[0])
    log_sum = (z - shift[:, None]).logsumexp(1)
    lse = shift + log_sum
    log_p = ((z - shift[:, None]) - log_sum[:, None]).clamp(min=torch.finfo(dtype).min)
    return {
        "grad_target_logit": torch.where(hit, z.gather(1, column).view_as(target), 0.0),
        "grad_lse": torch.where(valid, lse, 0.0),
        "grad_logit_sum": torch.where(valid, z.sum(1) if weight is None else z @ weight.to(dtype), 0.0),
        "grad_expected_log_prob": torch.where(valid, (log_p.exp() * log_p).sum(1), 0.0),
    }


def capped(u: Tensor, softcap: Tensor | None, logit_scale: Tensor | None) -> Tensor:
    z = u
    if logit_scale is not None:
        off = u == -torch.inf  # the derivative by the scale is 0 there, not 0 times -inf; that by u is the scale
        z = torch.where(off, logit_scale.detach() * u, logit_scale * torch.where(off, 0.0, u))
    return z if softcap is None else softcap * torch.tanh(z / softcap)
