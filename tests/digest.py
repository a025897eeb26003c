"""python -m tests.digest --device cpu|cuda|interpreter [--cases 3000] [--seed 0] --out FILE

Writes one line for each fuzzer case: its index, a hash of the bits of every result (loss, gradients, metrics,
log-probs, divergences, second derivatives), its function and its dtype. If a change should not alter results, the files
before and after it are equal:

    git stash; python -m tests.digest --device cpu --out /tmp/before; git stash pop
    python -m tests.digest --device cpu --out /tmp/after; diff /tmp/before /tmp/after

The bits repeat on one machine with one version of torch and one thread, not across machines.
"""

import argparse
import hashlib
import os
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path


def line(seed: int, index: int, device: str) -> str:
    import torch

    from tests.fuzz.draw import draw
    from tests.fuzz.judge import surroundings
    from tests.fuzz.problem import Problem
    from tests.fuzz.run import run_ours

    case = draw(seed, index, device)
    try:
        with surroundings(case, device):
            found = run_ours(Problem(case, device))
    except Exception as error:  # an error is a result too
        digest = hashlib.sha256(f"{type(error).__name__}: {error}".encode())
    else:
        digest = hashlib.sha256()
        for name in sorted(found):
            result = found[name].detach().cpu().contiguous()
            digest.update(f"{name} {result.dtype} {tuple(result.shape)}".encode())
            digest.update(result.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{index} {digest.hexdigest()[:16]} {case.function} {case.mode} {case.dtype}"


def lines(seed: int, indices: range, device: str) -> list[str]:
    from tests.fuzz.report import prepare

    warnings.simplefilter("ignore")
    prepare(device)
    return [line(seed, index, device) for index in indices]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.digest")
    parser.add_argument("--device", choices=["cpu", "cuda", "interpreter"], default="cpu")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before triton is imported
    shares = [range(first, arguments.cases, arguments.workers) for first in range(arguments.workers)]
    with get_context("spawn").Pool(arguments.workers) as pool:
        found = pool.starmap(lines, [(arguments.seed, share, arguments.device) for share in shares])
    every = sorted((text for share in found for text in share), key=lambda text: int(text.split()[0]))
    arguments.out.write_text("\n".join(every) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
