"""The namespace of the operators, torch.ops.flce. Only this file names it.

A second copy of the package in one process needs a namespace of its own. `python -m release.kernel_hub` writes such a
copy for Hugging Face's `kernels`, with this file replaced; so does Hugging Face's kernel-builder, by a file of the same
two names.
"""

import torch

NAMESPACE = "flce"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    return f"{NAMESPACE}::{name}"
