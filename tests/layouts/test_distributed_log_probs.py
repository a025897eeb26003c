"""linear_log_probs and return_metrics on DTensors, over gloo (CI) and NCCL (marker multigpu), against one process."""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import torch
import torch.distributed as dist
from collectives import RecordCollectives
from in_worlds import in_worlds
from inputs import Inputs
from process_pool import worlds
from reference_loss import error
from sharded_inputs import ANY, EVERY_SPLIT, FLOAT, SQUARE, TOLERANCE, B, D, R, T, V, batch, full, mesh_of, place
from test_log_probs import BOTH, FLOATS, dense
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import flce_ops

OPTIONS = [{}, {"softcap": 5.0, "logit_scale": 0.7}]


def check_same_as_one_process(placed: Inputs, inputs: Inputs, names=FLOATS, tolerance=TOLERANCE, **options):
    """Compares the named results, their gradients under cotangents of both signs, and the argmax."""
    N = inputs.target.numel()
    cotangents = {
        name: torch.linspace(-1, 1, N, device=inputs.target.device).roll(5 * i).view(inputs.target.shape)
        for i, name in enumerate(names)
    }
    exact = inputs.clone(torch.float64)
    truth = dense(*exact.args, **options)
    torch.autograd.backward([getattr(truth, n) for n in names], [c.double() for c in cotangents.values()])
    found = flce_ops.linear_log_probs(*placed.args, entropy="entropy" in names, argmax=True, **options)
    rows = [getattr(found, name) for name in names]
    grad_output = [
        distribute_tensor(c.to(row.dtype), row.device_mesh, row.placements) for c, row in zip(cotangents.values(), rows)
    ]
    torch.autograd.backward(rows, grad_output)
    for name, row in zip(names, rows, strict=True):
        assert isinstance(row, DTensor) and row.shape == inputs.target.shape
        assert error(full(row), getattr(truth, name)) < tolerance, name
    for name, leaf in exact.leaves.items():
        assert error(full(placed.leaves[name].grad), leaf.grad) < tolerance, name
    assert torch.equal(full(found.argmax), truth.argmax)
    assert found.argmax.placements == found.lse.placements
    return found


# ---------------------------------------------------------------- vocabulary sharded


@in_worlds(ANY)
@EVERY_SPLIT
def test_sharded_vocabulary_gives_the_rows_and_gradients_of_one_process(device, vocab):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        for names in (FLOATS, *([name] for name in FLOATS if not options)):
            inputs = batch(device, vocab=vocab, bias=True)
            placed = place(inputs, mesh, [R], [Shard(0)])
            found = check_same_as_one_process(placed, inputs, names, **options)
            assert found.lse.placements == (R,)
            assert placed.linear_weight.grad.placements == (Shard(0),)
            assert placed.input.grad.placements == (R,)
    inputs = batch(device, vocab=vocab, dtype=torch.float64)
    check_same_as_one_process(place(inputs, mesh, [R], [Shard(0)]), inputs, tolerance=1e-13)


