"""The operator on DTensors: tokens sharded, the vocabulary sharded, or both. Not imported by `import flce_ops`.

layout.py           what each mesh dimension shards, and refusals by name
dtensor_entry.py    the entry's DTensor branch: local tensors out, local operators, a DTensor back
log_probs.py        likewise for linear_log_probs
vocab_parallel.py   statistics of whole rows, and losses per token, from those of the shards
one_pass*.py        scalar losses of a sharded vocabulary with their gradients, in one pass
styles.py           VocabParallel, the ParallelStyle for the two modules
"""

from flce_ops.distributed.dtensor_entry import dtensor_composite, dtensor_composite_metrics
from flce_ops.distributed.log_probs import dtensor_log_probs
from flce_ops.distributed.styles import VocabParallel

__all__ = ["VocabParallel", "dtensor_composite", "dtensor_composite_metrics", "dtensor_log_probs"]
