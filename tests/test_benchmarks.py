"""The benchmark's own rules, at toy size on a CPU: what it writes, what it survives, what it measures."""

import csv
import functools
import gc
import importlib
import math
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import (
    corpus,
    cross_entropy,
    host_step,
    kl_div,
    loads,
    lora,
    main_grad,
    objective_errors,
    objectives,
    overhead,
    plot,
    providers,
    run,
    soft,
    trained,
)
from benchmarks.__main__ import main
from benchmarks.data import IGNORE_INDEX, is_usual, load_problem, make_problem, shape_of
from benchmarks.errors import errors_of, make_reference
from benchmarks.memory import MIB, peak_bytes
from benchmarks.modes import MODES, prepare, step_of
from benchmarks.providers.torch_dense import dense_loss
from benchmarks.shapes import GROUPS, Shape, parse_shapes
from flce_ops import last_path

CPU = torch.device("cpu")
TOY = Shape(60, 33, 501)  # N tokens, D hidden, V vocabulary
FIGURE = {"device": "cpu", "shape": (8, 8, 16), "dtype": "float32", "calls": 9}


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Each row starts with a gc.collect(), which costs a quarter of a second where earlier tests have left a heap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_toy(mode="fwd_bwd", dtype=torch.float32):
    problem = make_problem(TOY, dtype=dtype, device=CPU, seed=0)
    prepare(problem, MODES[mode])
    return problem


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_mark_is_of_a_load_that_the_run_measures(tmp_path, monkeypatch):
    """Of times that are all 2 ms: no mark may look for a row that no unit makes."""
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
    toy = (loads.Load("24x16x40", "floor,ours", 0.5), loads.Load("24x16x40", "ours,torch_eager", prior="ordered"))
    monkeypatch.setattr(loads, "LOADS", toy)
    argv = ["--loads", "--rounds", "1", "--ms", "1", "--dtype", "float32", "--device", "cpu", "--out", str(tmp_path)]
    found = [(row["provider"], row["ignored"], row["prior"]) for row in rows_of(main([*argv, "--without", "floor"]))]
    assert found == [("ours", "0.5", "shuffled"), ("ours", "0.02", "ordered"), ("torch_eager", "0.02", "ordered")]
    assert "| 24x16x40, ordered prior |" in capsys.readouterr().out


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


def run_toy(tmp_path, *options):
    argv = ["--modes", "fwd_bwd,none", "--rounds", "1", "--ms", "1", "--dtype", "float32", "--device", "cpu"]
    return rows_of(main([*argv, "--seed", "3", "--out", str(tmp_path), *options]))


def test_shares_of_ignored_tokens_are_rows_of_their_own_and_the_floor_is_the_kept_tokens(tmp_path, capsys):
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


