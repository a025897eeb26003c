"""The inner operators: their schemas, and one kernel per dispatch key.

    flce::linear_cross_entropy_forward           (target_logit, lse, ...) per token
    flce::linear_cross_entropy_backward          gradients from the cotangents of those
    flce::linear_cross_entropy_backward_         which adds that of linear_weight to a buffer
    flce::linear_cross_entropy_with_grad         the scalar loss and its gradients, in one pass over the logits
    flce::linear_cross_entropy_vocab_parallel_with_grad   likewise, where ranks share the vocabulary
    flce::linear_cross_entropy_low_rank_with_grad         likewise, of a frozen head with a low-rank pair beside it
    flce::linear_cross_entropy_double_backward   derivatives of the backward operator
    flce::linear_kl_div_{forward, backward, with_grad}    likewise, of divergences
    flce::linear_policy_loss_with_grad           as linear_cross_entropy_with_grad, of a policy's losses
    flce::cross_entropy_{forward, backward, with_grad}    likewise, of logits that are given
    flce::cross_entropy_with_grad_               which writes the gradient over them
    flce::linear_cross_entropy_upstream{,_}      a traced backward's multiplication of gradients: upstream.py

All share one layout of dispatch keys:

    AutocastCPU, AutocastCUDA          cast the operands: autocast.py
    FuncTorchDynamicLayerFrontMode     torch.func: formula.py
    Autograd                           formula.py; formulas: autograd.py, ..._autograd.py, made_in_forward.py
    CompositeExplicitAutograd          every device: the table of paths, paths.py
    fake / Meta                        flce_ops/meta

The entry operators are registered by flce_ops/entry.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from flce_ops import meta
from flce_ops.math.options import Statistics
from flce_ops.meta import arguments, cross_entropy, kl_div, low_rank, policy
from flce_ops.meta.call import Arguments
from flce_ops.ops import (
    autograd,
    cross_entropy_autograd,
    kl_div_autograd,
    low_rank_autograd,
    paths,
    policy_autograd,
    with_grad_autograd,
)
from flce_ops.ops.autocast import autocast_kernel
from flce_ops.ops.formula import Formula, autograd_kernel
from flce_ops.ops.library import library
from flce_ops.ops.retained import retained_notes
from flce_ops.ops.upstream import UPSTREAM, multiply, multiply_in_place
from flce_ops.support.compile_cache import keyed

GRADIENTS = "Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias"
STATISTICS = ", ".join(f"Tensor {name}" for name in Statistics._fields)


class Operator(NamedTuple):
    arguments: type[Arguments]
    results: str
    outputs: Callable  # checks and allocates: the fake kernel
    formula: type[Formula] | None = None
    autograd_kernel: Callable = autograd_kernel


OPERATORS = {
    "linear_cross_entropy_forward": Operator(
        arguments.Forward,
        "Tensor target_logit, Tensor lse, Tensor logit_sum, Tensor expected_log_prob, Tensor max_logit, Tensor argmax, "
        "Tensor log_sum_sq_probs, Tensor mean_logit, Tensor lse_rest, Tensor retained",
        meta.forward_outputs,
        autograd.ForwardFormula,
    ),
    "linear_cross_entropy_backward": Operator(
        arguments.Backward, GRADIENTS, meta.backward_outputs, autograd.BackwardFormula
    ),
    "linear_cross_entropy_backward_": Operator(
        arguments.BackwardInPlace, GRADIENTS, meta.backward_in_place_outputs, autograd.BackwardInPlaceFormula
    ),
    "linear_cross_entropy_with_grad": Operator(
        arguments.WithGrad,
        f"Tensor loss, Tensor losses, {GRADIENTS}, {STATISTICS}",
        meta.with_grad_outputs,
        with_grad_autograd.WithGradFormula,
    ),
    "linear_cross_entropy_vocab_parallel_with_grad": Operator(
        arguments.VocabParallelWithGrad,
        f"Tensor loss, Tensor losses, {GRADIENTS}, {STATISTICS}",
        meta.vocab_parallel_with_grad_outputs,  # its formula knows the mesh: flce_ops/distributed/one_pass.py
    ),
    "linear_cross_entropy_low_rank_with_grad": Operator(
        arguments.LowRankWithGrad,
        "Tensor loss, Tensor losses, Tensor grad_input, Tensor grad_low_rank_input, Tensor grad_low_rank_weight, "
        "Tensor grad_linear_bias, Tensor grad_class_scale",
        low_rank.with_grad_outputs,
        low_rank_autograd.LowRankWithGradFormula,
    ),
    "linear_cross_entropy_double_backward": Operator(
        arguments.DoubleBackward,
        f"Tensor grad_target_logit, Tensor grad_lse, Tensor grad_logit_sum, {GRADIENTS}",
        meta.double_backward_outputs,
        autograd.DoubleBackwardFormula,
    ),
    "linear_kl_div_forward": Operator(
        arguments.KlDivForward,
        "Tensor divergence, Tensor shift, Tensor teacher_shift, Tensor student_kl",
        kl_div.forward_outputs,
        kl_div_autograd.ForwardFormula,
    ),
    "linear_kl_div_backward": Operator(
        arguments.KlDivBackward, GRADIENTS, kl_div.backward_outputs, kl_div_autograd.BackwardFormula
    ),
    "linear_kl_div_with_grad": Operator(
        arguments.KlDivWithGrad,
        f"Tensor loss, Tensor divergence, {GRADIENTS}",
        kl_div.with_grad_outputs,
        kl_div_autograd.WithGradFormula,
    ),
    "linear_policy_loss_with_grad": Operator(
        arguments.PolicyWithGrad,
        f"Tensor loss, Tensor losses, {GRADIENTS}, Tensor log_probs",
        policy.policy_with_grad_outputs,
        policy_autograd.PolicyWithGradFormula,
    ),
    "cross_entropy_forward": Operator(
        arguments.LogitsForward,
        "Tensor target_logit, Tensor lse, Tensor logit_sum, Tensor argmax, Tensor lse_rest",
        cross_entropy.forward_outputs,
        cross_entropy_autograd.ForwardFormula,
    ),
    "cross_entropy_backward": Operator(
        arguments.LogitsBackward,
        "Tensor grad_logits",
        cross_entropy.backward_outputs,
        cross_entropy_autograd.BackwardFormula,
    ),
    "cross_entropy_with_grad": Operator(
        arguments.LogitsWithGrad,
        "Tensor loss, Tensor losses, Tensor grad_logits, Tensor argmax",
        cross_entropy.with_grad_outputs,
        cross_entropy_autograd.WithGradFormula,
    ),
    "cross_entropy_with_grad_": Operator(
        arguments.LogitsWithGradInPlace,
        "Tensor loss, Tensor losses, Tensor argmax",
        cross_entropy.with_grad_in_place_outputs,
        cross_entropy_autograd.WithGradInPlaceFormula,
        autograd_kernel=cross_entropy_autograd.in_place_kernel,
    ),
}

for _name, _operator in OPERATORS.items():
    library.define(f"{_name}{_operator.arguments.schema()} -> ({_operator.results})", tags=torch.Tag.pt2_compliant_tag)
library.define(f"{UPSTREAM}(Tensor[] made, Tensor factor, Tensor leaf) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
library.define(f"{UPSTREAM}_(Tensor(a!)[] made, Tensor factor) -> ()", tags=torch.Tag.pt2_compliant_tag)


def kernel(name: str) -> Callable:
    """The path that the table says."""
    bind = OPERATORS[name].arguments.bind

    def run(*args, **kwargs):
        call = bind(*args, **kwargs)
        call.choice = choice = paths.choice_of(name, call)
        call.notes += retained_notes(choice, call)
        return paths.function(choice.path.kernel)(call)

    return run


for _name, _operator in OPERATORS.items():
    _op = getattr(torch.ops.flce, _name).default
    library.impl(_name, kernel(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flce::{_name}", keyed(_operator.outputs), lib=library)
    if _operator.formula is not None:
        _formula = _operator.autograd_kernel(_op, _operator.formula)
        library.impl(_name, _formula, "Autograd")
        library.impl(_name, _formula, "FuncTorchDynamicLayerFrontMode")
    for _device_type in ("cpu", "cuda"):
        library.impl(_name, autocast_kernel(_op, _device_type), f"Autocast{_device_type.upper()}")


library.impl(UPSTREAM, multiply, "CompositeExplicitAutograd")
library.impl(f"{UPSTREAM}_", multiply_in_place, "CompositeExplicitAutograd")
torch.library.register_fake(f"flce::{UPSTREAM}", multiply, lib=library)
torch.library.register_fake(f"flce::{UPSTREAM}_", lambda made, factor: None, lib=library)
for _name in (UPSTREAM, f"{UPSTREAM}_"):
    # called where gradients are off: backward, and the graph that was traced of one
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
