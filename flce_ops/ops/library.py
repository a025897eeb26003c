"""The torch.library.Library in which the operators are registered."""

import torch

from .._ops import add_op_namespace_prefix

library = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "DEF")
