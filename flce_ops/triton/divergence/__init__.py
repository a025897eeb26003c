"""The operators of linear_kl_div.

kl_div.py                the operators
kl_div_step.py           one chunk of tokens
kl_div_chunking.py       how tokens are divided into chunks and blocks
softmax_rows.py          the stored logits of a model, and the shift that turns them into log-probabilities
divergence_rows.py       row sums, divergences and G, from the stored logits of both models
fixed_point.py           a 16-bit fixed-point format for logits of float16 operands
"""
