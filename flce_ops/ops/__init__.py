"""The inner operators: schemas, kernels for each dispatch key, autograd, autocast, FLOP formulas.

registration.py                  defines the operators, with one kernel for each dispatch key
paths.py, call_facts.py          tables that say which kernel runs and why; the facts of a call that they read; for how
                                 many tokens logits are saved
function.py                      the base class of every operator's derivative
    autograd.py                  derivatives of the forward and the backward operators
    made_in_forward.py           the derivative of a scalar loss whose gradients forward makes
    with_grad_autograd.py        such losses of a head, and their gradients under create_graph
    kl_div_autograd.py, cross_entropy_autograd.py
    second_order.py              the derivative of a backward operator: the dense formula in ATen
autocast.py, flops.py            kernels on autocast's keys; formulas for torch.utils.flop_counter
"""

from . import flops as flops  # registers the operators, then their formulas
