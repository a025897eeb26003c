"""A trained model's operands as a benchmark's data."""

import sysconfig
from pathlib import Path

import pytest
import torch
from toy_problem import CPU, run_toy

from benchmarks import (
    corpus,
    plot,
    trained,
)
from benchmarks.__main__ import main
from benchmarks.data import IGNORE_INDEX, is_usual, load_problem, shape_of
from benchmarks.shapes import Shape

pytestmark = pytest.mark.usefixtures("quick_collections")
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
        # Twenty steps are enough to learn the prior: the loss falls below the log of the vocabulary's size.
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
        (folder / f"{i}.py").write_text(f"number = {i // 2}\n")  # each text twice
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
