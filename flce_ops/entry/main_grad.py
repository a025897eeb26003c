"""main_grad, a buffer that backward adds the gradient of linear_weight to: where it is refused.

    forward     leaves it alone; the logits wait for backward as far as `retained` goes
    backward    main_grad += grad_linear_weight, in the GEMM; autograd gets no gradient of linear_weight

What the buffer itself must be is checked where all operands are known: flce_ops/meta/main_grad.py.
"""

import torch

from flce_ops.entry.schemas import CrossEntropy
from flce_ops.support.dtensor import any_dtensor
from flce_ops.support.torch_private import functorch_is_active


def check_main_grad(op: str, call: CrossEntropy) -> None:
    if call.main_grad is None:
        return
    if call.main_grad.requires_grad:
        raise ValueError(f"{op}: expected main_grad without requires_grad, as it is added to; pass main_grad.detach()")
    if torch.is_grad_enabled() and not call.linear_weight.requires_grad:
        raise ValueError(
            f"{op}: main_grad takes the gradient of linear_weight, which requires none; leave main_grad out for a "
            "frozen head"
        )
    if functorch_is_active():
        raise NotImplementedError(f"{op}: main_grad is not implemented under torch.func, whose functions are pure")
    if any_dtensor(*call.values()):
        raise NotImplementedError(
            f"{op}: main_grad beside DTensors is not implemented; pass this rank's tensors, or leave main_grad out"
        )
    if call.linear_weight.dim() > 2 or call.target.is_floating_point():
        kind = "a K-dimensional loss" if call.linear_weight.dim() > 2 else "a target of class probabilities"
        raise NotImplementedError(f"{op}: main_grad is not implemented for {kind}; add the gradient to it yourself")
