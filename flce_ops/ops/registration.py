"""Schemas and kernels of the registered operators.

    flce::linear_cross_entropy                   entry, CompositeImplicitAutograd: flce_ops/entry/cross_entropy.py
    flce::linear_cross_entropy_metrics           likewise: the loss, token accuracy and argmax
    flce::linear_log_probs                       likewise: flce_ops/entry/log_probs.py
    flce::linear_cross_entropy_forward           (target_logit, lse, ...) per token
    flce::linear_cross_entropy_backward          gradients from the cotangents of those
    flce::linear_cross_entropy_with_grad         the scalar loss and its gradients, in one pass over the logits
    flce::linear_cross_entropy_double_backward   derivatives of the backward operator
    flce::linear_cross_entropy_upstream          ties a traced backward to a leaf: flce_ops/ops/autograd.py

The inner four share one layout of dispatch keys:

    AutocastCPU, AutocastCUDA          cast the operands     (forward, with_grad, the entry)
    FuncTorchDynamicLayerFrontMode     torch.func            flce_ops/ops/autograd.py
    Autograd                           formulas              flce_ops/ops/autograd.py
    CUDA                               half dtypes: flce_ops/triton, imported inside the kernel; others, and AMD: ATen
    CompositeExplicitAutograd          every other device: flce_ops/aten/aten.py
    fake / Meta                        flce_ops/meta
"""

import torch
from torch import Tensor

from flce_ops import aten, meta
from flce_ops.ops import autograd
from flce_ops.ops.autocast import autocast_kernel
from flce_ops.ops.library import library
from flce_ops.support.compile_cache import keyed
from flce_ops.support.torch_private import below_autograd
from flce_ops.support.vendor import made_by_nvidia

# N tokens, D hidden, V vocabulary

_OPERANDS = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias{default}, Tensor? weight{default}"
# numbers as 0-d tensors: flce_ops/math/scalars.py
_LOGITS = "int ignore_index=-100, {extra}Tensor? softcap=None, Tensor? logit_scale=None"
_SHARD = ", SymInt vocab_start=0"
_COTANGENTS = "Tensor? grad_target_logit, Tensor? grad_lse, Tensor? grad_logit_sum, "
_ENTRY = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, *, Tensor? weight=None, "
    "str reduction='mean', int ignore_index=-100, Scalar label_smoothing=0.0, Scalar? softcap=None, "
    "Scalar logit_scale=1.0, Scalar temperature=1.0, Scalar z_loss=0.0, Tensor? token_weight=None, "
    "Tensor? normalizer=None"
)