def test_the_floor_multiplies_the_kept_rows_filled_up_to_a_multiple_of_eight(monkeypatch):
    problem = make_problem(Shape(252, 32, 507), dtype=torch.float32, device=CPU, seed=0, ignored=0.5)
    prepare(problem, MODES["fwd_bwd"])
    step, shapes, mm = providers.provide("floor", problem, MODES["fwd_bwd"]), [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.append((a.shape, b.shape)) or mm(a, b))
    step()
    kept = int(problem.kept.sum())
    rows = -(-kept // 8) * 8
    assert 0 < kept < 252 and shapes == [((rows, 32), (32, 507)), ((rows, 507), (507, 32)), ((507, rows), (rows, 32))]


def test_an_ordered_prior_falls_with_the_token_id_and_is_a_column(tmp_path):
    for prior in ("shuffled", "ordered"):
        problem = make_problem(Shape(2000, 64, 3001), dtype=torch.float32, device=CPU, seed=1, prior=prior)
        assert ((problem.target[problem.kept] < 300).float().mean() > 0.5) == (prior == "ordered")
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
    kept = target != IGNORE_INDEX
    return -dense_losses(input, linear_weight, target), dense_entropy(input, linear_weight).where(kept, 0)


def dense_of_logits(z, target, reduction, softcap=None, label_smoothing=0.0, z_loss=0.0, return_metrics=()):
    z = softcap * torch.tanh(z / softcap) if softcap else z
    loss = torch.nn.functional.cross_entropy(z, target, reduction=reduction, label_smoothing=label_smoothing)
    return loss + z_loss * z.logsumexp(-1)[target != IGNORE_INDEX].square().mean() if z_loss else loss


def dense_soft(problem, input, linear_weight, target, reduction):
    (classes, weight), kept = soft.targets_of(problem), target != IGNORE_INDEX
    log_p = (input @ linear_weight.T).log_softmax(-1).gather(1, classes.clamp(min=0))
    return -(weight * log_p)[kept].sum() / kept.sum()


def dense_divergence(problem, kind):
    """By F.kl_div, of a teacher in float64."""
    teacher, weight = (part.double() for part in kl_div.teacher_of(problem))
    log_p = (teacher @ weight.T).log_softmax(-1)

    def kl(log_a, log_b):
        return torch.nn.functional.kl_div(log_b, log_a, log_target=True, reduction="batchmean")

    def loss(input, linear_weight, target, reduction):
        log_q = (input @ linear_weight.T).log_softmax(-1)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        halves = (kl(log_p, log_m) + kl(log_q, log_m)) / 2
        return {"forward": kl(log_p, log_q), "reverse": kl(log_q, log_p), "jsd": halves}[kind]

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
        assert last_path().op == operator  # the last of ours
    with pytest.raises(providers.Unavailable):
        providers.provide("ours_compacted", problem, mode)


def test_targets_follow_the_model_so_that_the_loss_is_its_entropy():
    problem = make_problem(Shape(2000, 64, 3001), dtype=torch.float32, device=CPU, seed=1)
    log_p = (problem.input @ problem.linear_weight.T).log_softmax(-1)
    kept = problem.target != IGNORE_INDEX
    entropy = -(log_p.exp() * log_p).sum(-1)[kept].mean()
    loss = torch.nn.functional.cross_entropy(problem.input @ problem.linear_weight.T, problem.target)
    assert loss.item() == pytest.approx(entropy.item(), rel=0.1)
    assert 0.005 < 1 - kept.float().mean().item() < 0.04


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


# ---------------------------------------------------------------- a trained model's operands


STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
TINY = ["--vocabulary", "400", "--hidden", "32", "--layers", "1", "--context", "32", "--sequences", "8"]
TINY += ["--tokens", "100", "--steps", "20", "--rate", "1e-2", "--device", "cpu", "--text"]
TINY += [str(STANDARD_LIBRARY / package) for package in ("asyncio", "email", "json")]


@pytest.fixture(scope="module")
def trained_file(tmp_path_factory):
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    return trained.main([str(tmp_path_factory.mktemp("trained") / "tiny.safetensors"), *TINY])


def test_a_trained_models_operands_are_data_of_their_own(trained_file, tmp_path, capsys):
    providers = ["--providers", "floor,ours,torch_eager", "--ignored", "0.02,0.5"]
    rows = run_toy(tmp_path, "--data", f"trained:{trained_file}", *providers)
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert (row["N"], row["D"], row["V"], row["prior"], row["reason"]) == ("100", "32", "400", "trained", "")
        assert not is_usual(row)
        # Twenty steps on the prior are enough to be below the log of the vocabulary.
        assert 3 < float(row["loss"]) < torch.tensor(400.0).log()
        if row["provider"] != "floor":
            assert max(float(row["err_loss"]), float(row["err_dx"]), float(row["err_dw"])) < 1e-5
    assert "100x32x400" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    (path,) = tmp_path.glob("*/run.csv")
    assert "run_time_fwd_bwd_trained.png" in {picture.name for picture in plot.main([str(path)])}


def test_a_trained_models_file_says_what_it_is_and_the_same_seed_and_steps_make_it_again(trained_file, tmp_path):
    from safetensors import safe_open

    again = trained.main([str(tmp_path / "again.safetensors"), *TINY])
    assert shape_of(again) == Shape(100, 32, 400)
    first, second = (load_problem(path, dtype=torch.bfloat16, device=CPU, seed=0) for path in (trained_file, again))
    assert torch.equal(first.input, second.input) and torch.equal(first.linear_weight, second.linear_weight)
    assert torch.equal(first.target, second.target) and (first.target == IGNORE_INDEX).sum() > 0
    with safe_open(again, framework="pt") as file:
        assert file.get_tensor("target").min() >= 0 and file.get_tensor("input").dtype == torch.bfloat16
        assert {"steps", "seed", "held_out_loss", "commit"} <= set(trained.facts_of(again))


def test_training_text_is_cut_where_it_is_one_file_and_counts_once(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.py").write_text(f"number = {i // 2}\n")  # each twice
    (folder / "picture.png").write_bytes(b"no text")
    single = tmp_path / "single"
    single.write_bytes(bytes(range(97, 123)) * 10_000)
    documents = list(corpus.documents_of([folder, single], {".py"}))
    assert len(documents) == 60 + 4 and sum(len(d.read()) for d in documents if d.path == single) == 260_000
    found = corpus.read_corpus(documents, most_bytes=10**6, seed=0)
    texts = [*found.training, *found.held_out]
    assert len(texts) == len(set(texts)) == 30 + 4 and len(found.held_out) == 1
    assert found == corpus.read_corpus(documents, most_bytes=10**6, seed=0)
    assert found != corpus.read_corpus(documents, most_bytes=10**6, seed=1)
    with pytest.raises(ValueError, match="expected a file or a folder"):
        list(corpus.documents_of([tmp_path / "nothing"], {".py"}))


def test_too_little_text_for_the_vocabulary_is_said(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "short.txt").write_text("a short text " * 3)
    with pytest.raises(ValueError, match="expected 400 tokens, the text gave"):
        trained.main([str(tmp_path / "file"), *TINY, "--text", str(tmp_path / "short.txt")])


def test_a_trained_models_data_has_its_own_shape(trained_file, tmp_path, capsys):
    for options in (["--shapes", "toy"], ["--prior", "ordered"]):
        with pytest.raises(SystemExit):
            main(["--data", f"trained:{trained_file}", *options])
    for data in ("synthetic", f"trained:{tmp_path / 'missing'}"):
        with pytest.raises(SystemExit):
            main(["--data", data])
    assert "python -m benchmarks.trained makes one" in capsys.readouterr().err


# ---------------------------------------------------------------- peers


def test_every_provider_without_a_step_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    settings = run.Settings(CPU, torch.bfloat16, rounds=1, ms=1, seed=0)
    here = run.Environment("cpu", "", "", "")
    rows = run.measure(TOY, MODES["fwd_bwd"], list(providers.FILES), settings, here, out_of_time=lambda: False)
    assert [row.provider for row in rows] == list(providers.FILES)
    assert all((row.ms is None) == bool(row.reason) for row in rows)
    reasons = {row.provider: row.reason for row in rows}
    assert {reasons[name] for name in ("liger_cutedsl", "liger_cutedsl_scaled", "liger_cutile")} == {
        "needs a Hopper GPU"
    }


def test_a_library_that_a_peer_needs_is_named(monkeypatch):
    from benchmarks.providers import liger

    monkeypatch.setitem(liger.NEEDS, "not_a_package.inside", "a-distribution")
    monkeypatch.setitem(liger.NEEDS, "not_a_module", "another")
    with pytest.raises(providers.Unavailable, match="^needs a-distribution and another$"):
        liger._need("not_a_package.inside", "torch", "not_a_module")


def install_fake(monkeypatch, name, **contents):
    """A module where an import of `name` finds it, and its packages."""
    words = name.split(".")
    for i in range(1, len(words) + 1):
        monkeypatch.setitem(sys.modules, ".".join(words[:i]), ModuleType(".".join(words[:i])))
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def dense_losses(input, linear_weight, target):
    return torch.nn.functional.cross_entropy(input @ linear_weight.T, target, reduction="none")


def dense_entropy(input, linear_weight):
    return torch.distributions.Categorical(logits=input @ linear_weight.T).entropy()


def assert_right(step, problem, mode):
    errors = errors_of(step(), problem, make_reference(problem, mode))
    assert max(error for error in errors if error is not None) < 1e-5


LOSSES = {
    name: mode
    for name, mode in MODES.items()
    if name not in ("log_probs", "soft64") and not mode.options and not mode.kind
}


@pytest.mark.parametrize("mode", LOSSES.values(), ids=LOSSES)
def test_ligers_losses_per_token_are_averaged_over_the_kept(monkeypatch, mode):
    from benchmarks.providers import liger

    class Scaled:
        @staticmethod
        def apply(input, linear_weight, target, temperature, ignore_index):
            assert (temperature, ignore_index) == (1.0, IGNORE_INDEX)
            return dense_losses(input, linear_weight, target)

    monkeypatch.setattr(liger, "_need", lambda *modules: None)
    path = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    install_fake(monkeypatch, path, LigerFusedScaledCrossEntropySM90Function=Scaled)
    problem = make_toy(mode.name)
    assert_right(step_of(liger._cutedsl_scaled(problem, mode), problem, mode), problem, mode)


ONE_CLASS = {**LOSSES, "log_probs": MODES["log_probs"]}


@pytest.mark.parametrize("mode", ONE_CLASS.values(), ids=ONE_CLASS)
def test_trls_log_probabilities_of_the_kept_rows_are_put_back(monkeypatch, mode):
    class LogProbs:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs):
            assert (bias, temperature, chunk, softcap, scale) == (None, 1.0, 32768, None, 1.0)
            assert outputs == (("entropy",) if mode.name == "log_probs" else ())
            assert (targets >= 0).all()
            return -dense_losses(hidden, weight, targets), dense_entropy(hidden, weight), None, None, None

    install_fake(monkeypatch, "trl.trainer.utils", _CHUNKED_LOGPROB_CHUNK_SIZE=32768)
    install_fake(monkeypatch, "trl.kernels.chunked_logprob", ChunkedLogProbFunction=LogProbs)
    monkeypatch.setitem(sys.modules, "trl.trainer", ModuleType("trl.trainer"))
    problem = make_toy(mode.name)
    assert_right(providers.provide("trl", problem, mode), problem, mode)


@pytest.mark.parametrize("mode", [MODES["none"], MODES["log_probs"]], ids=["none", "log_probs"])
def test_verls_heads_take_ignored_tokens_without_a_cotangent(monkeypatch, mode):
    def heads(hidden, weight, targets, temperature, reduction):
        assert (temperature, reduction) == (1.0, "none")
        return -dense_losses(hidden, weight, targets), dense_entropy(hidden, weight)

    install_fake(monkeypatch, "verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=heads)
    problem = make_toy(mode.name)
    assert_right(providers.provide("verl", problem, mode), problem, mode)
    with pytest.raises(providers.Unavailable, match="per token"):
        providers.provide("verl", problem, MODES["fwd_bwd"])


def test_a_package_is_found_without_running_its_init(monkeypatch, tmp_path):
    from benchmarks.providers.verl import import_packages_without_their_init

    inner = tmp_path / "wants_ray" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("import not_a_package")
    (inner / "kernels.py").write_text("FOUND = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    import_packages_without_their_init("wants_ray", "wants_ray.inner")
    assert importlib.import_module("wants_ray.inner.kernels").FOUND


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


def test_steps_of_a_head_with_lora_are_rows_with_their_errors(monkeypatch, tmp_path):
    for compiled in ("torch_compile", "dora_compile"):  # seconds
        monkeypatch.delitem(lora.PROVIDERS, compiled)
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    lora.main(["--shapes", "37x24x131", "--ranks", "3", "--dtype", "float32", *quick])
    (path,) = tmp_path.rglob("lora.csv")
    rows = {row["provider"]: row for row in rows_of(path)}
    assert list(rows) == ["floor", *(ours := ["ours", "ours_dora", "ours_merged", "dora_merged"])]
    assert all(float(row["ms"]) > 0 and float(row["peak_MiB"]) > 0 for row in rows.values())
    for name in ours:
        assert all(float(rows[name][error]) < 1e-5 for error in ("err_loss", "err_dx", "err_da", "err_db"))


def test_steps_of_given_logits_are_rows_with_their_errors(tmp_path):
    """Ours beside dense torch, in float32; a peer that is not installed is a reason."""
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    cross_entropy.main(["--shapes", "16x501:float32", "--providers", "ours,torch_eager", *quick])
    (logits,) = tmp_path.rglob("cross_entropy.csv")
    with logits.open(newline="") as file:
        assert {row["provider"]: float(row["err_grad"]) < 1e-5 for row in csv.DictReader(file) if row["err_grad"]} == {
            "ours": True,
            "torch_eager": True,
        }


def test_sums_over_micro_batches_are_rows_with_their_errors(tmp_path):
    quick = ["--device", "cpu", "--rounds", "1", "--ms", "1", "--out", str(tmp_path)]
    main_grad.main(["--shapes", "8x8x101", *quick])
    (path,) = tmp_path.rglob("main_grad.csv")
    with path.open(newline="") as file:
        rows = {row["provider"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(main_grad.PROVIDERS)
    assert all(float(row["err_dw"]) < 0.02 and float(row["peak_MiB"]) > 0 for row in rows.values())
    assert float(rows["main_grad"]["err_dw"]) < float(rows["autograd"]["err_dw"])


def test_every_objective_is_a_row_of_one_run_and_the_tables_are_made_of_its_csv(tmp_path, capsys, monkeypatch):
    """Ours beside bare GEMMs; a peer that is not installed is a reason, and no line of a table."""
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
    assert '| `reduction="none"`: float16 over bfloat16 | 1.10 |' in table and "verl's head" not in table


def test_errors_of_objectives_stand_beside_plain_torchs(tmp_path, monkeypatch):
    monkeypatch.setattr(objective_errors, "DRAWS", 1)
    monkeypatch.setattr(objective_errors, "OBJECTIVES", {"softcap_smoothing": "both", "policy": "policy"})
    monkeypatch.delitem(objective_errors.PATHS, "compiled")
    quick = ["--device", "cpu", "--processes", "0", "--shape", "40x16x501", "--out", str(tmp_path)]
    lines = objective_errors.main(quick).read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| float", "| bfloat"))]
    assert len(rows) == 2 * (3 + 1) + 3 * len(objective_errors.VALUES)
    for dtype, *_, path, loss, dx, dw in rows[:8]:
        assert path in ("eager", "logits made twice")
        for cell in (loss, dx, dw):
            ours, plain = map(float, cell.split(" / "))
            assert ours <= 3 * plain + 1e-7, (dtype, cell)
    for dtype, name, _, value, *_ in rows[8:]:
        ours, plain = map(float, value.split(" / "))
        assert 0.0 < ours <= 3 * plain + 1e-7, (dtype, name)
