"""DTensors: what their placements shard, the local tensors of a rank, how gradients return to the DTensors, and losses
of a vocabulary shard.

one_rank.py         the layout of plain tensors, and the protocol that entry operators use for every layout
layout.py           what each mesh dimension shards; refuses layouts that do not fit
local.py            from a DTensor to this rank's tensor, and back for the gradient
vocab_parallel.py   statistics of whole rows, and losses per token, from those of the shards
class_slices.py     row numbers of a quantized head, which dequantizes one slice of classes at a time
one_pass.py         scalar losses of a sharded vocabulary with their gradients, in one pass

`import flce_ops` imports only the first file, because the others import torch.distributed.tensor.
"""
