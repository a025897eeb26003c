"""Every module of benchmarks/ can be imported, every command says what it takes, and a row can be measured on a CPU."""

import csv
import importlib
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flce_ops import linear_cross_entropy

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
TOY = ["--device", "cpu", "--rounds", "1"]


@pytest.mark.parametrize("module", MODULES)
def test_module_is_imported_and_its_command_says_what_it_takes(module, capsys):
    if module.endswith("busy_device"):
        pytest.importorskip("triton")
    found = importlib.import_module(module)
    if hasattr(found, "main"):
        parse = found.parser().parse_args if hasattr(found, "parser") else found.main
        with pytest.raises(SystemExit) as ended:
            parse(["--help"])
        assert ended.value.code == 0 and "--help" in capsys.readouterr().out


def rows_of(path):
    with path.open(newline="") as file:
        return {row["provider"]: row for row in csv.DictReader(file)}


def test_rows_of_a_toy_step_have_times_memory_and_errors(tmp_path):
    from benchmarks.__main__ import main

    sizes = ["--shapes", "60x33x501", "--modes", "fwd_bwd", "--dtype", "float32", "--ms", "1", "--seed", "3"]
    path = main([*sizes, *TOY, "--providers", "floor,ours,torch_function,torch_chunked,liger", "--out", str(tmp_path)])
    rows = rows_of(path)
    assert all(rows[name]["ms"] and float(rows[name]["peak_MiB"]) > 0 for name in ("floor", "ours", "torch_function"))
    for column in ("err_loss", "err_dx", "err_dw"):
        assert float(rows["ours"][column]) < 1e-6
    assert bool(rows["torch_chunked"]["ms"]) == hasattr(torch.nn, "LinearCrossEntropyOptions")
    assert rows["ours"]["gpu"] and rows["ours"]["commit"] and "liger" in rows


def test_the_host_of_a_step_is_timed_for_one_and_for_new_numbers_of_tokens(tmp_path):
    from benchmarks.host_step import loops, main

    sizes = ["--shape", "40x16x101", "--least", "8", "--most", "200", "--steps", "3", "--providers", "ours"]
    path = main([*sizes, *TOY, "--out", str(tmp_path)])
    with path.open(newline="") as file:
        rows = {row["tokens"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["40", "8 to 200"]
    assert all(0 < float(row["host_ms"]) < math.inf and int(row["calls"]) > 0 for row in rows.values())
    warm, timed = loops(64, 4096, 8, steps=70, rounds=3)
    numbers = [*warm, *sum(timed, [])]
    assert len(set(numbers)) == len(numbers) and all(number % 8 == 0 for number in numbers)


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss to copy")
def test_the_copied_files_of_torch_compute_what_torch_does(tmp_path):
    """In a process of its own, because torch has the operator under the same name."""
    package, modules = tmp_path / "torch_linear_cross_entropy", Path(torch.__file__).parent / "nn/modules"
    package.mkdir()
    for name in ("linear_cross_entropy", "linear_cross_entropy_options"):
        shutil.copy(modules / f"{name}.py", package)
    text = """if True:
        import torch
        from benchmarks.providers.torch_chunked import copied_function
        torch.manual_seed(0)
        x, w, y = torch.randn(60, 33), torch.randn(501, 33), torch.randint(501, (60,))
        print(copied_function()(x, w, y, "mean").item())"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True, text=True, check=True)
    torch.manual_seed(0)
    exact = linear_cross_entropy(torch.randn(60, 33), torch.randn(501, 33), torch.randint(501, (60,))).item()
    assert float(done.stdout) == pytest.approx(exact, rel=1e-5)
