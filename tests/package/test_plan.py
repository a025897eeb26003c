"""The memory planner, compared with what the kernels allocate and with measurements."""

# N tokens, D hidden, V vocabulary

import csv
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flce_ops.plan.__main__ import main
from flce_ops.plan.seconds import seconds
from fresh_process import run_script
from inputs import make_inputs
from test_memory import peak_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

import flce_ops
from benchmarks.data import is_usual
from flce_ops import aten
from flce_ops.plan import Head, device_of, plan, step_cost

MiB = 1 << 20
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200"
SHAPES = [
    (8192, 4096, 128256),
    (8192, 2304, 256000),
    (16384, 896, 151936),
    (2000, 256, 50257),  # the float32 sum of the weight's gradient fits; V is odd
    (777, 512, 32003),  # one chunk
    (100, 4096, 128256),  # few tokens: the exponentials are computed twice, in slices
]


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operators return and that exist at the same time. Tensors are on `meta`, so full
    sizes cost nothing.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in func._schema.returns):
            for tensor in out if isinstance(out, tuple | list) else (out,):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        if storage._cdata not in self.bytes:
            self.bytes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, storage._cdata)

    def free(self, key):
        self.now -= self.bytes.pop(key)


@pytest.fixture
def launchers(monkeypatch):
    """flce_ops.triton with kernels that do nothing. `meta` gets Hopper's tile sizes."""
    pytest.importorskip("triton")
    from flce_ops.triton.gemm import tile_sums
    from flce_ops.triton.steps import backward, with_grad

    kernels = type(tile_sums.sum_tiles_kernel)
    monkeypatch.setattr(kernels, "__getitem__", lambda kernel, grid: lambda *args, **options: None)
    monkeypatch.setattr(with_grad, "assert_in_range", lambda *args: None)
    return {"one pass": with_grad, "two passes": backward}


def temporaries_of(launch, head: Head, *arguments, **options) -> int:
    with Live() as live:
        results = launch(*arguments, **options)
    assert results is not None
    return live.peak - head.weight_bytes - head.input_bytes


def operands(head: Head):
    input, linear_weight = head.meta_tensors()
    return input, linear_weight, torch.empty(head.tokens, dtype=torch.int64, device="meta"), None, None


BOTH = {"output_mask": [True, True, False]}


@pytest.mark.parametrize("workspace", [512, 128, 64], ids="{}MiB".format)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_temporaries_of_the_one_pass_step_are_what_its_launcher_allocates(launchers, shape, workspace):
    head = Head(*shape, torch.bfloat16)
    row_scale = torch.empty(head.tokens, device="meta")
    with flce_ops.workspace(workspace * MiB):
        planned = step_cost.one_pass(head)
        launch = launchers["one pass"].launch_with_grad
        allocated = temporaries_of(launch, head, *operands(head), row_scale, **BOTH)
    assert planned.temporaries == pytest.approx(allocated, rel=0.01, abs=MiB)
    assert flce_ops.last_path().rows_per_chunk == planned.rows


