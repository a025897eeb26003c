"""The inner operators: schemas, kernels for each dispatch key, autograd, autocast, FLOP formulas.

registration.py, library.py      defines the operators, with one kernel for each dispatch key; their namespace
paths.py, call_facts.py          tables that say which kernel runs and why; the facts of a call that they read
function.py                      the base class of every operator's derivative
    autograd.py                  derivatives of the forward and the backward operators
    made_in_forward.py           the derivative of a scalar loss whose gradients forward makes
    with_grad_autograd.py        such losses of a head, and their gradients under create_graph
    kl_div_autograd.py, cross_entropy_autograd.py, support_autograd.py
support_rows.py                  the forward operator of a support, with the interface of a head's
saved_logits.py                  for how many tokens logits are saved for backward
grad_output.py                   multiplies gradients made in forward by the factor that backward receives
autocast.py, flops.py            kernels on autocast's keys; formulas for torch.utils.flop_counter
"""

from . import flops as flops  # registers the operators, then their formulas
