"""The benchmark's own rules, at toy size on a CPU: what it writes, which failures it survives, what it measures."""

import csv
import functools
import math

import pytest
import torch
from toy_problem import CPU, TOY, dense_entropy, dense_losses, make_toy, rows_of, run_toy

from benchmarks import (
    kl_div,
    loads,
    plot,
    providers,
    run,
    soft,
)
from benchmarks.__main__ import main
from benchmarks.data import IGNORE_INDEX, is_usual, make_problem
from benchmarks.errors import errors_of, make_reference
from benchmarks.memory import MIB, peak_bytes
from benchmarks.modes import MODES, prepare, step_of
from benchmarks.providers.torch_dense import dense_loss
from benchmarks.shapes import GROUPS, Shape, parse_shapes
from flce_ops import last_path

pytestmark = pytest.mark.usefixtures("quick_collections")


def test_every_mark_is_of_a_load_that_the_run_measures(tmp_path, monkeypatch):
    """With times that are all 2 ms. Every mark must refer to rows that the run makes."""
    rows = []
    for unit in loads.units():
        for name in providers.choose(unit.providers):
            sizes = {key: str(value) for key, value in unit.shape._asdict().items()}
            numbers = {"ms": "2", "x_floor": "1", "err_dw": "1e-3", "host_us": "900", "host_one_thread_us": "700"}
            where = {"ignored": str(unit.ignored), "prior": unit.prior, "mode": unit.mode, "provider": name}
            rows.append({**sizes, **numbers, **where})
    marks = loads.tables(rows)[2 : 2 + len(loads.MARKS)]
    late = [mark for mark in marks if "launch to return" in mark]
    assert not any("not measured" in mark for mark in marks)
    assert [mark for mark in marks if "missed" in mark] == late and all("| 0.90 **missed** |" in mark for mark in late)
    line, row = loads.hosts(loads.Times(rows))[2:4]
    assert line.startswith("| 2048x512x32000 | 0.90 | 0.90 |")
    assert row.startswith("| 2048x512x32000, autograd in this thread | 0.70 |")
    assert all("not measured" in mark for mark in loads.tables(rows[:0])[2 : 2 + len(loads.MARKS)])


def test_loads_go_through_the_command_with_their_own_share_and_prior(tmp_path, monkeypatch, capsys):
    model = tmp_path / "trained.safetensors"
    pytest.importorskip("safetensors.torch").save_file(
        {"input": torch.randn(8, 4), "linear_weight": torch.randn(9, 4), "target": torch.arange(8)}, model
    )
    toy = (loads.Load("24x16x40", "floor,ours", 0.5), loads.Load("24x16x40", "ours,torch_eager", prior="ordered"))
    monkeypatch.setattr(loads, "LOADS", toy)
    argv = ["--loads", "--rounds", "1", "--ms", "1", "--dtype", "float32", "--device", "cpu", "--out", str(tmp_path)]
    found = [(row["provider"], row["ignored"], row["prior"]) for row in rows_of(main([*argv, "--without", "floor"]))]
    toys = [("ours", "0.5", "shuffled"), ("ours", "0.02", "ordered"), ("torch_eager", "0.02", "ordered")]
    assert found == toys and "| 24x16x40, ordered prior |" in capsys.readouterr().out
    found = rows_of(main([*argv, "--without", "floor,torch_compile,liger,cce,quack*", "--data", f"trained:{model}"]))
    assert [(row["provider"], row["ignored"], row["prior"]) for row in found] == [("ours", "0.02", "trained"), *toys]
    assert "| 8x4x9, operands of a trained model |" in capsys.readouterr().out


