"""`python -m flce_ops.plan`: the plan as a table."""

import argparse
import sys
from collections.abc import Sequence

import torch

from . import Head, Option, device_of, plan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    dtype = DTYPES[arguments.dtype]
    head = Head(arguments.tokens, arguments.hidden, arguments.vocab, dtype)
    try:
        device = device_of(
            arguments.gpu,
            dtype,
            arguments.gpus,
            tflops=arguments.tflops,
            bandwidth=arguments.bandwidth,
            bus_bandwidth=arguments.bus_bandwidth,
        )
    except ValueError as error:
        sys.exit(f"flce_ops.plan: {error}")
    print(f"{head.tokens} tokens x {head.hidden} hidden x {head.vocab} vocabulary, {arguments.dtype}, {device.name}")
    print(f"weight {mib(head.weight_bytes)} MiB, hidden states {mib(head.input_bytes)} MiB, gradients the same again\n")
    print(table(plan(head, arguments.gpus, device)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m flce_ops.plan",
        description="Memory and time of one training step of a language model's head: the loss, the gradients of the "
        "hidden states and of the weight. Rates are measured for an H200 in bfloat16; give others.",
    )
    parser.add_argument("--tokens", type=positive, required=True, help="N: batch x sequence on one GPU")
    parser.add_argument("--hidden", type=positive, required=True, help="D")
    parser.add_argument("--vocab", type=positive, required=True, help="V")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs that share a vocabulary, or FSDP ranks")
    parser.add_argument("--gpu", default="h200", help="a GPU with measured rates (default: h200)")
    parser.add_argument("--tflops", type=float, help="TFLOP/s of dense GEMMs in this dtype")
    parser.add_argument("--bandwidth", type=float, help="TB/s of the GPU's memory")
    parser.add_argument("--bus-bandwidth", type=float, help="GB/s of an all_reduce between the GPUs")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def table(options: list[Option]) -> str:
    dense = options[0]
    lines = [f"{'':35}{'path':22}{'temporary MiB':>13}{'peak MiB':>10}{'ms':>8}{'us/token':>10}{'x dense':>9}"]
    for option in options:
        per_token, dense_per_token = option.seconds / option.tokens, dense.seconds / dense.tokens
        lines.append(
            f"{option.name:35}{option.path:22}{mib(option.temporaries):>13}{mib(option.peak):>10}"
            f"{1e3 * option.seconds:>8.1f}{1e6 * per_token:>10.2f}{per_token / dense_per_token:>9.2f}"
        )
    lines += ["", "temporary: beyond weight, hidden states and their gradients. peak: with them, on one GPU."]
    lines += ["us/token: of all GPUs together; x dense: over the first line's."]
    lines += ["The first line's time counts the bytes of every operator once: a lower bound."]
    for option in options:
        if option.behind_blocks:
            lines += [
                f"FSDP: gathering the weight and scattering its gradient, {1e3 * option.behind_blocks:.1f} ms, can run "
                "beside the model's blocks and is not in the time."
            ]
    return "\n".join(lines)


def mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f}"


if __name__ == "__main__":
    main()
