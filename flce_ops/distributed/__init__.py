"""The layout of tensors: what placements shard, the local tensors of a rank, how gradients return to DTensors, and
losses of a vocabulary shard.

layout.py           what each mesh dimension shards; what does not fit is refused; sums a mean's denominator
local.py            from a DTensor to this rank's tensor, and back for the gradient
vocab_parallel.py   statistics of whole rows from those of the shards; scalar losses with their gradients, in one pass

This file is the layout of plain tensors: one rank has all tokens and all classes. For DTensors, Layout in layout.py has
the same methods. The bodies of the entry operators (flce_ops/entry/) use only these methods, so that one body serves
plain tensors and DTensors. `import flce_ops` imports neither layout.py nor local.py, because these import
torch.distributed.tensor.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor

from ..math.options import Operands
from ..math.token_weights_and_denominator import quotient

# N tokens of this rank, K classes of a target, D hidden, V vocabulary, v of them on this rank


class OneRank:
    splits_vocabulary = False  # whether each rank has only some of the classes
    is_mesh = False
    shape: torch.Size  # (...), over all tokens
    num_classes: int  # V, over all ranks

    def measure(self, rows: Tensor, num_classes: int) -> None:
        """Must be called before the methods below. `rows` is (..., D) or (..., V)."""
        self.shape, self.num_classes = rows.shape[:-1], num_classes

    def head(self, call: Any) -> Operands:
        """The flattened operands of an entry operator's call."""
        self.shape, self.num_classes = call.input.shape[:-1], call.linear_weight.shape[0]
        if self.is_mesh:
            call.target, call.sparse = self.beside_tokens(call.target), self.sparse(call.sparse)
        weight = vars(call).get("weight")
        if not self.is_mesh and len(self.shape) == 1:
            return Operands(call.input, call.linear_weight, call.target, call.linear_bias, weight)
        return Operands(
            self.rows(call.input),
            self.per_class(call.linear_weight),
            self.per_token(call.target),
            None if call.linear_bias is None else self.per_class(call.linear_bias),
            None if weight is None else self.whole(weight),
        )

    def rows(self, tensor: Tensor | None) -> Tensor | None:  # (..., D) -> (N, D)
        # returned unchanged if possible: a view would add a node to the graph, and under vmap over an empty dimension a
        # view with size -1 fails
        if tensor is None or len(self.shape) == 1:
            return tensor
        return tensor.reshape(math.prod(self.shape), tensor.shape[-1])

    def per_token(self, tensor: Tensor | None) -> Tensor | None:  # (...) or (..., K) -> (N,) or (N, K)
        if tensor is None or len(self.shape) == 1:
            return tensor
        return tensor.reshape(math.prod(self.shape), *tensor.shape[len(self.shape) :])

    def as_it_is(self, given: Any) -> Any:
        return given

    columns = as_it_is  # (..., V) -> this rank's (..., v)
    per_class = as_it_is  # (V, D) or (V,) -> (v, D) or (v,)
    whole = as_it_is  # a tensor that is the same on every rank
    number = as_it_is  # (); its gradient is a sum over the ranks that share the tokens
    beside_tokens = as_it_is  # (...), its rows for the tokens of this rank
    sparse = as_it_is  # the options, with a seed of the rank's own
    sum_over_tokens = as_it_is  # (), a sum over this rank's tokens becomes the sum over all tokens

    def sharing(self) -> dict[str, Any]:
        """Arguments of linear_kl_div's operators: the mesh dimension that shards the vocabulary, if there is one."""
        return {}

    def quotient(self, loss: Tensor | None, total: Tensor, denominator: Tensor | None) -> Tensor:
        """loss, or `total` divided by `denominator`, which is a sum over all tokens, too."""
        return quotient(loss, total, denominator)

    def result(self, found: Tensor) -> Tensor:  # (N,) or (N, K) -> (...) or (..., K)
        return found if len(self.shape) == 1 else found.reshape((*self.shape, *found.shape[1:]))


def any_dtensor(*tensors: Tensor | None) -> bool:
    """Does not import torch.distributed.tensor for users without DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for tensor in tensors:
            if isinstance(tensor, module.DTensor):
                return True
    return False
