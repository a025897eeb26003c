"""Tests of a wheel, in an environment that holds torch, pytest and what they ask for, away from the checkout.

    python3.13 -m release.smoke dist/flce_ops-0.1.0-py3-none-any.whl

The Python that runs this makes the environment. The tests are a file or two of each part of the package; none of them
needs NumPy, Triton, another library or a GPU. requirements.txt says which torch and pytest.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "sources/test_ops.py",
    "sources/test_modules.py",
    "objectives/test_zero_denominators.py",
    "objectives/test_log_probs_corners.py",
    "objectives/test_policy.py",
    "objectives/test_kl_div_operator.py",
    "sinks/test_chunks.py",
    "sinks/test_double_backward.py",
    "sinks/test_main_grad.py",
    "layouts/test_distributed_metrics.py",
    "compile/test_import.py",
    "compile/test_compile.py",
    "compile/test_export.py",
)


def smoke(wheel: Path, folder: Path) -> None:
    # PYTHONPATH may name the checkout
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> None:
        status = subprocess.run(command, cwd=folder, env=environment).returncode
        if status:
            sys.exit(status)

    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements.txt", wheel, "pytest")
    run(python, "-m", "pip", "list")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "integrations"))
    shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's options
    run(python, "-c", "import flce_ops, sys; sys.exit(not flce_ops.__file__.startswith(sys.prefix))")
    run(python, "-m", "pytest", "-q", "-m", "not gpu and not multigpu", *(f"tests/{test}" for test in TESTS))


def main() -> None:
    parser = argparse.ArgumentParser("python -m release.smoke", description=__doc__.split("\n\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        smoke(wheel, Path(folder).resolve())


if __name__ == "__main__":
    main()
