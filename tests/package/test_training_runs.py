"""benchmarks.training at toy size on a CPU: what differs between runs, what is counted and written, which failures it
survives.
"""

import csv
import multiprocessing
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import training, training_plot
from benchmarks.entries import entries_kept
from benchmarks.llama import Llama, LlamaSize
from benchmarks.tables import training as tables
from benchmarks.training_run import SETTINGS, Run, Trainee, held_out_losses, mean_of, rarity_of
from flce_ops.math.sparse_gradient import Draws, SparseGradient, keep_entries

CPU = torch.device("cpu")
SIZE = LlamaSize(dim=32, depth=1, heads=1, hidden=64, vocab=400, context=16, sequences=4)
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
TINY = [
    "--vocabulary",
    "400",
    "--hidden",
    "32",
    "--layers",
    "1",
    "--context",
    "16",
    "--sequences",
    "4",
    "--steps",
    "40",
]
TINY += ["--evaluate", "20", "--held-out", "500", "--operand-rows", "64", "--rate", "1e-2", "--device", "cpu", "--text"]
TINY += [str(STANDARD_LIBRARY / package) for package in ("asyncio", "email", "json")]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_settings_differ_in_the_heads_gradient_alone():
    torch.manual_seed(0)
    # with so many classes, an untrained model's probabilities are below every threshold
    size = SIZE._replace(vocab=8000)
    model = Llama(size, fused_head=True)
    tokens, target = torch.randint(size.vocab, (2, 4, 16))
    losses, gradients = {}, {}
    for name in (*SETTINGS, "unbiased_8"):
        if name == "cce":
            continue  # needs a GPU
        trainee = Trainee(model, name, torch.tensor(len(losses)))
        model.zero_grad()
        loss = trainee(tokens, target)
        loss.backward()
        losses[name] = loss.item()
        gradients.setdefault(name, []).append(model.head.weight.grad.clone())
    assert len(set(losses.values())) == 1
    exact = gradients["exact"][0]
    off = {name: (found[0] - exact).norm() / exact.norm() for name, found in gradients.items()}
    assert 0 == off["exact"] < off["unbiased_12"] < off["unbiased_10"] < off["unbiased_8"]
    assert not torch.equal(*gradients["unbiased_8"])  # with another seed
    # a trainee draws new random numbers in every step
    trainee = Trainee(model, "unbiased_8", torch.tensor(0))
    first, second = (torch.autograd.grad(trainee(tokens, target), model.head.weight)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_rare_classes_are_those_of_the_rarest_tenth_of_the_training_tokens():
    counts = torch.tensor([905, 0, 85, 10])
    tokens = torch.arange(4, dtype=torch.int32).repeat_interleave(counts)[torch.randperm(1000)]
    rarity = rarity_of(tokens, 4)
    assert rarity.counts.tolist() == counts.tolist()
    assert rarity.rare.tolist() == [False, True, True, True] and rarity.rarest.tolist() == [False, True, False, True]
    groups = dict(rarity.groups())
    assert sum(classes.int() for classes in groups.values()).tolist() == [1, 1, 1, 1]
    assert groups[10].tolist() == [False, False, True, True] and groups[0].tolist() == [False, True, False, False]
    losses, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3])
    assert mean_of(losses, rarity.rare[targets]) == 3.0 and mean_of(losses, groups[0][targets]) is None


def test_held_out_losses_are_those_of_whole_sequences_side_by_side():
    torch.manual_seed(0)
    model = Llama(SIZE, fused_head=True)
    tokens = torch.randint(SIZE.vocab, (200,), dtype=torch.int32)
    losses, targets = held_out_losses(model, tokens, SIZE, most=100)
    assert torch.equal(targets, tokens[1:97].long())  # six sequences of sixteen
    read = tokens[:96].long().view(6, 16)
    logits = model.hidden_states(read).flatten(0, 1) @ model.head.weight.T
    torch.testing.assert_close(
        losses, torch.nn.functional.cross_entropy(logits, targets, reduction="none"), rtol=0.02, atol=0.02
    )


