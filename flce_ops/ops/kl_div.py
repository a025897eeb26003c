"""Schemas and kernels of the registered operators, in the namespace of flce_ops/ops/registration.py.

    flce::linear_kl_div             entry, CompositeImplicitAutograd: flce_ops/entry/kl_div.py
    flce::linear_kl_div_forward     (divergence, shift, teacher_shift, student_kl) per token
    flce::linear_kl_div_backward    gradients from the cotangent of the divergence
    flce::linear_kl_div_with_grad   the scalar loss and its gradients, in one pass over the logits

Dispatch keys as in flce_ops/ops/registration.py; every device runs flce_ops/aten/kl_div.py. With `group` the columns
are this rank's part of a vocabulary of vocab_size classes over `ranks` ranks: forward and with_grad exchange row sums.
"""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import register_flop_formula

from flce_ops.aten import kl_div as aten
from flce_ops.math.kl_div_arguments import Operands
from flce_ops.meta import kl_div as meta
from flce_ops.ops import kl_div_autograd as autograd
from flce_ops.ops.autocast import autocast_operands
from flce_ops.ops.flops import gemm_pass
from flce_ops.ops.library import library
from flce_ops.support.compile_cache import keyed
from flce_ops.support.torch_private import without_autocast

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

_OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor? teacher_input, Tensor? teacher_weight, "
    "Tensor? teacher_bias, Tensor? teacher_probs, Tensor? valid"
)
_OPTIONS = (
    "str kind='forward', Tensor? beta=None, Tensor? logit_scale=None, Tensor? softcap=None, "
    "Tensor? teacher_logit_scale=None, Tensor? teacher_softcap=None, str? group=None, int ranks=1, "
    "SymInt? vocab_size=None"
)
_GRADIENTS = "Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias"

SCHEMAS = {
    "linear_kl_div": "(Tensor input, Tensor linear_weight, Tensor? teacher_input=None, Tensor? teacher_weight=None, *, "
    "Tensor? teacher_probs=None, Tensor? linear_bias=None, Tensor? teacher_bias=None, str kind='forward', "
    "Scalar beta=0.5, Tensor? target=None, int ignore_index=-100, Tensor? token_weight=None, str reduction='mean', "
    "Tensor? normalizer=None, Scalar logit_scale=1.0, Scalar? softcap=None, Scalar temperature=1.0, "
    "Scalar? teacher_logit_scale=None, Scalar? teacher_softcap=None) -> Tensor",
    "linear_kl_div_forward": f"({_OPERANDS}, *, {_OPTIONS}) "
    "-> (Tensor divergence, Tensor shift, Tensor teacher_shift, Tensor student_kl)",
    "linear_kl_div_backward": f"(Tensor grad, {_OPERANDS}, Tensor shift, Tensor teacher_shift, Tensor student_kl, *, "
    f"{_OPTIONS}, bool[3] output_mask) -> ({_GRADIENTS})",
    "linear_kl_div_with_grad": f"({_OPERANDS}, Tensor row_scale, *, {_OPTIONS}, bool[3] output_mask) "
    f"-> (Tensor loss, Tensor divergence, {_GRADIENTS})",
}
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)

linear_kl_div_forward = torch.ops.flce.linear_kl_div_forward.default
linear_kl_div_backward = torch.ops.flce.linear_kl_div_backward.default
linear_kl_div_with_grad = torch.ops.flce.linear_kl_div_with_grad.default

_KERNELS = {
    "linear_kl_div_forward": (aten.forward, meta.forward_outputs),
    "linear_kl_div_backward": (aten.backward, meta.backward_outputs),
    "linear_kl_div_with_grad": (aten.with_grad, meta.with_grad_outputs),
}


def autocast_pairs(operands: Operands) -> Operands:
    """Under autocast, both pairs as it hands them to F.linear. Given probabilities stay as they are."""
    pairs = autocast_operands(operands.input.device.type, *operands[:6])
    return Operands(*pairs, *operands[6:])


def _autocast_kernel(op: torch._ops.OpOverload, device_type: str) -> Callable:
    """Casts both pairs. Backward gets what forward saw: it only has to keep autocast out of its own GEMMs."""
    casts = op is not linear_kl_div_backward

    def run(*args, **kwargs):
        if casts:
            count = len(Operands._fields)
            args = (*autocast_pairs(Operands(*args[:count])), *args[count:])
        with without_autocast(device_type):
            return op(*args, **kwargs)

    return run


for _name, (_aten, _fake) in _KERNELS.items():
    _op = getattr(torch.ops.flce, _name).default
    library.impl(_name, _aten, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flce::{_name}", keyed(_fake), lib=library)
    _formula = autograd.kernel(_op, autograd.FORMULAS[_name])
    library.impl(_name, _formula, "Autograd")
    library.impl(_name, _formula, "FuncTorchDynamicLayerFrontMode")
    for _device_type in ("cpu", "cuda"):
        library.impl(_name, _autocast_kernel(_op, _device_type), f"Autocast{_device_type.upper()}")


def both_logits(input, linear_weight, linear_bias, teacher_input, teacher_weight, *args) -> int:
    """GEMM passes of the student's and, unless probabilities are given, the teacher's logits; shapes for tensors."""
    teacher = 0 if teacher_input is None else gemm_pass(teacher_input, teacher_weight)
    return gemm_pass(input, linear_weight) + teacher


def gradient_passes(input, linear_weight, output_mask) -> int:
    return gemm_pass(input, linear_weight) * (output_mask[0] + output_mask[1])


@register_flop_formula(linear_kl_div_forward.overloadpacket)
def forward_flops(*shapes, out_shape=None, **options) -> int:
    return both_logits(*shapes)


@register_flop_formula(linear_kl_div_with_grad.overloadpacket)
def with_grad_flops(*shapes, output_mask, out_shape=None, **options) -> int:
    return both_logits(*shapes) + gradient_passes(*shapes[:2], output_mask)


@register_flop_formula(linear_kl_div_backward.overloadpacket)
def backward_flops(grad, *shapes, output_mask, out_shape=None, **options) -> int:
    return both_logits(*shapes) + gradient_passes(*shapes[:2], output_mask)
