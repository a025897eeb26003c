"""Other libraries' models and trainers; nothing here is loaded by `import flce_ops`.

transformers/        models whose loss needs no logits
trl/                 trainers' heads and divergences
verl.py              the fused head of its workers
torchtitan.py        a loss for its Trainer
megatron.py          the head's gradient in `weight.main_grad`
full_logits.py       says which trainer makes logits of a training step all the same
places.py            private names of those libraries, read before anything is put there
sparse_options.py    a sparse gradient for callers that count no steps
"""
