"""The namespace of the operators, torch.ops.flce."""

import torch

library = torch.library.Library("flce", "DEF")
