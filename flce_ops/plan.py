"""Memory by formula and time as three GEMMs of one training step of a head: python -m flce_ops.plan --help"""

import argparse
from typing import NamedTuple

from .support.workspace import get_workspace

# dense bfloat16 TFLOP/s of the datasheets
RATES = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "4090": 165.0}
OF_DATASHEET = 0.65  # what the GEMMs of a step reach


class Step(NamedTuple):
    name: str
    temporaries: int  # bytes beside weight, hidden states and their gradients
    seconds: float


def plan(tokens: int, hidden: int, vocab: int, tflops: float, itemsize: int = 2) -> list[Step]:
    logits, gemm = tokens * vocab, 2.0 * tokens * hidden * vocab / (tflops * OF_DATASHEET * 1e12)
    workspace = min(max(get_workspace(), 2048 * vocab * itemsize), logits * itemsize)
    return [
        Step("F.cross_entropy, float32 logits", logits * (itemsize + 8), 3 * gemm),
        Step("F.cross_entropy, torch.compile", 2 * logits * itemsize, 3 * gemm),
        Step("flce_ops", workspace, 3 * gemm),
        Step("flce_ops, checkpointed or reduction='none' beyond the saved logits", workspace, 4 * gemm),
    ]


def main() -> None:
    parser = argparse.ArgumentParser("python -m flce_ops.plan", description=__doc__)
    for name in ("tokens", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="that share the vocabulary")
    parser.add_argument("--device", choices=RATES, default="H200")
    parser.add_argument("--tflops", type=float, help="in place of the device's datasheet")
    given = parser.parse_args()
    for step in plan(given.tokens, given.hidden, -(-given.vocab // given.gpus), given.tflops or RATES[given.device]):
        print(f"{step.name:70} {step.temporaries >> 20:8} MiB {step.seconds * 1e3:9.2f} ms")


if __name__ == "__main__":
    main()
