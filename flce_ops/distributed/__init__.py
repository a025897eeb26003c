"""What DTensors need: which placements shard what, local tensors and their gradients' way back, losses of a shard.

one_rank.py         the layout of plain tensors, and what the entries ask of any layout
layout.py           what each mesh dimension shards, and refusals by name
local.py            from a DTensor to this rank's tensor, and the gradient's way back
vocab_parallel.py   statistics of whole rows, and losses per token, from those of the shards
class_slices.py     the rows of a quantized head, whose slices of classes are made one after the other
one_pass.py         scalar losses of a sharded vocabulary with their gradients, in one pass

`import flce_ops` imports the first alone: the others build on torch.distributed.tensor.
"""
