"""The example and the benchmark of several processes, at toy size, in processes that are already there."""

import csv
import warnings

import pytest
import torch.distributed as dist
from process_pool import run_in_world, worlds


@pytest.mark.parametrize("world", worlds(4, 8))
def test_example_trains_under_fsdp2_and_tensor_parallelism(world):
    run_in_world(world, example)


def example(device):
    from examples import train_fsdp2_tp

    options = train_fsdp2_tp.parser().parse_args(["--steps", "12", "--context", "32"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="(?!.*view tensor)")
        losses = train_fsdp2_tp.train(options, device)
    assert losses[-1] < 0.75 * losses[0], losses


@pytest.mark.parametrize("world", worlds(2, 4))
def test_benchmark_writes_its_rows_and_all_providers_agree(world, tmp_path):
    run_in_world(world, benchmark, str(tmp_path))
    found = list(csv.DictReader((tmp_path / "distributed_vocabulary.csv").open()))
    tolerance = 1e-4 if world[0] == "cpu" else 1e-2  # bfloat16 on GPUs
    providers = {"ours", "ours_sequence", "loss_parallel", "gather_weight", "ideal"}
    assert {row["provider"] for row in found} == providers
    for row in found:
        assert not row["reason"], row
        assert float(row["ms"]) > 0
        if row["provider"] != "ideal":
            assert float(row["loss"]) == pytest.approx(float(found[0]["loss"]), rel=tolerance)
            assert float(row["grad_norm"]) == pytest.approx(float(found[0]["grad_norm"]), rel=10 * tolerance)
    scaling = list(csv.DictReader((tmp_path / "distributed_weak_scaling.csv").open()))
    assert {row["head"] for row in scaling} == {"flce_ops", "F.cross_entropy"}
    assert float(scaling[0]["loss"]) == pytest.approx(float(scaling[1]["loss"]), rel=tolerance)
    assert all(float(row["tokens_per_s"]) > 0 for row in scaling)


def benchmark(device, directory):
    from benchmarks import distributed

    assert dist.is_initialized()
    options = distributed.parser().parse_args(["--toy", "--out", directory, "--commit", "test"])
    distributed.run(options, device)
