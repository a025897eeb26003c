"""`python -m flce_ops.warmup`: flce_ops.warmup from a shell."""

import argparse
import ast
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import FUNCTIONS, warmup

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def arch_of(text: str) -> int:
    return int(text.removeprefix("sm_"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m flce_ops.warmup",
        description="Compiles the Triton kernels of a head into Triton's cache, for any number of tokens.",
    )
    parser.add_argument("--hidden", type=int, required=True, help="D")
    parser.add_argument("--vocab", type=int, required=True, help="V")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--function", choices=FUNCTIONS, default="linear_cross_entropy")
    parser.add_argument("--bias", action="store_true", help="the head has a bias")
    parser.add_argument("--arch", type=arch_of, help="of a GPU that is not there: sm_90 for H100 and H200")
    parser.add_argument("--multiprocessors", type=int, help="of that GPU (default: 132)")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="label_smoothing=0.1 ...")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    options: dict[str, Any] = {}
    for option in given.options:
        name, _, text = option.partition("=")
        try:
            options[name] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            options[name] = text
    head = {"dtype": DTYPES[given.dtype], "function": FUNCTIONS[given.function], "bias": given.bias}
    chip = {"arch": given.arch, "multiprocessors": given.multiprocessors}
    try:
        warmup(given.hidden, given.vocab, **head, **chip, **options)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
