"""Bodies of the entry operators: from the user's arguments to the inner operators, for plain tensors and DTensors."""

from flce_ops import ops as ops  # registers the inner operators
from flce_ops.entry import cross_entropy, kl_div, log_probs
from flce_ops.ops.library import library

# On torch.func's key too: the bodies must run before any transform has been peeled off.
for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
    library.impl("linear_cross_entropy", cross_entropy.composite, _key)
    library.impl("linear_cross_entropy_metrics", cross_entropy.composite_metrics, _key)
    library.impl("linear_log_probs", log_probs.composite, _key)
    library.impl("linear_kl_div", kl_div.composite, _key)
