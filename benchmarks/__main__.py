"""`python -m benchmarks`: every provider at every shape in every mode. Prints a table, and writes a CSV after each
shape.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 60  # seconds after the budget at which a run is ended that hangs in a provider's kernel


def shares(text: str) -> list[float]:
    found = [float(word) for word in text.split(",")]
    if not all(0 <= share < 1 for share in found):
        raise ValueError(f"expected shares in [0, 1), got {text!r}")
    return list(dict.fromkeys(found))


def trained(text: str) -> Path:
    source, _, path = text.partition(":")
    if source != "trained" or not path:
        raise ValueError(f"expected trained:PATH, got {text!r}")
    return Path(path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--shapes", default=None, help="groups of benchmarks/shapes.py and NxDxV, with commas; key")
    parser.add_argument("--loads", action="store_true", help="the units of benchmarks/loads.py instead, and its tables")
    parser.add_argument("--data", type=trained, default=None, help="trained:PATH, of benchmarks.training")
    parser.add_argument("--modes", default="fwd_bwd,fwd,lora,none", help="all shapes of the first, then the next")
    parser.add_argument("--providers", default="*", help="names or patterns such as floor,ours*,liger*")
    parser.add_argument("--without", default="", help="providers to leave out, in the same notation")
    parser.add_argument("--ignored", type=shares, default="0.02", help="shares of the tokens, with commas")
    parser.add_argument("--prior", default=None, choices=("shuffled", "ordered"), help="over the token ids; shuffled")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=None, help="back-to-back time of a provider in a round; 400")
    parser.add_argument("--quick", action="store_true", help="two rounds of 200 ms, no autotuning")
    parser.add_argument("--budget-s", type=float, default=500, help="no new shape once these seconds are spent")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default=None, help="of the CSV; run, of --loads loads")
    parser.add_argument("--device", default=None, help="cuda, or cpu at toy size")
    parser.add_argument("--seed", type=int, default=None, help="of the data; fresh when not given")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    options = parser.parse_args(argv)
    if options.data and (options.shapes or options.prior):
        parser.error("--data has its own shape and prior: leave out --shapes and --prior")
    if options.loads and (options.shapes or options.prior):
        parser.error("--loads has its own shapes and priors: leave out --shapes and --prior")
    if options.data and not options.data.exists():
        parser.error(f"no file {options.data}: python -m benchmarks.training --operands makes one")
    options.name = options.name or ("loads" if options.loads else "run")
    options.ms = options.ms or (100 if options.loads else 400)
    if options.quick:
        options.rounds, options.ms = min(options.rounds, 2), min(options.ms, 200)
    return options


def main(argv: Sequence[str] | None = None) -> Path:
    options, started = parse(argv), time.time()

    import torch

    from . import loads, providers, run
    from .data import PRIORS, TRAINED, shape_of
    from .modes import MODES
    from .report import Report, environment, say
    from .shapes import parse_shapes

    quick_without = ",".join(providers.QUICK_LEAVES_OUT) if options.quick else ""
    names = providers.choose(options.providers, without=f"{options.without},{quick_without}")
    of_file = shape_of(options.data) if options.data else None
    if options.loads:
        units = loads.units(of_file)
    else:
        shapes = [of_file] if of_file else parse_shapes(options.shapes or "key")
        every = itertools.product(options.modes.split(","), shapes, options.ignored)
        units = [loads.Unit(*one, TRAINED if of_file else options.prior or PRIORS[0], "*") for one in every]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run.one_compilation_per_shape()
    here = environment(device, options.commit)
    report = Report(options.out / here.slug / f"{options.name}.csv")
    say(f"{here.gpu}, torch {here.torch}, triton {here.triton}, commit {here.commit} -> {report.path}")

    def spent() -> float:
        return time.time() - started

    def text(unit: loads.Unit) -> str:
        return f"{unit.mode} {loads.name_of((str(unit.shape), unit.ignored, unit.prior, unit.mode))}"

    faulthandler.dump_traceback_later(max(1.0, options.budget_s + GRACE_S - spent()), exit=True, file=sys.__stderr__)
    try:
        for done, unit in enumerate(units):
            if spent() > options.budget_s:
                say("time budget spent, left out: " + ", ".join(map(text, units[done:])))
                break
            say(f"\n{spent():.0f} s: {text(unit)} {options.dtype}")
            seed = secrets.randbelow(2**31) if options.seed is None else options.seed
            settings = run.Settings(device, getattr(torch, options.dtype), options.rounds, options.ms, seed)
            of_file = options.data if unit.prior == TRAINED else None
            settings = settings._replace(ignored=unit.ignored, prior=unit.prior, trained=of_file)
            of_the_unit = [name for name in providers.choose(unit.providers) if name in names]
            late = {"out_of_time": lambda: spent() > options.budget_s}
            try:
                rows = run.measure(unit.shape, MODES[unit.mode], of_the_unit, settings, here, **late)
            except torch.cuda.OutOfMemoryError:
                say(f"{text(unit)}: the inputs and the reference alone do not fit in memory")
                continue
            report.add(rows)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if options.loads:
        say("", *loads.tables(report.rows), sep="\n")
    say(f"\n{len(report.rows)} rows in {spent():.0f} s -> {report.path}")
    return report.path


if __name__ == "__main__":
    main()
