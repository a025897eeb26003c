"""DTensors: which placements shard what, local tensors and the way back of their gradients, losses of a shard.

one_rank.py         the layout of plain tensors, and the protocol that entry operators use for every layout
layout.py           what each mesh dimension shards; refuses layouts that do not fit
local.py            from a DTensor to this rank's tensor, and back for the gradient
vocab_parallel.py   statistics of whole rows, and losses per token, from those of the shards
one_pass.py         scalar losses of a sharded vocabulary with their gradients, in one pass

`import flce_ops` imports only the first file, because the others import torch.distributed.tensor.
"""
