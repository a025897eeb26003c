"""The operators of linear_kl_div.

kl_div.py                the operators
kl_div_step.py           their chunks
kl_div_chunking.py       how they take the tokens, in chunks and blocks
softmax_rows.py          stored logits of a model, and the shift that makes them log-probabilities
divergence_rows.py       sums of rows, divergences and G from those of both models
fixed_point.py           16 bits for logits of float16 operands
"""
