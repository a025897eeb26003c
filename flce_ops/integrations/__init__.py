"""Support for other libraries' models and trainers. `import flce_ops` loads none of it.

transformers/        models that compute their loss without logits
trl/                 the trainers' heads and divergences
verl.py              the fused head of its workers
torchtitan.py        a loss for its Trainer
megatron.py          adds the head's gradient to `weight.main_grad`
full_logits.py       warns of trainers that compute the logits of a training step all the same
places.py            checks private names of these libraries before replacing them
sparse_options.py    a sparse gradient for callers that do not count steps
"""
