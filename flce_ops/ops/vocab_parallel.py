"""The operator of a sharded vocabulary's scalar loss and gradients; registered where DTensors are used."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flce_ops import meta
from flce_ops.aten.vocab_parallel_with_grad import vocab_parallel_with_grad
from flce_ops.ops.flops import with_grad_flops
from flce_ops.support.compile_cache import keyed
from flce_ops.support.vendor import made_by_nvidia

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary

NAME = "linear_cross_entropy_vocab_parallel_with_grad"

library = torch.library.Library("flce", "FRAGMENT")
library.define(
    f"{NAME}(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor row_scale, "
    "*, str group, int ranks, SymInt vocab_start, SymInt vocab_size, int ignore_index=-100, float label_smoothing=0.0, "
    "Tensor? z_loss=None, Tensor? softcap=None, Tensor? logit_scale=None, bool[3] output_mask, bool argmax=False) "
    "-> (Tensor loss, Tensor losses, Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias, "
    "Tensor argmax)",
    tags=torch.Tag.pt2_compliant_tag,
)


def cuda_kernel(input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    smoothed = options.get("label_smoothing")
    if not made_by_nvidia() or input.dtype != torch.bfloat16 or input.numel() == 0 or smoothed:
        return vocab_parallel_with_grad(input, *args, **options)
    from flce_ops.triton.vocab_parallel_with_grad import launch_vocab_parallel_with_grad

    return launch_vocab_parallel_with_grad(input, *args, **options)


library.impl(NAME, vocab_parallel_with_grad, "CompositeExplicitAutograd")
library.impl(NAME, cuda_kernel, "CUDA")
torch.library.register_fake(f"flce::{NAME}", keyed(meta.vocab_parallel_with_grad_outputs), lib=library)
register_flop_formula(getattr(torch.ops.flce, NAME), get_raw=True)(with_grad_flops)  # takes shapes already