def test_the_entries_that_are_counted_are_those_that_are_kept():
    n, d, v = 100, 16, 5000
    x, w, y = torch.randn(n, d), torch.randn(v, d), torch.randint(v, (n,))
    g = (x @ w.T).softmax(-1)
    g[torch.arange(n), y] -= 1
    sparse = SparseGradient(2.0**-8, "unbiased", torch.tensor(1))
    keep_entries(g, torch.ones(n), sparse, Draws(torch.arange(n)))
    # a tile of 2048 classes keeps its expected number, rounded up or down
    assert entries_kept(x, w, y, 2.0**-8) == pytest.approx((g != 0).sum().item() / n, abs=0.5)


def in_process(chosen, device, deadline):
    lines = []
    training.serve(chosen, device, 60.0, SimpleNamespace(send=lines.append))
    *points, end = lines
    return (points, {}, end["reason"]) if "reason" in end else (points, end, "")


def test_runs_of_one_seed_start_alike_and_one_that_fails_is_a_row_with_a_reason(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    monkeypatch.setattr(training, "take", in_process)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    options = ["--out", str(tmp_path), "--operands", str(tmp_path), "--settings", "exact,unbiased_10,cce"]
    path = training.main([*options, "--seeds", "0,1", *TINY])
    runs = rows_of(path)
    assert [(row["setting"], row["seed"]) for row in runs] == [
        (setting, seed) for seed in "01" for setting in ("exact", "unbiased_10", "cce")
    ]
    curves, counts = (rows_of(path.with_name(f"training_{name}.csv")) for name in ("curves", "counts"))
    for row in runs:
        of_run = [point for point in curves if (point["setting"], point["seed"]) == (row["setting"], row["seed"])]
        if row["setting"] == "cce":
            assert "cut_cross_entropy" in row["reason"] and not row["held_out_loss"]
            assert [point["step"] for point in of_run] == ["0"]
            continue
        assert row["steps"] == "40" and not row["reason"]
        assert [point["step"] for point in of_run] == ["0", "20", "40"]
        assert float(row["held_out_loss"]) < float(of_run[0]["held_out_loss"]) - 0.3
        assert of_run[-1]["held_out_loss"] == row["held_out_loss"] < row["rare_loss"]
        groups = [group for group in counts if (group["setting"], group["seed"]) == (row["setting"], row["seed"])]
        assert sum(int(group["classes"]) for group in groups) == 400
        mean = sum(float(group["held_out_loss"]) * int(group["tokens"]) for group in groups if int(group["tokens"]))
        assert mean / sum(int(group["tokens"]) for group in groups) == pytest.approx(
            float(row["held_out_loss"]), rel=1e-4
        )
    monkeypatch.setattr(training, "take", lambda chosen, *_: ([], {}, "again"))
    training.main([*options, "--seeds", "0,1", *TINY, "--resume"])
    assert [row["reason"] for row in rows_of(path)] == [""] * 4 + ["again"] * 2  # runs that had succeeded are kept
    at_start = [point["held_out_loss"] for point in curves if point["step"] == "0"]
    assert len(set(at_start[:3])) == len(set(at_start[3:])) == 1 and len(set(at_start)) == 2
    assert {"initial.safetensors", "trained.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    assert "exact, seed 0: held-out loss" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert training_plot.main([str(path)]).stat().st_size > 10_000


def test_a_process_that_dies_and_a_budget_that_is_spent_are_reasons(monkeypatch):
    chosen = Run("exact", 0, Path("tokens"), SIZE, 1, 1e-3, 1, 1, False, None, 1)
    assert training.take(chosen, CPU, time.monotonic()) == ([], {}, "time budget spent")
    # this function takes no arguments, so the call fails
    monkeypatch.setattr(training, "serve", multiprocessing.process.current_process)
    assert training.take(chosen, CPU, time.monotonic() + 600) == ([], {}, "its process ended with 1")


def test_every_setting_of_the_pages_ran_to_its_end():
    runs = tables.finished("training")
    assert {row["setting"] for row in runs} >= {"exact", "unbiased_12", "unbiased_10", "unbiased_8", "cce"}
    assert min(int(row["steps"]) for row in runs) >= 1000


def test_an_unknown_setting_is_refused(capsys):
    with pytest.raises(SystemExit):
        training.main(["--settings", "exact,biased"])
    assert "got biased" in capsys.readouterr().err
