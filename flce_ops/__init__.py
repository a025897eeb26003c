"""Fused linear + cross-entropy loss as a registered PyTorch operator: `torch.ops.flce.linear_cross_entropy`."""

import warnings
from typing import TYPE_CHECKING

with warnings.catch_warnings():
    # torch's own warning if NumPy is not installed; nothing here uses NumPy
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    from . import support  # noqa: F401  imports torch, and refuses one that is too old

from ._ops import ops as operators  # `ops` is a folder here
from .functional import (
    LinearCrossEntropyMetrics,
    LinearLogProbs,
    LinearPolicyResult,
    cross_entropy,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    linear_policy_loss,
    linear_token_loss,
)
from .modules import LinearCrossEntropyHead, LinearCrossEntropyLoss
from .objectives.token_function import token_loss
from .support.path import Path, last_path
from .support.workspace import get_workspace, gradients_in_backward, set_workspace, workspace
from .version import __version__

if TYPE_CHECKING:
    from .parallel import VocabParallel

SAC_SAVE_OPS = [operators.linear_cross_entropy_forward.default, operators.linear_kl_div_forward.default]
"""Operators whose results a selective activation checkpoint policy should save: backward need not rerun them then."""

__all__ = [
    "SAC_SAVE_OPS",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyMetrics",
    "LinearLogProbs",
    "LinearPolicyResult",
    "Path",
    "VocabParallel",
    "__version__",
    "cross_entropy",
    "get_workspace",
    "gradients_in_backward",
    "last_path",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "linear_policy_loss",
    "linear_token_loss",
    "set_workspace",
    "token_loss",
    "workspace",
]


REMOVED = {
    "explain": "; call last_path() after a call",
    "export_decompositions": "; import flce_ops before an exported program is loaded",
    "warmup": "; the first step compiles its kernels in parallel (docs/deployment.md)",
}

if not TYPE_CHECKING:  # type checkers would otherwise accept any name as an attribute of the package

    def __getattr__(name):
        """Imports VocabParallel on first use, because torch.distributed.tensor is slow to import."""
        if name == "VocabParallel":
            from .parallel import VocabParallel

            return VocabParallel
        instead = REMOVED.get(name, "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return __all__