@in_worlds(ANY)
def test_sharded_vocabulary_takes_tokens_in_any_layout_and_plain_targets(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens in (Shard(0), Shard(1)):
        for rows in (Shard(0), R):
            for plain in ((), ("target", "linear_bias")):
                inputs = batch(device, bias=True)
                placed = place(inputs, mesh, [tokens], [rows], plain=plain)
                found = check_same_as_one_process(placed, inputs)
                assert found.lse.placements == ((R,) if rows == Shard(0) else (tokens,))


@in_worlds(SQUARE)
def test_tokens_and_vocabulary_sharded(device):
    mesh = mesh_of(device, dist.get_world_size() // 2, 2)
    for vocab in (V, 64, 1):
        inputs = batch(device, vocab=vocab, bias=True)
        placed = place(inputs, mesh, [Shard(1), R], [R, Shard(0)])
        found = check_same_as_one_process(placed, inputs)
        assert found.lse.placements == (Shard(1), R)
        assert placed.linear_weight.grad.placements == (Partial(), Shard(0))


@in_worlds(ANY)
def test_the_first_of_equal_logits_wins_across_ranks(device):
    mesh = mesh_of(device, dist.get_world_size())
    weight = torch.randint(-1, 2, (V, 3)).float().to(device)
    hidden = torch.randint(-1, 2, (B, T, 3)).float().to(device)
    logits = hidden @ weight.T
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    target = torch.randint(V, (B, T), device=device)
    placed = [distribute_tensor(t, mesh, [p]) for t, p in ((hidden, R), (weight, Shard(0)), (target, R))]
    assert torch.equal(full(flce_ops.linear_log_probs(*placed, argmax=True).argmax), first)
    for needs in (True, False):
        placed[0].requires_grad_(needs)
        _, metrics = flce_ops.linear_cross_entropy(*placed, return_metrics=True)
        assert torch.equal(full(metrics.argmax), first)


@in_worlds(ANY)
def test_one_exchange_of_what_was_asked_for(device):
    mesh = mesh_of(device, dist.get_world_size())
    for options, numbers in (({}, 3), ({"entropy": True}, 4), ({"argmax": True}, 5), (BOTH, 6)):
        inputs = batch(device, tokens=16)
        placed = place(inputs, mesh, [R], [Shard(0)])
        with RecordCollectives() as recorded:
            found = flce_ops.linear_log_probs(*placed.args, **options)
        assert recorded.calls == [("all_gather", FLOAT * numbers * B * 16)], recorded.calls
        rows = found.log_probs if found.entropy is None else found.log_probs + found.entropy
        with RecordCollectives() as recorded:
            full(rows).sum().backward()
        assert recorded.calls == [("all_reduce", FLOAT * B * 16 * D)], recorded.calls
        placed = place(inputs, mesh, [Shard(1)], [R])
        with RecordCollectives() as recorded:
            flce_ops.linear_log_probs(*placed.args, **options)
        assert recorded.calls == []


@in_worlds(worlds(2, 4))
def test_three_gemm_passes_over_the_shard(device):
    inputs = batch(device, vocab=64)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    with FlopCounterMode(display=False) as counter:
        found = flce_ops.linear_log_probs(*placed.args, **BOTH)
        full(found.log_probs + found.entropy).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * B * T * D * 64 // dist.get_world_size()


@in_worlds(ANY)
def test_padded_classes_behind_a_low_bias_do_not_count(device):
    """There are so many padded classes that the last rank has no others: its share of the softmax is 0."""
    size = dist.get_world_size()
    inputs = batch(device)
    rows = -(-V // (size - 1)) * size if size > 2 else 2 * V
    for low in (-1e30, -1e4, -torch.inf):
        weight = torch.cat([inputs.linear_weight.detach(), torch.ones(rows - V, D, device=device)])
        bias = torch.zeros(rows, device=device)
        bias[V:] = low
        padded = Inputs(inputs.input.detach().requires_grad_(), weight.requires_grad_(), inputs.target, bias)
        placed = place(padded, mesh_of(device, size), [R], [Shard(0)])
        found = check_same_as_one_process(placed, padded)
        assert full(found.entropy).isfinite().all()


@in_worlds(worlds(2))
def test_compiled_in_one_graph(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device)

    def objective(*args):
        found = flce_ops.linear_log_probs(*args, **BOTH)
        return found.log_probs, found.entropy, found.argmax

    results = []
    for function in (objective, torch.compile(objective, fullgraph=True, backend="aot_eager")):
        placed = place(inputs, mesh, [R], [Shard(0)])
        log_probs, entropy, argmax = function(*placed.args)
        (full(log_probs) + 0.1 * full(entropy)).sum().backward()
        results.append([full(t) for t in (log_probs, entropy, argmax, placed.input.grad, placed.linear_weight.grad)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@in_worlds(worlds(2))
def test_second_derivatives_of_log_probs_and_entropy_are_those_of_one_process(device):
    inputs = batch(device, dtype=torch.float64, bias=True)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    names = ("input", "linear_weight", "linear_bias")
    seconds = []
    for made in (placed, inputs):
        found = flce_ops.linear_log_probs(*made.args, entropy=True)
        # of DTensors: full_tensor() loses second derivatives on torch 2.11
        objective = (found.log_probs + 0.3 * found.entropy).square().sum()
        leaves = [getattr(made, name) for name in names]
        firsts = torch.autograd.grad(objective, leaves, create_graph=True)
        penalty = sum(full(first).square().sum() for first in firsts)
        seconds.append([full(second) for second in torch.autograd.grad(penalty, leaves)])
    for name, ours, exact in zip(names, *seconds, strict=True):
        assert error(ours, exact) < 1e-10, (name, error(ours, exact))
