"""The planner's formulas against the measurements of an H200, and what its command prints and refuses."""

# N tokens, D hidden, V vocabulary

import csv
import re
from pathlib import Path

import pytest
import torch
from fresh_process import run_script

import flce_ops
from flce_ops.plan import RATES, REACHED, main, plan
from flce_ops.support.workspace import least_rows

MiB = 1 << 20
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ARGUMENTS = "--tokens 8192 --hidden 4096 --vocab 128256"


def measured():
    """(N, D, V): bytes beyond the gradients and seconds by provider, for rows without many ignored tokens."""
    found: dict[tuple[int, ...], dict[str, tuple[float, float]]] = {}
    with (RESULTS / "nvidia-h200" / "fwd_bwd.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["mode"] == "fwd_bwd" and row["dtype"] == "bfloat16" and row["ms"] and float(row["ignored"]) < 0.1:
                shape = tuple(int(row[name]) for name in "NDV")
                numbers = float(row["beyond_gradients_MiB"]) * MiB, float(row["ms"]) / 1e3
                found.setdefault(shape, {})[row["provider"]] = numbers
    return [(shape, rows) for shape, rows in found.items() if {"ours", "torch_eager", "torch_compile"} <= rows.keys()]


@pytest.mark.parametrize(("shape", "rows"), measured(), ids=lambda value: str(value) if len(value) == 3 else "")
def test_the_plan_is_what_an_h200_measured(shape, rows):
    with flce_ops.workspace(512 * MiB):  # that of the measurements
        eager, compiled, ours, *_ = plan(*shape, tflops=REACHED * RATES["h200"])
    (of_eager, _), (of_compiled, _), (of_ours, seconds) = (rows[n] for n in ("torch_eager", "torch_compile", "ours"))
    assert eager.temporaries == pytest.approx(of_eager, rel=0.02)
    assert compiled.temporaries == pytest.approx(of_compiled, rel=0.02)
    assert 0.75 * ours.temporaries <= of_ours <= ours.temporaries + MiB  # chunks of whole tiles leave a part free
    assert ours.seconds == pytest.approx(seconds, rel=0.14)


def test_the_workspace_and_the_saved_logits_are_those_that_are_set():
    tokens, vocab = 8192, 128256
    with flce_ops.workspace(128 * MiB, retained=0):
        assert [step.temporaries for step in plan(tokens, 4096, vocab, 600.0)[2:]] == [128 * MiB] * 3
        assert plan(tokens, 4096, vocab, 600.0)[3].gemms == 4.0
    with flce_ops.workspace(1):  # a chunk has some rows all the same, and 2048 where none is set
        assert plan(tokens, 4096, vocab, 600.0)[2].temporaries == least_rows() * vocab * 2
    assert plan(tokens, 4096, 256000, 600.0)[2].temporaries == 2048 * 256000 * 2
    *_, ours, of_tokens, checkpointed = plan(100, 4096, vocab, 600.0)  # all logits fit
    assert ours.temporaries == 100 * vocab * 2 and of_tokens.gemms == 3.0 and checkpointed.gemms == 4.0


def test_float16_makes_its_gradients_in_backward():
    of_float16 = plan(8192, 4096, 128256, 600.0, torch.float16)
    assert of_float16[2][1:] == of_float16[3][1:] and of_float16[2].gemms > 3.0


def test_a_given_rate_is_taken_as_it_is_for_any_card_and_dtype(capsys):
    main([*ARGUMENTS.split(), "--gpu", "a card of tomorrow", "--tflops", "1500", "--dtype", "float32"])
    out = capsys.readouterr().out
    assert "1500 TFLOP/s as given" in out
    (line,) = [line for line in out.splitlines() if "a scalar loss" in line]
    assert float(line.split()[-1]) == pytest.approx(3 * 2e3 * 8192 * 4096 * 128256 / 1500e12, abs=0.01)


def test_gpus_share_the_vocabulary(capsys):
    main([*ARGUMENTS.split(), "--gpus", "3"])
    assert "x 42752 classes on each of 3 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--gpu b300", "expected one of h200, h100, a100, l40s, 4090, got 'b300'; for another card give --tflops"),
        ("--gpu h100-pcie", "got 'h100-pcie'"),  # its rate is another one
        ("--dtype float32", "argument --dtype: the rates of cards are those of 16-bit operands.*give --tflops"),
        ("--tflops 0", "argument --tflops: expected a positive number, got 0"),
        ("--tflops nan", "argument --tflops: expected a positive number, got nan"),
        ("--gpus half", "argument --gpus: invalid positive int value: 'half'"),
    ],
)
def test_what_is_not_known_is_refused_with_what_to_do(more, message, capsys):
    with pytest.raises(SystemExit):
        main([*ARGUMENTS.split(), *more.split()])
    assert re.search(message, capsys.readouterr().err)


def test_neither_a_gpu_nor_triton_is_needed():
    done = run_script(
        f"import sys; sys.modules['triton'] = None\nfrom flce_ops.plan import main; main({ARGUMENTS.split()})"
    )
    assert done.returncode == 0 and "flce_ops, a scalar loss" in done.stdout, done.stderr
