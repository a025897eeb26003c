"""Memory and time of one training step of a head, before anything runs: python -m flce_ops.plan --help

Memory is a formula. Time is that of the GEMMs alone, at the rate that the user gives, or at REACHED times the rate in a
card's datasheet: the three GEMMs of a step, 2 N D V FLOP each, and a fourth for logits that are computed twice.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .support.sizes import cdiv
from .support.workspace import get_retained, step_bytes, workspace_setting

# N tokens, D hidden, V vocabulary (of one GPU)

# TFLOP/s of dense GEMMs in bfloat16 and float16 with float32 sums, by the datasheets
RATES = {"h200": 989.0, "h100": 989.0, "a100": 312.0, "l40s": 362.0, "4090": 165.0}
# The share of the datasheet's rate that a whole step reaches. An H200 and an H100 reach 0.63 to 0.69 at D >= 2048, and
# 0.59 at D = 896 (benchmarks/results).
REACHED = 0.66
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MIB = 1 << 20


class Step(NamedTuple):
    name: str
    temporaries: int  # bytes beside weight, hidden states and their gradients
    gemms: float  # of 2 N D V FLOP
    seconds: float


def plan(tokens: int, hidden: int, vocab: int, tflops: float, dtype: torch.dtype = torch.bfloat16) -> list[Step]:
    """The steps of torch and of this package. `vocab` is that of one GPU, `tflops` what its GEMMs reach."""
    logits, size = tokens * vocab, dtype.itemsize
    gradients = (tokens + vocab) * hidden * size
    chunk = step_bytes(tokens, vocab * size)
    saved = min(get_retained(), logits * size)
    # float16 gradients wait for the loss scale, which only backward knows
    one_pass = (chunk, 3.0) if dtype != torch.float16 else (chunk + saved, 4.0 - saved / (logits * size))
    # log_softmax's backward holds three float32 matrices before the gradients exist
    steps = [
        ("F.cross_entropy of float32 logits", max(12 * logits - gradients, logits * size), 3.0),
        ("F.cross_entropy under torch.compile", logits * size, 3.0),
        ("flce_ops, a scalar loss", *one_pass),
        ('flce_ops, reduction="none" or log-probabilities', chunk + saved, 4.0 - saved / (logits * size)),
        ("flce_ops, a checkpointed region", chunk, 4.0),
    ]
    seconds = 2.0 * tokens * hidden * vocab / (tflops * 1e12)
    return [Step(name, temporaries, gemms, gemms * seconds) for name, temporaries, gemms in steps]


def rate_of(gpu: str, dtype: str, tflops: float | None) -> tuple[float, str]:
    """TFLOP/s, and where the number is from.

    Raises:
        ValueError: the card or its rate in this dtype is not in the table, and `tflops` is not given.
    """
    if tflops is not None:
        return tflops, f"{tflops:g} TFLOP/s as given"
    name = gpu.lower()
    for word in ("nvidia", "geforce", "rtx", " ", "-", "_"):
        name = name.replace(word, "")
    give = "give --tflops, the TFLOP/s that dense GEMMs of the card reach in this dtype"
    if name not in RATES:
        raise ValueError(f"argument --gpu: expected one of {', '.join(RATES)}, got {gpu!r}; for another card {give}")
    if dtype == "float32":
        raise ValueError(f"argument --dtype: the rates of cards are those of 16-bit operands; for float32 {give}")
    sheet = RATES[name]
    return REACHED * sheet, f"{REACHED * sheet:.0f} TFLOP/s, {REACHED} of the {sheet:.0f} in the {name}'s datasheet"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m flce_ops.plan",
        description="Memory and time of one training step of a language model's head: the loss, the gradients of the "
        "hidden states and of the weight.",
    )
    parser.add_argument("--tokens", type=positive(int), required=True, help="N: batch x sequence on one GPU")
    parser.add_argument("--hidden", type=positive(int), required=True, help="D")
    parser.add_argument("--vocab", type=positive(int), required=True, help="V")
    parser.add_argument("--gpus", type=positive(int), default=1, help="GPUs that share the vocabulary (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(RATES)} (default: h200)")
    parser.add_argument("--tflops", type=positive(float), help="what dense GEMMs reach, in place of --gpu")
    given = parser.parse_args(argv)
    try:
        tflops, source = rate_of(given.gpu, given.dtype, given.tflops)
    except ValueError as error:
        parser.error(str(error))
    tokens, hidden, vocab, dtype = given.tokens, given.hidden, cdiv(given.vocab, given.gpus), DTYPES[given.dtype]
    weight, states = (rows * hidden * dtype.itemsize for rows in (vocab, tokens))
    of_each = f" on each of {given.gpus} GPUs" if given.gpus > 1 else ""
    print(f"{tokens} tokens x {hidden} hidden x {vocab} classes{of_each}, {given.dtype}, {source}")
    print(f"weight {mib(weight)} MiB, hidden states {mib(states)} MiB, their gradients the same again")
    setting, chunk = workspace_setting(), step_bytes(tokens, vocab * dtype.itemsize)
    setting = setting if isinstance(setting, str) else f"{mib(setting)} MiB"
    print(f"workspace {setting}: logits of {chunk // (vocab * dtype.itemsize)} tokens at a time, {mib(chunk)} MiB\n")
    print(f"{'':50}{'beside them, MiB':>17}{'in all, MiB':>13}{'GEMMs':>7}{'ms':>9}")
    for step in plan(tokens, hidden, vocab, tflops, dtype):
        peak = step.temporaries + 2 * (weight + states)
        print(f"{step.name:50}{mib(step.temporaries):>17}{mib(peak):>13}{step.gemms:>7.1f}{1e3 * step.seconds:>9.2f}")
    print("\nms: the GEMMs alone. F.cross_entropy reads and writes all logits several times more, eager most of all.")


def positive(kind: type) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse names it where `kind` refuses the text
    return parse


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


if __name__ == "__main__":
    main()