SCHEMAS = {
    "linear_cross_entropy": f"({_ENTRY}) -> Tensor",
    "linear_cross_entropy_metrics": f"({_ENTRY}) -> (Tensor loss, Tensor token_accuracy, Tensor argmax)",
    "linear_log_probs": "(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, *, "
    "int ignore_index=-100, Scalar? softcap=None, Scalar logit_scale=1.0, Scalar temperature=1.0, "
    "bool entropy=False, bool argmax=False) "
    "-> (Tensor log_probs, Tensor lse, Tensor entropy, Tensor argmax)",
    "linear_cross_entropy_forward": f"({_OPERANDS.format(default='=None')}, *, "
    f"{_LOGITS.format(extra='bool logit_sum=False, ')}{_SHARD}, SymInt? vocab_size=None, "
    "bool expected_logit=False, bool argmax=False) -> (Tensor target_logit, Tensor lse, Tensor logit_sum, "
    "Tensor expected_logit, Tensor max_logit, Tensor argmax, Tensor lse_rest)",
    "linear_cross_entropy_backward": f"({_COTANGENTS}{_OPERANDS.format(default='')}, Tensor lse, *, "
    f"{_LOGITS.format(extra='')}{_SHARD}, bool[3] output_mask, Tensor? grad_expected_logit=None, "
    "Tensor? expected_logit=None, Tensor? lse_rest=None) -> (Tensor grad_input, Tensor grad_linear_weight, "
    "Tensor grad_linear_bias)",
    "linear_cross_entropy_with_grad": f"({_OPERANDS.format(default='')}, Tensor row_scale, *, "
    f"{_LOGITS.format(extra='float label_smoothing=0.0, Tensor? z_loss=None, ')}, bool[3] output_mask, "
    "bool argmax=False) -> (Tensor loss, Tensor losses, Tensor grad_input, Tensor grad_linear_weight, "
    "Tensor grad_linear_bias, Tensor argmax)",
    "linear_cross_entropy_double_backward": "(Tensor? grad_grad_input, Tensor? grad_grad_linear_weight, "
    f"Tensor? grad_grad_linear_bias, {_COTANGENTS}{_OPERANDS.format(default='')}, Tensor lse, *, "
    f"{_LOGITS.format(extra='')}{_SHARD}, Tensor? lse_rest=None) -> (Tensor grad_target_logit, Tensor grad_lse, "
    "Tensor grad_logit_sum, "
    "Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias)",
    "linear_cross_entropy_upstream": "(Tensor factor, Tensor leaf) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)

linear_cross_entropy = torch.ops.flce.linear_cross_entropy.default
linear_cross_entropy_forward = torch.ops.flce.linear_cross_entropy_forward.default
linear_cross_entropy_backward = torch.ops.flce.linear_cross_entropy_backward.default
linear_cross_entropy_with_grad = torch.ops.flce.linear_cross_entropy_with_grad.default
linear_cross_entropy_double_backward = torch.ops.flce.linear_cross_entropy_double_backward.default


def _triton_takes(input: Tensor) -> bool:
    return made_by_nvidia() and input.dtype in (torch.bfloat16, torch.float16) and input.numel() > 0


def _cuda_forward(input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    if not _triton_takes(input):
        return aten.forward(input, *args, **options)
    from flce_ops.triton import launch_forward

    return launch_forward(input, *args, **options)


def _cuda_backward(
    grad_target_logit: Tensor | None,
    grad_lse: Tensor | None,
    grad_logit_sum: Tensor | None,
    input: Tensor,
    *args,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    cotangents = (grad_target_logit, grad_lse, grad_logit_sum)
    if not _triton_takes(input):
        return aten.backward(*cotangents, input, *args, **options)
    from flce_ops.triton import launch_backward

    return launch_backward(*cotangents, input, *args, **options)


def _cuda_with_grad(input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    # float16, which the entry does not send here, has no room for exponentials that are normalised later, and label
    # smoothing under a softcap is not of rank 1: both take the ATen path's float32 logits.
    smoothed_and_capped = options.get("label_smoothing") and options.get("softcap") is not None
    if not _triton_takes(input) or input.dtype == torch.float16 or smoothed_and_capped:
        return aten.with_grad(input, *args, **options)
    from flce_ops.triton import launch_with_grad

    return launch_with_grad(input, *args, **options)


_KERNELS = {
    "linear_cross_entropy_forward": (aten.forward, _cuda_forward, meta.forward_outputs),
    "linear_cross_entropy_backward": (aten.backward, _cuda_backward, meta.backward_outputs),
    "linear_cross_entropy_with_grad": (aten.with_grad, _cuda_with_grad, meta.with_grad_outputs),
    "linear_cross_entropy_double_backward": (
        aten.double_backward,
        aten.double_backward,
        meta.double_backward_outputs,
    ),
}

for _name, (_aten, _cuda, _fake) in _KERNELS.items():
    library.impl(_name, _aten, "CompositeExplicitAutograd")
    library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"flce::{_name}", keyed(_fake), lib=library)
    _formula = autograd.kernel(getattr(torch.ops.flce, _name).default, autograd.FORMULAS[_name])
    library.impl(_name, _formula, "Autograd")
    library.impl(_name, _formula, "FuncTorchDynamicLayerFrontMode")


def _upstream(factor: Tensor, leaf: Tensor) -> Tensor:
    return factor.clone()


def _upstream_below_autograd(factor: Tensor, leaf: Tensor) -> Tensor:
    with below_autograd():
        return torch.ops.flce.linear_cross_entropy_upstream(factor, leaf)


library.impl("linear_cross_entropy_upstream", _upstream, "CompositeExplicitAutograd")
library.impl("linear_cross_entropy_upstream", _upstream_below_autograd, "Autograd")
torch.library.register_fake("flce::linear_cross_entropy_upstream", _upstream, lib=library)

# The entries too: where a program is decomposed their bodies run behind autocast's keys and would not see autocast.
_ENTRIES = ("linear_cross_entropy", "linear_cross_entropy_metrics", "linear_log_probs")
for _name in (*_ENTRIES, "linear_cross_entropy_forward", "linear_cross_entropy_with_grad"):
    for _device_type in ("cpu", "cuda"):
        library.impl(
            _name,
            autocast_kernel(getattr(torch.ops.flce, _name).default, _device_type),
            f"Autocast{_device_type.upper()}",
        )
