"""What the operators are registered in."""

import torch

from .._ops import add_op_namespace_prefix

library = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "DEF")
