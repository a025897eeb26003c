"""The demo at toy size: what `make demo` promises, in seconds."""

import pytest
import torch

pytest.importorskip("matplotlib")

from examples import report
from examples.gpt import operator_head, plain_head
from examples.train_gpt import HEADS, Setting, main

TOY = Setting(300, 16, 1, 2, context=12, batch=3, steps=6, workspace=16 << 10, tolerance=1e-3)


def run_toy(out, heads=HEADS) -> int:
    return main(TOY, torch.device("cpu"), out, backend="aot_eager", heads=heads)


def test_demo_writes_plot_and_tables_of_two_equal_curves(tmp_path, capsys):
    assert run_toy(tmp_path) == 0
    losses = report.read_csv(tmp_path / report.LOSS_CSV)
    assert len(losses) == TOY.steps
    for row in losses:
        ours, theirs = (float(row[name]) for name in HEADS)
        assert abs(ours - theirs) < 1e-4
    ours, theirs = (float(row["temporary_MiB"]) for row in report.read_csv(tmp_path / report.HEADS_CSV))
    assert 0 < ours < theirs
    assert (tmp_path / report.PLOT).stat().st_size > 10_000
    assert "OK: one graph with torch.ops.flce.linear_cross_entropy" in capsys.readouterr().out


def test_demo_fails_when_the_curves_differ(tmp_path, capsys):
    doubled = {"operator": operator_head, "plain": lambda *tensors: 2 * plain_head(*tensors)}
    assert run_toy(tmp_path, doubled) == 1
    assert "the loss curves are" in capsys.readouterr().err


def test_demo_fails_when_the_graph_lacks_the_operator(tmp_path, capsys):
    assert run_toy(tmp_path, {"operator": plain_head, "plain": plain_head}) == 1
    assert "expected one graph with torch.ops.flce.linear_cross_entropy" in capsys.readouterr().err
