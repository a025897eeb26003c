"""Measured rates of GPUs, with the CSV files they come from. There are no guesses for other GPUs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # per second, for the operator's GEMMs in the dtype planned for
    bandwidth: float  # bytes per second, of the device's memory
    bus_bandwidth: float | None  # bytes per second of an all_reduce within one host, as NCCL's tests count them


# benchmarks/results/nvidia-h200, torch 2.11.0+cu130:
#   flops          bare GEMMs of fwd_bwd.csv and other_modes.csv: 618e12 to 698e12, the median 665e12; 680e12 fits the
#                  rows of flce_ops, because the model adds the other costs (seconds.py)
#   bandwidth      a copy, docs/kernels.md
#   bus_bandwidth  all_reduce of 256 MiB, distributed_vocabulary.csv: 300e9 on two GPUs, 341e9 on four
_H200 = Device("h200", flops=680e12, bandwidth=4.3e12, bus_bandwidth=340e9)
MEASURED = {("h200", torch.bfloat16): _H200}
LARGEST_HOST = 8  # GPUs for which the bus bandwidth above holds


def device_of(
    gpu: str,
    dtype: torch.dtype,
    gpus: int,
    *,
    tflops: float | None = None,
    bandwidth: float | None = None,
    bus_bandwidth: float | None = None,
) -> Device:
    """The measured rates of `gpu`, or those that are given: TFLOP/s, TB/s and GB/s.

    Raises:
        ValueError: a rate that is needed is neither measured nor given.
    """
    known = MEASURED.get((gpu.lower(), dtype))
    if known is None and (tflops is None or bandwidth is None):
        names = ", ".join(f"{name} in {str(of)[6:]}" for name, of in MEASURED)
        raise ValueError(
            f"no measured rates for {gpu} in {str(dtype)[6:]}, expected one of: {names}; "
            "give --tflops (of dense GEMMs in this dtype) and --bandwidth (TB/s of its memory)"
        )
    bus = None if known is None else known.bus_bandwidth
    if bus_bandwidth is not None:
        bus = bus_bandwidth * 1e9
    if gpus > 1 and (bus is None or (bus_bandwidth is None and gpus > LARGEST_HOST)):
        raise ValueError(
            f"no measured bus bandwidth for {gpus} GPUs ({gpu}, hosts of {LARGEST_HOST} at most): "
            "give --bus-bandwidth, the GB/s of an all_reduce"
        )
    return Device(
        known.name if known and tflops is None and bandwidth is None else f"{gpu}, rates given",
        flops=tflops * 1e12 if tflops is not None else known.flops,
        bandwidth=bandwidth * 1e12 if bandwidth is not None else known.bandwidth,
        bus_bandwidth=bus,
    )
