"""The commands beside `python -m benchmarks`, at toy size on a CPU: what they write, and the tables made from it."""

import argparse
import json
import sys

import pytest
import torch
from process_pool import run_in_world
from toy_problem import rows_of

from benchmarks import (
    batch_invariant,
    batch_invariant_shards,
    cross_entropy,
    first_call,
    float32_head,
    host_step,
    loads,
    lora,
    main_grad,
    objective_errors,
    objectives,
    overhead,
    paired,
    support,
)
from benchmarks.tables import objective_errors as error_tables

pytestmark = pytest.mark.usefixtures("quick_collections")
FIGURE = {"device": "cpu", "shape": (8, 8, 16), "dtype": "float32", "calls": 9}


def test_overhead_compares_two_checkouts_in_turn(tmp_path, monkeypatch):
    turns = []

    def figures_of(checkout, cuda):
        turns.append(checkout)
        slower = 10.0 * (checkout != overhead.REPOSITORY)
        yield from ({**FIGURE, "mode": mode, "us": [slower + 3.0, slower + 2.0]} for mode in ("eager", "no_grad"))

    monkeypatch.setattr(overhead, "figures_of", figures_of)
    path, other = tmp_path / "overhead.csv", tmp_path / "other"
    overhead.main(["--device", "cpu", "--against", f"{other}", "--processes", "2", "--out", f"{path}"])
    assert turns == [other, overhead.REPOSITORY, overhead.REPOSITORY, other]
    rows = rows_of(path)
    assert [(row["mode"], row["us"]) for row in rows] == [
        ("eager", "12"),
        ("eager", "2"),
        ("no_grad", "12"),
        ("no_grad", "2"),
    ]
    assert {row["commit"] for row in rows[::2]} == {"unknown"}