def test_the_command_writes_a_row_per_shape_mode_and_provider_and_plots_come_from_it(tmp_path):
    argv = [
        "--shapes",
        "24x16x40,40x16x40,64x16x40",
        "--modes",
        "fwd_bwd,none",
        "--providers",
        "floor,ours,torch_eager,cce",
    ]
    argv += ["--rounds", "1", "--ms", "1", "--dtype", "float32", "--device", "cpu", "--out", str(tmp_path)]
    path = main(argv)
    rows = rows_of(path)

    assert len(rows) == 3 * 2 * 4
    for row in rows:
        if row["provider"] == "cce":
            assert row["reason"] == "needs a GPU" and row["ms"] == ""
            continue
        assert float(row["ms"]) > 0 and float(row["x_floor"]) > 0 and float(row["peak_MiB"]) > 0
        assert row["reason"] == ""
        if row["provider"] != "floor":
            assert max(float(row["err_loss"]), float(row["err_dx"]), float(row["err_dw"])) < 1e-5

    pytest.importorskip("matplotlib")
    pictures = plot.main([str(path)])
    assert {picture.name for picture in pictures} >= {"run_time_fwd_bwd.png", "run_memory_none.png", "run_sweep_N.png"}
    assert all(picture.stat().st_size > 1000 for picture in pictures)


def test_shares_of_ignored_tokens_are_rows_of_their_own_and_the_floor_is_the_valid_tokens(tmp_path, capsys):
    providers = ["--providers", "floor,ours,ours_compacted"]
    rows = run_toy(tmp_path, "--shapes", "toy", "--ignored", "0,0.5,0.9", *providers)
    shapes, shares = GROUPS["toy"], ("0", "0.5", "0.9")
    units = [(mode, str(shape.N), share) for mode in ("fwd_bwd", "none") for shape in shapes for share in shares]
    assert [(row["mode"], row["N"], row["ignored"]) for row in rows[::3]] == units
    for floor, ours, compacted in zip(rows[::3], rows[1::3], rows[2::3]):
        assert (compacted["reason"] == "few tokens are ignored") == (floor["ignored"] == "0")
        for row in (ours, compacted):
            if row["ms"]:
                assert max(float(row["err_loss"]), float(row["err_dx"]), float(row["err_dw"])) < 1e-5
    flop = [float(row["tflops"]) * float(row["ms"]) for row in rows[: 3 * len(shares) : 3]]
    assert flop[1] < 0.7 * flop[0] and flop[2] < 0.3 * flop[0]
    assert "fwd_bwd 64x32x501 (90% ignored)" in capsys.readouterr().out


