"""`python -m benchmarks.first_call`: seconds from importing a library to the end of its first step.

Each provider in a process of its own, with every compilation cache empty. The clock starts when torch is up, the GPU's
context exists and cuBLAS has run: nobody's first call is charged for those.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.first_call", description=__doc__)
    parser.add_argument("--providers", default="ours,ours_compiled,torch_compile,liger,cce")
    parser.add_argument("--shape", default="8192x4096x128256")
    parser.add_argument("--mode", default="fwd_bwd")
    parser.add_argument("--device", default=None)
    parser.add_argument("--timeout-s", type=float, default=120)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="first_call")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--here", default=None, help=argparse.SUPPRESS)  # the provider to run in this very process
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(_first_call(options)))
        return

    from . import providers
    from .report import Report, Row, say

    report = None
    for name in providers.choose(options.providers):
        result = _in_fresh_process(name, options)
        if report is None and "slug" in result:
            report = Report(options.out / result["slug"] / f"{options.name}.csv")
        say(f"{name:20}", result.get("reason") or f"{result['row']['first_call_s']:.2f} s")
        if "row" in result:
            report.add([Row(**result["row"])])


def _in_fresh_process(name: str, options: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "benchmarks.first_call", "--here", name, "--shape", options.shape]
    command += ["--mode", options.mode] + (["--device", options.device] if options.device else [])
    command += ["--commit", options.commit] if options.commit else []
    with tempfile.TemporaryDirectory() as folder:
        caches = {variable: str(Path(folder) / variable.lower()) for variable in CACHES}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, **caches}, timeout=options.timeout_s
            )
        except subprocess.TimeoutExpired:
            return {"reason": f"more than {options.timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"reason": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(lines[-1])


def _first_call(options: argparse.Namespace) -> dict:
    import torch

    from . import providers
    from .data import make_problem
    from .modes import MODES, prepare
    from .report import environment
    from .run import empty_row
    from .shapes import parse_shapes

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    (shape,), mode, here = parse_shapes(options.shape), MODES[options.mode], environment(device, options.commit)
    row = empty_row(options.here, shape, mode, torch.bfloat16, seed=0, environment=here)
    problem = make_problem(shape, dtype=torch.bfloat16, device=device, seed=0)
    prepare(problem, mode)
    if device.type == "cuda":
        torch.cuda.synchronize()

    start = time.perf_counter()
    try:
        step = providers.provide(options.here, problem, mode)
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return {"slug": here.slug, "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    row.first_call_s = time.perf_counter() - start
    row.version = providers.version(options.here)
    return {"slug": here.slug, "row": row.__dict__}


if __name__ == "__main__":
    main()
