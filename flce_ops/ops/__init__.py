"""The inner operators: schemas, kernels by dispatch key, autograd, autocast, FLOP formulas.

registration.py, library.py      defines the operators, each with one kernel a dispatch key; their namespace
paths.py, call_facts.py          tables that say which kernel runs and why; the facts of a call that they look at
function.py                      what every operator's derivative is made of
    autograd.py                  derivatives of the forward and the backward operators
    made_in_forward.py           of a scalar loss whose gradients forward makes
    with_grad_autograd.py        of those of a head, and their gradients made a second time
    kl_div_autograd.py, cross_entropy_autograd.py, support_autograd.py
support_rows.py                  the forward operator of a support, called as that of a head is
saved_logits.py                  how many tokens' logits wait for backward
grad_output.py                   gradients that forward made, times the factor that backward brings
autocast.py, flops.py            kernels on autocast's keys; formulas for torch.utils.flop_counter
"""

from . import flops as flops  # registers the operators, and their formulas