@pytest.mark.parametrize("workspace", [512, 64], ids="{}MiB".format)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_temporaries_of_the_recomputing_backward_are_what_its_launcher_allocates(launchers, shape, workspace):
    head = Head(*shape, torch.float16)
    per_token = torch.empty(head.tokens, device="meta")
    with flce_ops.workspace(workspace * MiB):
        planned = step_cost.two_passes(head)
        launch = launchers["two passes"].launch_backward
        allocated = temporaries_of(launch, head, per_token, per_token, None, *operands(head), per_token, **BOTH)
    assert planned.temporaries == pytest.approx(allocated, rel=0.01, abs=MiB)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_temporaries_of_a_vocabulary_shard_are_what_its_launcher_allocates(launchers, shape):
    head = Head(*shape, torch.bfloat16).shard(4)
    row_scale = torch.empty(head.tokens, device="meta")
    planned = step_cost.vocabulary_parallel(head)
    launch = launchers["one pass"].launch_vocab_parallel_with_grad
    group = {"group": "", "ranks": 1, "vocab_start": 0, "vocab_size": head.vocab}
    allocated = temporaries_of(launch, head, *operands(head), row_scale, **group, **BOTH)
    # in this test the kernels of the losses are ATen's, and each makes its own vectors
    assert planned.temporaries == pytest.approx(allocated, rel=0.01, abs=2 * MiB)
    assert flce_ops.last_path().rows_per_chunk == planned.rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_temporaries_of_the_aten_path_are_what_it_allocates(monkeypatch, shape, dtype):
    monkeypatch.setattr(sys.modules["flce_ops.aten.valid_tokens"], "check_target_range", lambda *args: False)
    head = Head(*shape, dtype)
    row_scale = torch.empty(head.tokens, device="meta")
    planned = step_cost.one_pass_aten(head)
    allocated = temporaries_of(aten.with_grad, head, *operands(head), row_scale, **BOTH)
    assert planned.temporaries == pytest.approx(allocated, rel=0.01, abs=MiB)
    assert flce_ops.last_path().rows_per_chunk == planned.rows


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 0), (torch.bfloat16, 6)], ids=str)
def test_traffic_of_the_aten_path_by_dtype(dtype, rounding):
    """16-bit logits are rounded from float32. Each chunk reads and writes a float32 sum of grad_linear_weight."""
    head = Head(5000, 512, 32003, dtype)
    cost = step_cost.one_pass_aten(head)
    chunks = -(-head.tokens // cost.rows)
    assert chunks > 1
    assert cost.addition_bytes == 8 * chunks * head.vocab * head.hidden
    assert cost.bytes_per_logit == 36 + rounding
    assert step_cost.two_passes_aten(head).bytes_per_logit == 56 + rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_peak_of_the_dense_pair_is_what_a_cpu_step_of_it_takes(dtype):
    shape = (512, 8, 4003)
    inputs = make_inputs(shape, dtype=dtype)

    def step():
        input, linear_weight, target, _ = inputs.args
        F.cross_entropy(F.linear(input, linear_weight).float(), target).backward()

    peak = peak_on_cpu(step)
    head = Head(*shape, dtype)
    assert step_cost.dense_eager(head).temporaries + head.weight_bytes + head.input_bytes == pytest.approx(
        peak, rel=0.03
    )


# For each provider of benchmarks/, by its name in the CSVs: its cost, and the workspace in MiB.
PROVIDERS = {
    "ours": (step_cost.one_pass, 512),
    "ours_compiled": (step_cost.one_pass, 512),
    "ours_2GiB": (step_cost.one_pass, 2048),
    "ours_128MiB": (step_cost.one_pass, 128),
    "ours_64MiB": (step_cost.one_pass, 64),
    "ours_recompute": (step_cost.two_passes, 512),
    "torch_compile": (step_cost.dense_compiled, 512),
}


MEASURED_IN = [("loads.csv", "ours"), *(("fwd_bwd.csv", name) for name in PROVIDERS)]
SHORT = ("ours_128MiB", "ours_64MiB", "ours_recompute")  # with chunks of few tokens, or slices of few classes
NARROW = 1024  # with fewer features, these take up to 1.5 times the planned time


def measured(file: str, mode: str) -> list[dict]:
    with (RESULTS / file).open(newline="") as rows:
        return [row for row in csv.DictReader(rows) if row["ms"] and row["mode"] == mode]


def planned_for(row: dict, cost, workspace: int) -> tuple[Head, step_cost.StepCost]:
    head = Head(int(row["N"]), int(row["D"]), int(row["V"]), getattr(torch, row["dtype"]))
    with flce_ops.workspace(workspace * MiB):
        return head, cost(head)


def is_planned(row: dict) -> bool:
    """Enough tokens to hide the host's time, features that fill L2 lines, and the usual data."""
    return int(row["N"]) >= 4096 and int(row["D"]) % 64 == 0 and is_usual(row)


@pytest.mark.parametrize(("file", "provider"), MEASURED_IN)
def test_time_and_memory_are_those_measured_on_an_h200(file, provider):
    """Times agree within 10 %, the spread of one row and of the card from run to run, and within 5 % on average. Memory
    agrees within 2 %.

    Short chunks differ by 12 and 7 %, because the plan does not know the start and end of each. Compiled steps took up
    to 4 % more memory.
    """
    pytest.importorskip("triton")
    device = device_of("h200", torch.bfloat16, 1)
    rows = [row for row in measured(file, "fwd_bwd") if row["provider"] == provider and is_planned(row)]
    assert len(rows) >= 7
    of_one, of_all = (0.12, 0.07) if provider in SHORT else (0.10, 0.05)
    of_memory = 0.04 if provider == "ours_compiled" else 0.02
    ratios = []
    for row in rows:
        head, cost = planned_for(row, *PROVIDERS[provider])
        shape = (row["N"], row["D"], row["V"])
        found = 1e3 * seconds(head, cost, device) / float(row["ms"])
        assert cost.temporaries / MiB == pytest.approx(float(row["beyond_gradients_MiB"]), rel=of_memory, abs=1), shape
        if provider in SHORT and head.hidden < NARROW:
            assert 0.6 < found < 0.9, shape
        else:
            assert found == pytest.approx(1, abs=of_one), shape
            ratios.append(found)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=of_all)


def test_time_of_per_token_losses_is_that_measured_on_an_h200():
    pytest.importorskip("triton")
    device = device_of("h200", torch.bfloat16, 1)
    rows = [row for row in measured("other_modes.csv", "none") if row["provider"] == "ours"]
    assert len(rows) >= 3
    for row in rows:
        head, cost = planned_for(row, step_cost.two_passes, 512)
        assert 1e3 * seconds(head, cost, device) == pytest.approx(float(row["ms"]), rel=0.10), row


