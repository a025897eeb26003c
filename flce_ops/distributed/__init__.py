"""What DTensors need: which placements shard what, local tensors and their gradients' way back, losses of a shard.

layout.py           what each mesh dimension shards, and refusals by name
local.py            from a DTensor to this rank's tensor, and the gradient's way back
vocab_parallel.py   statistics of whole rows, and losses per token, from those of the shards
one_pass.py         scalar losses of a sharded vocabulary with their gradients, in one pass
logit_shards.py     losses of given logits whose classes are sharded
sparse_seed.py      what a sparse gradient's draws are told apart by

Not imported by `import flce_ops`: it builds on torch.distributed.tensor.
"""
