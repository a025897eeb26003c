"""The example and the benchmarks that use several processes, at toy size, in the processes of the pool."""

import csv
import warnings

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from process_pool import run_in_world, worlds


@pytest.mark.exhaustive
@in_worlds(worlds(4, 8))
def test_example_trains_under_fsdp2_and_tensor_parallelism(device):
    from examples import train_fsdp2_tp

    options = train_fsdp2_tp.parser().parse_args(["--steps", "12", "--context", "32"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="(?!.*view tensor)")
        losses = train_fsdp2_tp.train(options, device)
    assert losses[-1] < 0.75 * losses[0], losses

    torch.manual_seed(0)
    alone = train_fsdp2_tp.GPT(options.dim, options.depth, options.heads, options.context).to(device)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=options.learning_rate)
    expected = []
    for tokens, target in train_fsdp2_tp.batches(options, device):
        loss = alone(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    tolerance = 1e-4 if device.type == "cpu" else 2e-2  # bfloat16 on GPUs
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", worlds(2, 4, gloo=(2,)))
def test_benchmark_writes_its_rows_and_all_providers_agree(world, tmp_path):
    run_in_world(world, benchmark, str(tmp_path))
    found = list(csv.DictReader(next(tmp_path.rglob("distributed_vocabulary.csv")).open()))
    tolerance = 1e-4 if world[0] == "cpu" else 1e-2  # bfloat16 on GPUs
    providers = {"ours", "ours_sequence", "loss_parallel", "gather_weight", "ideal"}
    assert {row["provider"] for row in found} == providers
    for row in found:
        assert not row["reason"], row
        assert float(row["ms"]) > 0
        if row["provider"] != "ideal":
            assert float(row["loss"]) == pytest.approx(float(found[0]["loss"]), rel=tolerance)
            assert float(row["grad_norm"]) == pytest.approx(float(found[0]["grad_norm"]), rel=10 * tolerance)
    scaling = list(csv.DictReader(next(tmp_path.rglob("distributed_weak_scaling.csv")).open()))
    assert {row["head"] for row in scaling} == {"flce_ops", "F.cross_entropy"}
    pipeline = list(csv.DictReader(next(tmp_path.rglob("distributed_pipeline.csv")).open()))
    passes = [[float(row[f"{of}_passes"]) for of in ("forward", "input", "weight")] for row in pipeline]
    assert passes == [[3, 0, 0], [1, 1, 1], [1, 1, 1]]
    for first, *others in (scaling, pipeline):
        assert float(first["tokens_per_s"]) > 0
        for row in others:
            assert float(row["loss"]) == pytest.approx(float(first["loss"]), rel=tolerance) and float(row["ms"]) > 0


def benchmark(device, directory):
    from benchmarks import distributed

    assert dist.is_initialized()
    options = distributed.parser().parse_args(["--toy", "--out", directory, "--commit", "test"])
    distributed.run(options, device)
