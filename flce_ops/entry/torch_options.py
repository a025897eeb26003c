"""`options` of torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions, as far as it fits here.

allow_retain_graph                    always so here
batch_chunk_size, chunking_method     torch's bound on memory; taken, and of no effect: the workspace is the bound
acc_dtype                             that of the sums here: float32, float64 of float64 operands
acc_policy                            "auto", "compact", "balanced"; "accurate" promises half operands more
"""

import torch

from flce_ops.math.precision import accumulation_dtype


def check_torch_options(op: str, options: object, dtype: torch.dtype | None = None) -> None:
    """Without `dtype`, that of input, only what can never be right."""
    if options is None:
        return
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", None)  # since torch 2.13
    if kind is None or not isinstance(options, kind):
        raise TypeError(f"{op}: expected options to be a torch.nn.LinearCrossEntropyOptions or None, got {options!r}")
    if dtype is None:
        return
    expected = accumulation_dtype(dtype)
    if options.acc_dtype not in (None, expected):
        raise NotImplementedError(
            f"{op}: options.acc_dtype={options.acc_dtype} is not implemented for input in {dtype}, whose sums are kept "
            f"in {expected}; pass acc_dtype=None"
        )
    if options.acc_policy == "accurate" and dtype != expected:
        raise NotImplementedError(
            f"{op}: options.acc_policy='accurate' is not implemented for input in {dtype}: what the gradient GEMMs "
            "read is rounded to it; pass 'auto', or operands in float32"
        )
