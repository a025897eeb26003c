"""The operator on DTensors: tokens sharded, the vocabulary sharded, or both. Not imported by `import flce_ops`.

layout.py           what each mesh dimension shards, and refusals by name
dtensor_entry.py    the entry's DTensor branch: local tensors out, local operators, a DTensor back
vocab_parallel.py   losses per token from per-shard (lse, target_logit, logit_sum)
styles.py           VocabParallel, the ParallelStyle for the two modules
"""

from flce_ops.distributed.dtensor_entry import dtensor_composite
from flce_ops.distributed.styles import VocabParallel

__all__ = ["VocabParallel", "dtensor_composite"]