def test_a_step_of_the_overhead_benchmark_is_timed_and_its_calls_counted(monkeypatch):
    monkeypatch.setattr(host_step, "MODES", ("eager", "no_grad"))  # compiling takes seconds
    monkeypatch.setattr(host_step, "ROUNDS", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    training, without_gradients = host_step.cpu_figures()
    assert len(training.us) == 2 and min(training.us) > 0
    assert training.calls > without_gradients.calls > 0


def test_first_steps_of_fresh_processes_are_rows_and_a_table(monkeypatch, tmp_path, capsys):
    def in_this_process(asked, options, folder, left):
        assert left > 0
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        return first_call.told(asked, options)

    monkeypatch.setattr(first_call, "in_fresh_process", in_this_process)
    monkeypatch.setattr(first_call, "SEQUENCE", (7, 1))
    monkeypatch.setattr(first_call, "cache_bytecode", lambda folder: None)
    monkeypatch.setattr(loads, "LOADS", [loads.Load("6x16x31,7x16x31", ""), loads.Load("5x8x29,9x8x29", "")])
    shapes = "8x16x31,5x16x33,9x16x31"
    first_call.main(
        ["--providers", "ours,liger", "--shapes", shapes, "--random", "3", "--device", "cpu", "--out", str(tmp_path)]
        + ["--stories", "steps,again,tokens,heads"]
    )
    (path,) = tmp_path.rglob("first_call.csv")
    rows = rows_of(path)
    steps = [row["step"] for row in rows if (row["provider"], row["function"]) == ("ours", "loss")]
    assert steps == ["first", "second", "third", "another head"] + ["first", "second"] + [
        *("first", "N = 7", "N = 1", "3 random N"),
        *("6x16x31", "5x8x29"),
    ]
    assert all((row["seconds"] and row["compilations"] == "0") or row["provider"] == "liger" for row in rows)
    assert all(row["reason"] for row in rows if row["provider"] == "liger")
    assert "log_probs: seconds, compilations" in capsys.readouterr().out


def test_steps_of_a_head_with_lora_are_rows_with_their_errors(monkeypatch, tmp_path):
    monkeypatch.delitem(lora.PROVIDERS, "torch_compile")  # compiling takes seconds
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    lora.main(["--shapes", "37x24x131", "--ranks", "3", "--dtype", "float32", *quick])
    (path,) = tmp_path.rglob("lora.csv")
    rows = {row["provider"]: row for row in rows_of(path)}
    assert list(rows) == ["floor", *(ours := ["ours", "ours_merged"])]
    assert all(float(row["ms"]) > 0 and float(row["peak_MiB"]) > 0 for row in rows.values())
    for name in ours:
        assert all(float(rows[name][error]) < 1e-5 for error in ("err_loss", "err_dx", "err_da", "err_db"))


def test_two_checkouts_take_turns_in_every_round(tmp_path, monkeypatch):
    """With processes that answer at once: the other's step takes 2 ms in every round, this checkout's one of MS."""
    asked, MS = [], [3.0, 1.0, 4.0]

    class Answering:
        def __init__(self, checkout, device):
            self.own, self.left = checkout == overhead.REPOSITORY, iter(MS * 2)

        def ask(self, **request):
            asked.append((self.own, *request))
            if "ms" in request:
                return {"ms": next(self.left) if self.own else 2.0}
            failed = self.own and request.get("unit") and request["unit"].mode == "log_probs"
            return {"reason": "RuntimeError: no memory"} if failed else {}

        def close(self):
            asked.append((self.own, "closed"))

    monkeypatch.setattr(paired, "Process", Answering)
    quick = ["--device", "cpu", "--dtype", "float32", "--rounds", "3", "--processes", "0", "--out", str(tmp_path)]
    command = ["--against", str(tmp_path), "--against-commit", "abc", "--shapes", "37x24x131,8x8x16", *quick]
    rows = rows_of(paired.main(command))
    assert [(row["mode"], row["N"]) for row in rows] == [(m, n) for m in ("log_probs", "fwd_bwd") for n in ("37", "8")]
    for row in rows[2:]:
        assert (row["ms"], row["against_ms"], row["x_against"], row["spread"]) == ("3", "2", "1.5", "0.75")
        assert row["against"] == "abc" and not row["reason"]
    assert all(row["reason"] == "RuntimeError: no memory" and not row["ms"] for row in rows[:2])
    rounds = [own for own, *what in asked if what == ["ms"]]
    assert len(rounds) == 12 and all(sorted(rounds[k : k + 2]) == [False, True] for k in range(0, 12, 2))
    assert asked[-2:] == [(False, "closed"), (True, "closed")]
    before = len(asked)
    paired.main([*command, "--budget-s", "-1"])
    assert asked[before:] == [(False, "closed"), (True, "closed")]


def test_a_process_of_a_checkout_times_the_step_that_it_was_given(monkeypatch, capsys):
    unit = paired.Unit("log_probs", (16, 8, 40), dtype="float32")
    requests = [
        {"unit": unit, "seed": 1, "calls": 1},
        {"ms": 1.0},
        {},
        {"ms": 1.0},
        {"unit": unit._replace(mode="fwd_bwd", ignored=0.5), "seed": 1, "calls": 1},
        {"ms": 1.0},
    ]
    monkeypatch.setattr("sys.stdin", map(json.dumps, requests))
    monkeypatch.setattr("sys.path", list(sys.path))
    paired.serve(overhead.REPOSITORY, torch.device("cpu"))
    given, timed, freed, without, *last = map(json.loads, capsys.readouterr().out.splitlines())
    assert given == freed == last[0] == {} and timed["ms"] > 0 and last[1]["ms"] > 0
    assert "reason" in without  # no step is left to be timed


def test_the_pairs_of_two_checkouts_are_the_loads():
    chosen = paired.units_of(argparse.Namespace(modes="fwd_bwd,log_probs", shapes="", dtype="bfloat16", others=3))
    every = [unit for unit in loads.units() if "ours" in unit.providers.split(",")]
    assert [unit.mode for unit in chosen] == ["fwd_bwd"] * len(every) + ["log_probs"] * 3
    assert {(unit.shape, unit.ignored, unit.prior) for unit in chosen} == {
        (tuple(unit.shape), unit.ignored, unit.prior) for unit in every
    }
    assert str(chosen[1]) == "fwd_bwd 8192x4096x128256 (99% ignored)"


def test_steps_over_a_support_are_rows_beside_the_exact_step(tmp_path):
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    support.main(["--shapes", "37x24x131", "--mean", "6", "--dtype", "float32", *quick])
    (path,) = tmp_path.rglob("support.csv")
    rows = rows_of(path)
    kinds = ["", "ragged", "padded", "one in 16 without"]
    assert [(row["function"], row["support"]) for row in rows] == [
        (function, kind) for function in ("policy", "log_probs") for kind in kinds
    ]
    for row in rows:
        assert float(row["ms"]) > 0 and float(row["peak_MiB"]) > 0 and float(row["err_log_probs"]) < 1e-6
        assert float(row["x_exact"]) == 1.0 or row["support"]


def test_steps_with_the_option_are_rows_beside_those_without(tmp_path):
    quick = ["--device", "cpu", "--rounds", "2", "--ms", "1", "--out", str(tmp_path)]
    batch_invariant.main(["--shapes", "37x24x131", "--dtype", "float32", *quick])
    (path,) = tmp_path.rglob("batch_invariant.csv")
    rows = {row["step"]: row for row in rows_of(path)}
    assert len(rows) == 7
    for row in rows.values():
        assert float(row["ms"]) > 0 and row["before"] in ("", *rows) and not row["reason"]
        assert bool(row["x_before"]) == bool(row["before"])


def test_heads_are_as_far_from_float64_as_their_logits_are_rounded(tmp_path):
    float32_head.main(["--shapes", "40x64x501,8x16x101", "--device", "cpu", "--out", str(tmp_path)])
    (path,) = tmp_path.rglob("float32_head.csv")
    rows = rows_of(path)
    heads = {"bfloat16": 3, "float16": 3, "float32": 2}
    assert len(rows) == 2 * 2 * sum(heads.values()) and not any(row["reason"] for row in rows)
    for row in rows:
        error = float(row["error"])
        if row["head"] == "float32" or row["dtype"] == "float32":
            assert error < 2e-5
        elif row["head"] == "rounded":
            assert (2e-3 if row["dtype"] == "bfloat16" else 2e-4) < error < 0.5
        assert float(row["mean_error"]) <= error and bool(row["apart"]) == (row["head"] != "ours")
        assert bool(row["outside"]) == (row["head"] != "ours" and row["number"] == "log_probs")


def test_steps_over_shards_are_rows_and_the_option_gives_the_bits_of_one_rank(tmp_path):
    run_in_world(("cpu", 2), steps_over_shards, tmp_path)
    (path,) = tmp_path.rglob("batch_invariant_shards.csv")
    *steps, compared = rows_of(path)
    assert [row["step"] for row in steps if not row["before"]] == list(batch_invariant_shards.STEPS)
    for row in steps:
        assert float(row["ms"]) > 0 and not row["reason"] and row["ranks"] == "2"
        assert bool(row["x_before"]) == bool(row["before"])
    assert compared["differ"] == "0" and int(compared["numbers"]) > 6 * 30 and not compared["reason"]


def steps_over_shards(device, out):
    options = argparse.Namespace(toy=True, shapes="37x24x1024", rounds=2, ms=1.0, out=out, commit=None)
    batch_invariant_shards.run(options, torch.device(device))


def test_steps_of_given_logits_are_rows_with_their_errors(tmp_path, monkeypatch):
    """Each provider gets the original logits, even if another one overwrote them. Measuring peak memory takes steps,
    too.
    """

    def a_step(step, device):
        step()
        return 0.0

    monkeypatch.setattr(cross_entropy, "peak_of", a_step)
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    chosen = "ours,ours_in_place,torch_eager"
    cross_entropy.main(["--shapes", "16x501:float32", "--providers", chosen, *quick])
    (csv_path,) = tmp_path.rglob("cross_entropy.csv")
    copy, *steps = rows_of(csv_path)
    assert copy["provider"] == "copy" and [row["provider"] for row in steps] == chosen.split(",")
    assert all(float(row["err_grad"]) < 1e-6 and float(row["err_loss"]) < 1e-6 for row in steps)


def test_sums_over_micro_batches_are_rows_with_their_errors(tmp_path):
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    main_grad.main(["--shapes", "8x8x101", *quick])
    (path,) = tmp_path.rglob("main_grad.csv")
    rows = {row["provider"]: row for row in rows_of(path)}
    assert list(rows) == list(main_grad.PROVIDERS)
    assert all(float(row["err_dw"]) < 0.02 and float(row["peak_MiB"]) > 0 for row in rows.values())
    assert float(rows["main_grad"]["err_dw"]) < float(rows["autograd"]["err_dw"])


def test_every_objective_is_a_row_of_one_run_and_the_tables_are_made_of_its_csv(tmp_path, capsys, monkeypatch):
    """This package is measured beside bare GEMMs. A library that is not installed gives a reason, and no line in a
    table.
    """
    named = ("fwd_bwd", "none", "policy", "softcap_smoothing", "metrics", "kl_forward")
    monkeypatch.setattr(objectives, "LINES", [line for line in objectives.LINES if line[0] in named])
    quick = ["--shapes", "24x16x101", "--rounds", "1", "--ms", "1", "--processes", "0", "--device", "cpu"]
    chosen = "floor,ours,verl"
    rows = rows_of(objectives.main([*quick, "--providers", chosen, "--out", str(tmp_path)]))
    assert len(rows) == len(objectives.units_of(chosen)) == 6 + 2 + 2 + 3
    for row in rows:
        if row["provider"] == "verl":
            assert row["reason"] and not row["ms"]
        elif row["provider"] == "ours":
            of_four = row["mode"].startswith("kl")
            floor = next(r for r in rows if r["provider"] == "floor" and r["mode"].startswith("kl") == of_four)
            assert float(row["x_floor"]) == pytest.approx(float(row["ms"]) / float(floor["ms"]), rel=1e-4)
            half = row["dtype"] == "float16"
            assert float(row["err_loss"]) < 5e-3 and float(row["err_dx"]) < (2e-3 if half else 6e-2)
    table = capsys.readouterr().out
    assert "\nfloor " in table and "\nours " in table


def test_errors_of_objectives_stand_beside_plain_torchs(tmp_path, monkeypatch):
    monkeypatch.delitem(objective_errors.PATHS, "compiled")
    quick = ["--device", "cpu", "--processes", "0", "--shape", "40x16x501", "--out", str(tmp_path)]
    rows = rows_of(objective_errors.main(quick))
    names = list(dict.fromkeys(row["objective"] for row in rows))
    assert len(names) == 21 + 6 and len(rows) == 21 * (3 + 1) + 6 * 3
    for row in rows:
        # the probability outside 64 classes of 501 is a difference of close numbers: docs/log_probs.md
        numbers = ["err_value"] if "tail" in row["objective"] else ["err_value", "err_dx", "err_dw"]
        for name in numbers:
            if row[name]:
                ours, plain = float(row[name]), float(row[name.replace("err", "torch")])
                assert ours <= (1e-3 if "tail" in row["objective"] else 1e-7) + 3 * plain, row
    table = error_tables.table(rows)
    assert len(table.splitlines()) == 2 + 21 + 6 and "| divergence, jsd, of probabilities | " in table
