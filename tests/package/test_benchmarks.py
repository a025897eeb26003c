"""Every module of benchmarks/ can be imported, every command says what it takes, and a row can be measured on a CPU."""

import csv
import importlib
from pathlib import Path

import pytest
import torch

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