def test_the_eager_pair_never_ran_faster_than_planned():
    """Its bytes are counted once each, so the plan is a lower bound, and a close one."""
    device = device_of("h200", torch.bfloat16, 1)
    rows = [row for row in measured("fwd_bwd.csv", "fwd_bwd") if row["provider"] == "torch_eager"]
    assert len(rows) >= 7
    for row in rows:
        head, cost = planned_for(row, step_cost.dense_eager, 512)
        assert 0.8 <= 1e3 * seconds(head, cost, device) / float(row["ms"]) <= 1.05, row


def test_a_sharded_vocabulary_takes_the_time_and_memory_measured_on_two_and_four_h200s():
    with (RESULTS / "distributed_vocabulary.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["provider"] == "ours" and int(row["ranks"]) > 1]
    assert len(rows) >= 2
    for row in rows:
        ranks = int(row["ranks"])
        head = Head(int(row["N"]), int(row["D"]), int(row["V"]), torch.bfloat16)
        option = next(o for o in plan(head, ranks, device_of("h200", torch.bfloat16, ranks)) if "vocabulary" in o.name)
        assert 1e3 * option.seconds == pytest.approx(float(row["ms"]), rel=0.10), ranks
        # peak_MiB excludes weight and input. It includes the gradients and the 32 MiB that cuBLAS keeps on Hopper.
        shard = head.shard(ranks)
        beyond = option.peak - shard.weight_bytes - shard.input_bytes + 32 * MiB
        assert beyond / MiB == pytest.approx(float(row["peak_MiB"]), rel=0.02), ranks


def test_ranks_that_share_out_the_tokens_have_more_of_them_together():
    """Each rank has `head.tokens` tokens, or all ranks have the same ones and a share of the vocabulary."""
    head, ranks = Head(2048, 512, 32003, torch.bfloat16), 4
    tokens = {option.name: option.tokens for option in plan(head, ranks, device_of("h200", torch.bfloat16, ranks))}
    assert tokens.pop("flce_ops, FSDP over 4 GPUs") == ranks * head.tokens
    assert set(tokens.values()) == {head.tokens}


def test_the_dense_pair_is_never_the_smaller_one_at_sizes_of_language_models():
    for shape in SHAPES[:3]:
        dense, compiled, ours, small, *_ = plan(Head(*shape, torch.bfloat16), 1, device_of("h200", torch.bfloat16, 1))
        assert dense.peak > compiled.peak > ours.peak > small.peak


def test_the_command_prints_a_line_for_each_option(capsys):
    main("--tokens 16384 --hidden 4096 --vocab 128256 --dtype bfloat16 --gpus 4".split())
    printed = capsys.readouterr().out
    for words in (
        "F.cross_entropy",
        "torch.compile",
        "512 MiB",
        "64 MiB",
        'reduction="none"',
        "vocabulary over 4",
        "FSDP",
    ):
        assert sum(words in line for line in printed.splitlines()) >= 1, words
    assert "22,918" in printed and " 511 " in printed  # MiB in the first and third lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu a100", "no measured rates for a100 in bfloat16.*--tflops"),
        ("--dtype float32", "no measured rates for h200 in float32"),
        ("--gpu a100 --tflops 250", "no measured rates for a100"),  # no bandwidth is given
        ("--gpu a100 --tflops 250 --bandwidth 2 --gpus 2", "no measured bus bandwidth for 2 GPUs"),
        ("--gpus 64", "no measured bus bandwidth for 64 GPUs"),
    ],
)
def test_rates_that_nobody_measured_are_asked_for(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["--tokens", "512", "--hidden", "64", "--vocab", "1000", *arguments.split()])


def test_rates_given_replace_those_measured(capsys):
    main("--tokens 512 --hidden 64 --vocab 1000 --dtype float32 --tflops 1 --bandwidth 1e6".split())
    dense = next(line for line in capsys.readouterr().out.splitlines() if "float32 logits" in line)
    assert float(dense.split()[-3]) == pytest.approx(1e3 * 3 * 2 * 512 * 64 * 1000 / 1e12, abs=0.06)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from flce_ops.plan.__main__ import main
main(sys.argv[1:])
assert sys.modules["triton"] is None and not any(name.startswith("flce_ops.triton") for name in sys.modules)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "sizes",
    [
        # an overlay chunk, and logits computed twice in a small workspace
        "--tokens 16384 --hidden 4096 --vocab 128256 --gpus 4",
        "--tokens 777 --hidden 896 --vocab 50257 --gpus 2",
    ],
)
def test_without_triton_the_plan_is_the_same(sizes, dtype, capsys):
    arguments = f"{sizes} --dtype {dtype} --tflops 50 --bandwidth 2 --bus-bandwidth 100".split()
    done = run_script(WITHOUT_TRITON, *arguments)
    assert done.returncode == 0, done.stderr
    assert "vocabulary over" in done.stdout and done.stderr == ""
    pytest.importorskip("triton")
    main(arguments)
    assert capsys.readouterr().out == done.stdout
