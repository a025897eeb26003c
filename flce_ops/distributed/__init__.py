"""DTensors: what their placements shard, the local tensors of a rank, how gradients return to the DTensors, and losses
of a vocabulary shard.

one_rank.py         the layout of plain tensors, and the protocol that entry operators use for every layout
layout.py           what each mesh dimension shards; what does not fit is refused; sums a mean's denominator
local.py            from a DTensor to this rank's tensor, and back for the gradient
vocab_parallel.py   statistics of whole rows from those of the shards; scalar losses with their gradients, in one pass

`import flce_ops` imports neither the second file nor the third, because these import torch.distributed.tensor.
"""
