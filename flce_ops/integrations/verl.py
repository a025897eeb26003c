"""verl: computes the fused head of its FSDP workers with this package's operator.

    actor_rollout_ref:
      model:
        use_fused_kernels: True
        fused_kernel_options: {impl_backend: torch}
        external_lib: flce_ops.integrations.verl

verl's workers are separate processes, and import `external_lib` before they build the model. So importing this
module patches verl. Under use_fused_kernels, the forward of every model calls FusedLinearForPPO with hidden states, the
head's weight and the sampled tokens; the patch replaces that by linear_log_probs.
"""

from typing import Any

import torch
from torch import Tensor

from ..functional import linear_log_probs
from .places import Place, Replacements

# B batch, T tokens, D hidden, V vocabulary


def fused_linear_for_ppo(
    self: Any,
    hidden_states: Tensor,  # (B, T, D) or (T, D)
    vocab_weights: Tensor,  # (V, D)
    input_ids: Tensor,  # (B, T) or (T,)
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:  # log-probabilities and entropies, with input_ids' shape
    """Forward of verl's FusedLinearForPPO. Both results are differentiable and float32."""
    if not torch.is_autocast_enabled(hidden_states.device.type):
        vocab_weights = vocab_weights.to(hidden_states.dtype)
    found = linear_log_probs(hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True)
    return found.log_probs, found.entropy


HEAD = Place(
    "verl.utils.experimental.torch_functional",
    "FusedLinearForPPO.forward",
    ("self", "hidden_states", "vocab_weights", "input_ids", "temperature"),
)
REPLACEMENTS = Replacements("verl", "0.9", {HEAD: fused_linear_for_ppo})


def patch() -> None:
    """Patches verl. Importing this module does so; call it again after `unpatch`. NotImplementedError if verl's head
    has changed.
    """
    REPLACEMENTS.put()


def unpatch() -> None:
    """Undo `patch`. ValueError if verl is not patched."""
    REPLACEMENTS.take_away()


patch()
