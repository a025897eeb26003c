"""return_metrics of DTensors: every rank gets the metrics of one process."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from collectives import RecordCollectives
from in_worlds import in_worlds
from inputs import make_inputs
from process_pool import run_in_world, worlds
from reference_loss import error
from sharded_inputs import ANY, FLOAT, TOLERANCE, D, R, V, batch, full, mesh_of, place, to_device
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.entry.bodies import NAMES, OF_LOG_PROBS

LAYOUTS = {
    "vocabulary": ([R], [Shard(0)]),
    "tokens": ([Shard(1)], [R]),
    "sequence into vocabulary": ([Shard(1)], [Shard(0)]),
    "both": ([Shard(0), R], [R, Shard(0)]),
}


@pytest.mark.parametrize("world", ANY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_those_of_one_process_and_the_same_on_every_rank(world, layout):
    if layout == "both" and world[1] < 4:
        pytest.skip("two mesh dimensions")
    run_in_world(world, metrics_of_layout, layout)


def metrics_of_layout(device, layout):
    size = dist.get_world_size()
    tokens, rows = LAYOUTS[layout]
    mesh = mesh_of(device, size) if len(tokens) == 1 else mesh_of(device, size // 2, 2)
    # a mean in one pass, one in several chunks, without gradients, with smoothing; and ranks without classes
    for vocab, options, plain in (
        (V, {}, ()),
        (V, {"reduction": "none"}, ("target",)),
        (V, {"reduction": "sum", "label_smoothing": 0.1}, ("target",)),
        (64, {"softcap": 5.0, "z_loss": 1e-2}, ()),
        (3, {}, ()),
    ):
        for needs in (True, False) if vocab == V else (True,):
            inputs = batch(device, vocab=vocab, bias=True, requires_grad=needs)
            placed = place(inputs, mesh, tokens, rows, plain=plain)
            loss, metrics = flce_ops.linear_cross_entropy(*placed.args, return_metrics=True, **options)
            plain_loss = flce_ops.linear_cross_entropy(*placed.args, **options)
            assert torch.equal(full(loss), full(plain_loss))
            alone, expected = flce_ops.linear_cross_entropy(*inputs.args, return_metrics=True, **options)
            assert error(full(loss), alone) < TOLERANCE
            assert torch.equal(full(metrics.argmax), expected.argmax)
            assert metrics.token_accuracy.placements == (Replicate(),) * mesh.ndim
            assert metrics.token_accuracy.dtype == torch.float32
            on_ranks = [torch.zeros((), device=device) for _ in range(size)]
            dist.all_gather(on_ranks, metrics.token_accuracy.to_local())
            assert all(accuracy == expected.token_accuracy for accuracy in on_ranks), on_ranks
            _, named = flce_ops.linear_cross_entropy(*placed.args, return_metrics=NAMES, **options)
            _, whole = flce_ops.linear_cross_entropy(*inputs.args, return_metrics=NAMES, **options)
            if "reduction" in options:
                named |= flce_ops.linear_log_probs(*placed.args, return_metrics=OF_LOG_PROBS)[1]
            for name, values in whole.items():
                assert error(full(named[name]), values) < TOLERANCE, (name, options)
            if needs:
                full(loss).sum().backward()
    inputs.target.fill_(-100)
    _, metrics = flce_ops.linear_cross_entropy(*place(inputs, mesh, tokens, rows).args, return_metrics=True)
    assert full(metrics.token_accuracy).isnan()


@in_worlds(worlds(2, 4))
def test_metrics_of_a_sharded_vocabulary_take_no_pass_and_two_numbers_a_token(device):
    mesh, size = mesh_of(device, dist.get_world_size()), dist.get_world_size()
    inputs = to_device(make_inputs((300, D, 64), bias=True, ignored=0.0), device)
    placed = place(inputs, mesh, [R], [Shard(0)])
    with FlopCounterMode(display=False) as counter:
        loss, metrics = flce_ops.linear_cross_entropy(*placed.args, return_metrics=True)
        loss.backward()
    assert counter.get_total_flops() == 3 * 2 * 300 * D * 64 // size
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    with RecordCollectives() as recorded:
        flce_ops.linear_cross_entropy(*placed.args, return_metrics=True)
    assert recorded.calls == [("all_gather", FLOAT * 5 * 300)], recorded.calls
    # gathered once; the accuracy does not gather it again
    placed.target = distribute_tensor(inputs.target, mesh, [Shard(0)])
    with RecordCollectives() as recorded:
        flce_ops.linear_cross_entropy(*placed.args, return_metrics=True)
    target = ("all_gather", 8 * 300 // size)
    assert recorded.calls == [target, ("all_gather", FLOAT * 5 * 300)], recorded.calls
    with RecordCollectives() as recorded:
        flce_ops.linear_cross_entropy(*placed.args, return_metrics=["entropy", "mean_logit"])
    of_rows = ("all_gather", FLOAT * 4 * 300)  # the gathered rows, and lse with its rest, which combine them
    assert recorded.calls == [target, ("all_gather", FLOAT * 3 * 300), of_rows], recorded.calls
    with flce_ops.workspace(1):
        _, in_chunks = flce_ops.linear_cross_entropy(*placed.args, return_metrics=True)
        assert flce_ops.last_path().chunks > 1
    assert torch.equal(full(in_chunks.argmax), full(metrics.argmax))
