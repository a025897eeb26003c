"""python -m tests.fuzz --cases 20000 --seed S [--device cpu|cuda|interpreter] [--only SEED:INDEX]"""

import argparse
import math
import os
import sys
import warnings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--device", choices=["cpu", "cuda", "interpreter"], default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: 12 on cuda, else 1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins later")
    parser.add_argument("--only", metavar="SEED:INDEX", help="one case, with every number")
    arguments = parser.parse_args()
    if arguments.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before triton is imported
    warnings.simplefilter("ignore")  # nan and overflow are part of the cases
    os.environ["PYTHONWARNINGS"] = "ignore"  # for the workers

    from tests.fuzz import report

    report.prepare(arguments.device)
    if arguments.only:
        seed, index = arguments.only.split(":")
        return report.show(int(seed), int(index), arguments.device)
    indices = range(arguments.first, arguments.first + arguments.cases)
    workers = arguments.workers or (12 if arguments.device == "cuda" else 1)
    return report.campaign(arguments.seed, indices, arguments.device, workers, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
