"""The cost model of docs/kernels.md and docs/distributed.md: seconds of one training step of the head.

    passes * 2NDV / F                      the GEMMs
    bytes of elementwise passes / B        dense torch and the ATen path; for the Triton path what its epilogue adds
    additions to grad_linear_weight / B    the GEMM hides them in proportion to the rows of a chunk
    float32 sums of grad_input / B

Two numbers are fitted, to the rows of flce_ops in fwd_bwd.csv and other_modes.csv (benchmarks/results/nvidia-h200) that
make both gradients. The model is within 8 % of each row. Repeated measurements of one row differ by up to 8 %.
"""

from .devices import Device
from .step_cost import Head, StepCost

# N tokens, D hidden, V vocabulary, R ranks

# The bytes whose time the GEMMs do not hide: a part of the epilogue's work, and of the exponentials' traffic of 6 bytes
# (written once, read twice).
EPILOGUE_BYTES = 4.2  # per logit, which is 1.0 ps on an H200
# Up to this many rows, an addition to grad_linear_weight takes its full time. With more rows the GEMM hides a part of
# it.
FULLY_VISIBLE_ROWS = 350


def seconds(head: Head, cost: StepCost, device: Device) -> float:
    gemms = cost.passes * 2 * head.tokens * head.hidden * head.vocab / device.flops
    per_logit = EPILOGUE_BYTES if cost.path.startswith("triton") else cost.bytes_per_logit
    visible = min(1.0, FULLY_VISIBLE_ROWS / (cost.added_rows or cost.rows))
    moved = per_logit * head.logits + visible * cost.addition_bytes + cost.sum_bytes
    return gemms + moved / device.bandwidth


def all_reduce_seconds(nbytes: int, ranks: int, device: Device) -> float:
    """Seconds of an all_reduce, or of a reduce_scatter and an all_gather of the same bytes."""
    return 2 * nbytes * (ranks - 1) / (ranks * device.bus_bandwidth)


def exchange_seconds(tokens: int, ranks: int, device: Device) -> float:
    """Each rank receives two float32 a token from every other rank."""
    return 8 * tokens * (ranks - 1) / device.bus_bandwidth
