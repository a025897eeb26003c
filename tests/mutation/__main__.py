"""python -m tests.mutation [--mutants 400] [--seed 0] [--area math ...] [--jobs 1] --out FILE, or --map"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAP = Path(__file__).with_name("map.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    add = parser.add_argument
    add("--mutants", type=int, default=400)
    add("--seed", type=int, default=0)
    add("--area", nargs="*", default=[], help="how a file's path in the package begins: math triton/rows")
    add(
        "--again",
        type=Path,
        metavar="CSV",
        help="what no test killed in it, instead of a draw; --out gets the rest too",
    )
    add("--tests", nargs="*", help="these files or tests, instead of the map's")
    add("--jobs", type=int, default=1, help="processes")
    add("--budget", type=float, help="of a mutant's tests, in seconds; what survives is unfinished: a first pass")
    add("--seconds", type=float, default=float("inf"), help="of the whole command")
    add("--out", type=Path, help="the CSV, a row a mutant; with --map the map")
    add("--map", action="store_true", help="measure which tests run which lines")
    add("--map-file", type=Path, default=MAP)
    add("--sample", type=int, default=3, help="with --map: parameters of a test")
    arguments = parser.parse_args()

    from tests.mutation import measure, run, server
    from tests.mutation.map import Map

    server.prepare()
    project = run.Project(ROOT)
    with tempfile.TemporaryDirectory(prefix="mutants") as work:
        if arguments.map:
            files = arguments.tests or measure.test_files(ROOT)
            return measure.measure(
                project,
                files,
                arguments.out or arguments.map_file,
                work=Path(work),
                jobs=arguments.jobs,
                sample=arguments.sample,
                seconds=arguments.seconds,
            )
        out = arguments.out or Path("mutants.csv")
        before = run.read(arguments.again) if arguments.again else []
        if arguments.again:
            mutants = run.again(project, arguments.again)
        else:
            mutants = run.draw(project, arguments.area, arguments.mutants, arguments.seed)
        rows = run.run(
            project,
            mutants,
            Map.read(arguments.map_file),
            out,
            work=Path(work),
            jobs=arguments.jobs,
            seconds=arguments.seconds,
            named=[(name, 60.0) for name in arguments.tests] if arguments.tests else None,
            budget=arguments.budget,
        )
    if before:
        rows = run.merged(before, rows)
        run.write(out, rows)
    print(run.summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