def test_the_floor_multiplies_the_valid_rows_filled_up_to_a_multiple_of_eight(monkeypatch):
    problem = make_problem(Shape(252, 32, 507), dtype=torch.float32, device=CPU, seed=0, ignored=0.5)
    prepare(problem, MODES["fwd_bwd"])
    step, shapes, mm = providers.provide("floor", problem, MODES["fwd_bwd"]), [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.append((a.shape, b.shape)) or mm(a, b))
    step()
    valid = int(problem.valid.sum())
    rows = -(-valid // 8) * 8
    assert 0 < valid < 252 and shapes == [((rows, 32), (32, 507)), ((rows, 507), (507, 32)), ((507, rows), (rows, 32))]


def test_an_ordered_prior_falls_with_the_token_id_and_is_a_column(tmp_path):
    for prior in ("shuffled", "ordered"):
        problem = make_problem(Shape(2000, 64, 3001), dtype=torch.float32, device=CPU, seed=1, prior=prior)
        assert ((problem.target[problem.valid] < 300).float().mean() > 0.5) == (prior == "ordered")
    rows = run_toy(tmp_path, "--shapes", "24x16x40", "--providers", "ours", "--prior", "ordered")
    assert {row["prior"] for row in rows} == {"ordered"} and {row["ignored"] for row in rows} == {"0.02"}


def test_figures_of_other_data_have_names_of_their_own_and_older_csvs_are_of_the_default(tmp_path):
    pytest.importorskip("matplotlib")
    rows = run_toy(tmp_path, "--shapes", "24x16x40", "--ignored", "0.02,0.5", "--providers", "floor,ours")
    (path,) = tmp_path.glob("*/run.csv")
    names = {picture.name for picture in plot.main([str(path)])}
    assert {"run_time_fwd_bwd.png", "run_time_fwd_bwd_50%.png"} <= names
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [name for name in rows[0] if name not in ("ignored", "prior")], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(rows[:2])
    assert {point.data for point in plot.read(path)[0]} == {(0.02, "shuffled")}
    old, new = rows_of(path), rows
    assert [is_usual(row) for row in (*old, *new[:4])] == [True, True, True, True, False, False]


def test_a_share_is_below_one():
    with pytest.raises(SystemExit):
        main(["--ignored", "0.5,1"])


def test_a_spent_budget_starts_nothing_and_says_what_was_left_out(tmp_path, capsys):
    path = main(["--shapes", "toy", "--modes", "fwd", "--device", "cpu", "--budget-s", "0", "--out", str(tmp_path)])
    assert "left out: fwd 64x32x501, fwd 252x123x507" in capsys.readouterr().out
    assert not path.exists()


def test_a_provider_that_raises_is_a_reason_and_the_others_go_on(monkeypatch):
    ours = providers.provide

    def provide(name, problem, mode):
        if name == "liger":
            raise RuntimeError("no such kernel\nand a long trace")
        step = ours(name, problem, mode)
        if name != "torch_compile":
            return step

        def without_gradient():
            loss = step()
            problem.input.grad = None
            return loss

        return without_gradient

    monkeypatch.setattr(providers, "provide", provide)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    settings = run.Settings(CPU, torch.float32, rounds=1, ms=1, seed=0)
    names = ["floor", "liger", "torch_compile", "torch_eager"]
    here = run.Environment("cpu", "", "", "")
    rows = run.measure(TOY, MODES["fwd_bwd"], names, settings, here, out_of_time=lambda: False)
    floor, liger, gradientless, eager = rows
    assert liger.reason == "RuntimeError: no such kernel" and liger.ms is None
    assert "missing" in gradientless.reason and gradientless.ms is None
    assert eager.ms is not None and eager.x_floor == pytest.approx(eager.ms / floor.ms)


def dense_in_its_own_dtype(mode, input, linear_weight, target, reduction):
    if reduction != "log_probs":
        return dense_of_logits(input @ linear_weight.T, target, reduction, **mode.options)
    valid = target != IGNORE_INDEX
    return -dense_losses(input, linear_weight, target), dense_entropy(input, linear_weight).where(valid, 0)


def dense_of_logits(z, target, reduction, softcap=None, label_smoothing=0.0, z_loss=0.0, return_metrics=()):
    z = softcap * torch.tanh(z / softcap) if softcap else z
    loss = torch.nn.functional.cross_entropy(z, target, reduction=reduction, label_smoothing=label_smoothing)
    return loss + z_loss * z.logsumexp(-1)[target != IGNORE_INDEX].square().mean() if z_loss else loss


def dense_soft(problem, input, linear_weight, target, reduction):
    (classes, weight), valid = soft.targets_of(problem), target != IGNORE_INDEX
    log_p = (input @ linear_weight.T).log_softmax(-1).gather(1, classes.clamp(min=0))
    return -(weight * log_p)[valid].sum() / valid.sum()


def dense_divergence(problem, kind):
    """By F.kl_div, with a teacher in float64."""
    teacher, weight = (part.double() for part in kl_div.teacher_of(problem))
    log_p = (teacher @ weight.T).log_softmax(-1)

    def kl(log_a, log_b):
        return torch.nn.functional.kl_div(log_b, log_a, log_target=True, reduction="batchmean")

    def loss(input, linear_weight, target, reduction):
        log_q = (input @ linear_weight.T).log_softmax(-1)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        halves = (kl(log_p, log_m) + kl(log_q, log_m)) / 2
        accepted = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        divergences = {"forward": kl(log_p, log_q), "reverse": kl(log_q, log_p), "jsd": halves}
        return (divergences | {"tv": (1 - accepted).mean(), "nla": -accepted.log().mean()})[kind]

    return loss


def test_the_reference_agrees_with_dense_torch_in_float64():
    for mode in MODES.values():
        problem = make_toy(mode.name)
        reference = make_reference(problem, mode)
        problem.input.data, problem.linear_weight.data = problem.input.double(), problem.linear_weight.double()
        prepare(problem, mode)
        dense = functools.partial(dense_in_its_own_dtype, mode)
        if mode.name == "soft64":
            dense = functools.partial(dense_soft, problem)
        if mode.kind:
            dense = dense_divergence(problem, mode.kind)
        step_loss = step_of(dense, problem, mode)()
        torch.testing.assert_close(reference.loss, step_loss)
        if mode.input_grad:
            torch.testing.assert_close(reference.grad_input, problem.input.grad)
        if mode.weight_grad:
            torch.testing.assert_close(reference.grad_weight, problem.linear_weight.grad)


def test_a_policys_loss_is_one_call_of_ours_and_a_formula_on_the_losses_of_others():
    problem, mode = make_toy("policy"), MODES["policy"]
    reference = make_reference(problem, mode)
    one_call, per_token = "linear_policy_loss_with_grad", "linear_cross_entropy_backward"
    operators = {"ours": one_call, "ours_recompute": per_token, "ours_64MiB": one_call, "torch_eager": one_call}
    for name, operator in operators.items():
        assert max(errors_of(providers.provide(name, problem, mode)(), problem, reference)) < 1e-5
        assert last_path().op == operator  # the last call of this package
    with pytest.raises(providers.Unavailable):
        providers.provide("ours_compacted", problem, mode)


def test_targets_follow_the_model_so_that_the_loss_is_its_entropy():
    problem = make_problem(Shape(2000, 64, 3001), dtype=torch.float32, device=CPU, seed=1)
    log_p = (problem.input @ problem.linear_weight.T).log_softmax(-1)
    valid = problem.target != IGNORE_INDEX
    entropy = -(log_p.exp() * log_p).sum(-1)[valid].mean()
    loss = torch.nn.functional.cross_entropy(problem.input @ problem.linear_weight.T, problem.target)
    assert loss.item() == pytest.approx(entropy.item(), rel=0.1)
    assert 0.005 < 1 - valid.float().mean().item() < 0.04


def test_peak_memory_counts_the_logits_of_the_dense_pair():
    problem = make_problem(Shape(512, 16, 4096), dtype=torch.float32, device=CPU, seed=0)
    prepare(problem, MODES["fwd"])
    logits = 512 * 4096 * 4
    peak = peak_bytes(step_of(dense_loss, problem, MODES["fwd"]), problem)
    assert logits <= peak <= 3 * logits + MIB


def test_shapes_and_providers_are_chosen_by_name_group_or_pattern():
    assert parse_shapes("toy,8x16x32,toy") == [*GROUPS["toy"], Shape(8, 16, 32)]
    with pytest.raises(ValueError, match="expected NxDxV"):
        parse_shapes("8x16")
    assert {Shape(12288, 1536, 50257), Shape(2048, 512, 32000)} <= set(parse_shapes("odd,small,masked"))
    assert providers.choose("liger*,floor", without="*fp32,*_cu*") == ["floor", "liger"]
    with pytest.raises(ValueError, match="expected one of"):
        providers.choose("tiger")


def test_the_group_small_has_few_tokens_at_three_heads():
    heads, tokens = ((4096, 151936), (2048, 128256), (512, 32000)), (128, 256, 1024, 2048)
    assert {Shape(n, *head) for head in heads for n in tokens} <= set(GROUPS["small"])
    assert {shape.D for shape in GROUPS["narrow"]} == {512}


def test_the_reference_is_in_float64_whatever_the_inputs_are():
    for dtype in (torch.bfloat16, torch.float32):
        problem = make_toy(dtype=dtype)
        assert {part.dtype for part in make_reference(problem, MODES["fwd_bwd"])} == {torch.float64}
