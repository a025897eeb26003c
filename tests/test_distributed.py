"""The operator on DTensors, in processes over gloo (CI) and NCCL (marker multigpu), against one float64 process.

Mesh dimensions are called by what they shard: "dp" tokens, "tp" the vocabulary.
"""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collectives import RecordCollectives
from inputs import Inputs, make_inputs, scalars
from process_pool import run_in_world, worlds
from reference_loss import error, plain_loss, run_reference
from test_tensor_kinds import Quantized
from test_zero_denominators import CASES as ZERO_DENOMINATORS
from test_zero_denominators import assert_same_kinds
from test_zero_denominators import make as make_case
from test_zero_denominators import plain as plain_over_zero
from test_zero_denominators import run as run_case
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.aten.vocab_parallel_with_grad import vocab_parallel_with_grad
from flce_ops.distributed.layout import layout_of

B, T, D = 3, 14, 16  # T: uneven over 4 and 8 ranks
V = 61  # prime: uneven over every number of ranks
TOLERANCE = 2e-5  # float32 against float64
FLOAT = 4  # bytes of a float32

R = Replicate()
ANY = worlds(2, 4, 8)
SQUARE = worlds(4, 8)  # two mesh dimensions

# every argument that changes the loss, so that a factor which misses one shard shows
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"softcap": 5.0, "logit_scale": 0.7},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "softcap": 4.0, "z_loss": 1e-2, "logit_scale": 1.3},
]


def mesh_of(device: torch.device, *shape: int) -> DeviceMesh:
    names = ("dp", "tp")[-len(shape) :] if len(shape) < 3 else ("replicate", "dp", "tp")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def batch(device: torch.device, *, vocab: int = V, tokens: int = T, **options) -> Inputs:
    """make_inputs with tokens as (B, T), the same in every process; the first sequence has most of the ignored ones."""
    inputs = make_inputs((B * tokens, D, vocab), device="cpu", **options)
    inputs.target[: tokens // 2] = inputs.ignore_index  # unequal counts of valid tokens per rank
    changes = {}
    for name in ("input", "target", "token_weight"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            shaped = tensor.detach().reshape(B, tokens, *tensor.shape[1:])
            changes[name] = shaped.requires_grad_(tensor.requires_grad)
    return to_device(Inputs(**{**vars(inputs), **changes}), device)


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {
        name: value.detach().to(device).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in vars(inputs).items()
    }
    return Inputs(**moved)


def place(inputs: Inputs, mesh: DeviceMesh, tokens, rows, plain=()) -> Inputs:
    """Token tensors in placements `tokens`, those with a row per class in `rows`, the rest replicated."""
    layouts = {"input": tokens, "target": tokens, "token_weight": tokens, "linear_weight": rows, "linear_bias": rows}
    placed = {}
    for name, value in vars(inputs).items():
        if isinstance(value, Tensor) and name not in plain:
            layout = layouts.get(name, [R] * mesh.ndim)
            value = distribute_tensor(value.detach(), mesh, layout).requires_grad_(value.requires_grad)
        elif isinstance(value, Tensor):
            value = value.detach().clone().requires_grad_(value.requires_grad)
        placed[name] = value
    return Inputs(**placed)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_same_as_one_process(placed: Inputs, inputs: Inputs, loss_function=flce_ops.linear_cross_entropy, **options):
    placed.linear_weight.grad = None
    cotangent = torch.linspace(0.5, 1.5, inputs.target.numel(), device=inputs.target.device).view(inputs.target.shape)
    if options.get("reduction") != "none":
        cotangent = torch.tensor(0.7, device=inputs.target.device)
    expected = run_reference(inputs, cotangent, **options)
    loss = loss_function(*placed.args, **placed.options, **options)
    assert isinstance(loss, DTensor)
    assert loss.shape == expected["loss"].shape
    upstream = distribute_tensor(cotangent.to(loss.dtype), loss.device_mesh, loss.placements)
    loss.backward(upstream)
    assert error(full(loss), expected.pop("loss")) < TOLERANCE
    leaves = placed.leaves
    assert leaves.keys() == expected.keys()
    for name, exact in expected.items():
        assert error(full(leaves[name].grad), exact) < TOLERANCE, name


# ---------------------------------------------------------------- tokens sharded


@pytest.mark.parametrize("world", ANY)
@pytest.mark.parametrize("dim", [0, 1], ids=["data parallel", "sequence or context parallel"])
def test_sharded_tokens_give_the_loss_and_gradients_of_one_process(world, dim):
    run_in_world(world, sharded_tokens, dim)


def sharded_tokens(device, dim):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        for extra in ({}, {"bias": True, "weight": True, "token_weight": True}):
            inputs = batch(device, **extra)
            placed = place(inputs, mesh, [Shard(dim)], [R])
            check_same_as_one_process(placed, inputs, **options)
            assert placed.linear_weight.grad.placements == (Partial(),)
            assert placed.input.grad.placements == (Shard(dim),)
    inputs = batch(device, normalizer=True)
    check_same_as_one_process(place(inputs, mesh, [Shard(dim)], [R]), inputs)


@pytest.mark.parametrize("world", ANY)
def test_sharded_tokens_send_two_numbers_and_make_gradients_in_one_pass(world):
    run_in_world(world, sharded_tokens_traffic)


def sharded_tokens_traffic(device):
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [Shard(0)], [R])
    with RecordCollectives() as recorded:
        loss = flce_ops.linear_cross_entropy(*placed.args)
    assert recorded.calls == [("all_reduce", FLOAT)] * 2, recorded.calls  # the count of valid tokens, the loss
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad" or 0 in placed.input.to_local().shape
    with RecordCollectives() as recorded:
        loss.backward()
    assert recorded.calls == [], recorded.calls  # d linear_weight stays Partial


@pytest.mark.parametrize("world", ANY)
def test_mean_is_over_valid_tokens_of_all_ranks_when_one_rank_has_none(world):
    run_in_world(world, one_rank_without_targets)


def one_rank_without_targets(device):
    size = dist.get_world_size()
    inputs = make_inputs((4 * size, D, V))
    inputs.target[:4] = -100
    inputs = to_device(inputs, device)
    check_same_as_one_process(place(inputs, mesh_of(device, size), [Shard(0)], [R]), inputs)


@pytest.mark.parametrize("world", ANY)
def test_all_tokens_ignored_gives_nan_mean_and_zero_gradients(world):
    run_in_world(world, all_ignored)


def all_ignored(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)])):
        inputs = batch(device, token_weight=True)
        inputs.target.fill_(-100)
        placed = place(inputs, mesh, tokens, rows)
        loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options)
        assert full(loss).isnan()
        loss.backward()
        for name, leaf in placed.leaves.items():
            assert not full(leaf.grad).any(), name


@pytest.mark.parametrize("world", worlds(2))
def test_the_mean_over_no_token_is_nan_as_in_torch(world):
    run_in_world(world, no_token)


def no_token(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in ((Shard(0), R), (R, Shard(0)), (R, R)):
        for needs in (False, True):
            placed = place(to_device(make_inputs((0, D, V), requires_grad=needs), device), mesh, [tokens], [rows])
            assert full(flce_ops.linear_cross_entropy(*placed.args)).isnan()
            assert full(flce_ops.linear_cross_entropy(*placed.args, reduction="sum")) == 0.0


@pytest.mark.parametrize("world", worlds(2))
def test_sums_over_zero_are_nan_infinite_and_zero_where_plain_torchs_are(world):
    run_in_world(world, zero_denominators)


def zero_denominators(device):
    mesh = mesh_of(device, dist.get_world_size())
    for made, options in ZERO_DENOMINATORS.values():
        inputs = to_device(make_case(**{"ignored": range(5), **made}), device)  # the first rank's tokens: nothing
        expected = run_case(plain_over_zero, inputs, **options)
        for tokens, rows in ((Shard(0), R), (R, Shard(0))):
            placed = place(inputs, mesh, [tokens], [rows])
            loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options, **options)
            loss.backward()
            found = {"loss": full(loss).detach(), **{name: full(leaf.grad) for name, leaf in placed.leaves.items()}}
            assert_same_kinds(found, expected)


@pytest.mark.parametrize("world", worlds(2))
def test_token_weights_at_ignored_tokens_may_be_anything(world):
    run_in_world(world, token_weights_at_ignored_tokens)


def token_weights_at_ignored_tokens(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in ((Shard(0), R), (R, Shard(0))):
        for reduction in ("none", "mean"):
            inputs = batch(device, token_weight=True)
            ignored = inputs.target == inputs.ignore_index
            placed = place(inputs, mesh, [tokens], [rows])
            with torch.no_grad():
                weights = torch.where(ignored, torch.nan, inputs.token_weight)
                placed.token_weight = distribute_tensor(weights, mesh, [tokens]).requires_grad_()
            check_same_as_one_process(placed, inputs, reduction=reduction)


@pytest.mark.parametrize("world", ANY)
def test_flattened_sequences_keep_their_tokens_apart(world):
    run_in_world(world, flattened)


def flattened(device):
    """(B, T, D) sharded along T is a strided shard of (B T, D)."""
    size = dist.get_world_size()
    mesh = mesh_of(device, size)
    for plain in ((), ("target",)):
        inputs = batch(device, tokens=16, token_weight=True)
        placed = place(inputs, mesh, [Shard(1)], [R], plain=plain)
        try:
            placed.input.detach().flatten(0, 1)
        except RuntimeError as refusal:
            assert torch.__version__ < "2.12" and "Attempted to flatten" in str(refusal)
            return
        with FlopCounterMode(display=False) as counter, RecordCollectives() as recorded:
            loss = flce_ops.linear_cross_entropy(
                placed.input.flatten(0, 1),
                placed.linear_weight,
                placed.target.flatten(),
                token_weight=placed.token_weight.flatten(),
            )
            loss.backward()
        assert recorded.calls == [("all_reduce", FLOAT)] * 2, recorded.calls
        assert counter.get_total_flops() == 3 * 2 * B * 16 * D * V // size
        exact = run_reference(inputs)
        assert error(full(loss), exact["loss"]) < TOLERANCE
        assert placed.linear_weight.grad.placements == (Partial(),)
        for name in ("input", "linear_weight", "token_weight"):
            assert error(full(getattr(placed, name).grad), exact[name]) < TOLERANCE, name


# ---------------------------------------------------------------- vocabulary sharded


@pytest.mark.parametrize("world", ANY)
@pytest.mark.parametrize(
    "vocab", [V, 64, 9, 3], ids=["prime", "even", "last rank short or empty", "ranks without classes"]
)
def test_sharded_vocabulary_gives_the_loss_and_gradients_of_one_process(world, vocab):
    run_in_world(world, sharded_vocabulary, vocab)


def sharded_vocabulary(device, vocab):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        for extra in ({}, {"bias": True, "weight": True, "token_weight": True}):
            inputs = batch(device, vocab=vocab, **extra)
            placed = place(inputs, mesh, [R], [Shard(0)])
            check_same_as_one_process(placed, inputs, **options)
            assert placed.linear_weight.grad.placements == (Shard(0),)
            assert placed.input.grad.placements == (R,)
    inputs = batch(device, vocab=vocab, normalizer=True, token_weight=True)
    check_same_as_one_process(place(inputs, mesh, [R], [Shard(0)]), inputs)


@pytest.mark.parametrize("world", ANY)
def test_sharded_vocabulary_takes_tokens_in_any_layout(world):
    run_in_world(world, sharded_vocabulary_token_layouts)


def sharded_vocabulary_token_layouts(device):
    mesh = mesh_of(device, dist.get_world_size())
    for placement in (Shard(0), Shard(1)):
        inputs = batch(device, token_weight=True, weight=True)
        placed = place(inputs, mesh, [placement], [Shard(0)])
        check_same_as_one_process(placed, inputs, label_smoothing=0.1)
        assert placed.input.grad.placements == (placement,)
    inputs = batch(device)
    placed = place(inputs, mesh, [R], [Shard(0)])
    placed.input = distribute_tensor(inputs.input.detach(), mesh, [Shard(2)]).requires_grad_()  # hidden features
    check_same_as_one_process(placed, inputs)


@pytest.mark.parametrize("world", worlds(2, 4))
def test_every_argument_may_be_placed_by_itself(world):
    run_in_world(world, mixed_placements)


def mixed_placements(device):
    mesh = mesh_of(device, dist.get_world_size())
    for rows in (R, Shard(0)):
        for tokens, targets, factors in (
            (Shard(0), Shard(1), R),
            (Shard(1), Shard(0), Shard(0)),
            (R, Shard(0), Shard(1)),
            (Shard(1), R, Shard(0)),
        ):
            inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer=True)
            placed = place(inputs, mesh, [tokens], [rows])
            others = {
                "target": targets,
                "token_weight": factors,
                "weight": Shard(0),
                "linear_bias": Shard(0) if rows == R else R,
            }
            for name, placement in others.items():
                whole = getattr(inputs, name)
                moved = distribute_tensor(whole.detach(), mesh, [placement]).requires_grad_(whole.requires_grad)
                setattr(placed, name, moved)
            check_same_as_one_process(placed, inputs, label_smoothing=0.1, z_loss=1e-2)


@pytest.mark.parametrize("world", ANY)
def test_plain_targets_and_other_plain_arguments_count_as_replicated(world):
    run_in_world(world, plain_arguments)


def plain_arguments(device):
    mesh = mesh_of(device, dist.get_world_size())
    plain = ("target", "weight", "token_weight", "normalizer", "linear_bias")
    for tokens, rows in (([R], [Shard(0)]), ([Shard(1)], [Shard(0)]), ([Shard(0)], [R]), ([Shard(1)], [R])):
        inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer=True)
        placed = place(inputs, mesh, tokens, rows, plain=plain)
        check_same_as_one_process(placed, inputs, label_smoothing=0.1)


@pytest.mark.parametrize("world", ANY)
@pytest.mark.parametrize("low", [-1e30, -torch.inf])
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2, "logit_scale": 0.7}, {"reduction": "none"}], ids=str)
def test_padded_classes_behind_a_low_bias_do_not_change_the_loss(world, options, low):
    run_in_world(world, padded_classes, options, low)


def with_padding(inputs: Inputs, ranks: int, low: float) -> Inputs:
    """V padded to a multiple of the ranks, as usual: here so much that the last rank holds nothing else."""
    rows = -(-V // (ranks - 1)) * ranks if ranks > 2 else 2 * V
    device = inputs.linear_weight.device
    weight = torch.cat([inputs.linear_weight.detach(), torch.ones(rows - V, D, device=device)])
    bias = torch.cat([inputs.linear_bias.detach(), torch.full((rows - V,), low, device=device)])
    return Inputs(inputs.input, weight.requires_grad_(), inputs.target, bias.requires_grad_())


def padded_classes(device, options, low):
    size = dist.get_world_size()
    mesh = mesh_of(device, size)
    inputs = batch(device, vocab=V, bias=True)
    exact = run_reference(inputs, **options)
    placed = place(with_padding(inputs, size, low), mesh, [R], [Shard(0)])
    loss = flce_ops.linear_cross_entropy(*placed.args, **options)
    loss.sum().backward()
    assert error(full(loss), exact["loss"]) < TOLERANCE
    assert error(full(placed.input.grad), exact["input"]) < TOLERANCE
    for name in ("linear_weight", "linear_bias"):
        found = full(placed.leaves[name].grad)
        assert error(found[:V], exact[name]) < TOLERANCE and not found[V:].any(), name


@pytest.mark.parametrize("world", worlds(2))
def test_rows_that_are_switched_off_on_every_rank_are_nan_as_in_torch(world):
    run_in_world(world, nothing_but_padding)


def nothing_but_padding(device):
    inputs = batch(device, vocab=64, bias=True)
    inputs.linear_bias.data.fill_(-torch.inf)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    for reduction in ("none", "mean"):
        loss = flce_ops.linear_cross_entropy(*placed.args, reduction=reduction)
        loss.sum().backward()
        found, expected = full(loss), plain_loss(*inputs.args, reduction=reduction)
        assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
        assert full(placed.input.grad).isnan().any()


@pytest.mark.parametrize("world", ANY)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_sharded_vocabulary_sends_numbers_per_token_and_one_input_gradient(world, options):
    run_in_world(world, sharded_vocabulary_traffic, options)


def sharded_vocabulary_traffic(device, options):
    size = dist.get_world_size()
    mesh = mesh_of(device, size)
    tokens = 2 * 8  # even, so that DTensor pads nothing
    numbers = 3 if options else 2  # lse, target_logit and logit_sum of one rank
    N = B * tokens
    for dtype in (torch.float32, torch.bfloat16):
        nbytes = N * D * dtype.itemsize
        for placement, gather, reduction in (
            (R, [], ("all_reduce", nbytes)),
            (Shard(1), [("all_gather", nbytes // size)], ("reduce_scatter", nbytes)),
        ):
            inputs = batch(device, tokens=tokens, dtype=dtype)
            placed = place(inputs, mesh, [placement], [Shard(0)], plain=("target",))
            with RecordCollectives() as recorded:
                loss = flce_ops.linear_cross_entropy(*placed.args, **options)
            kept = N if device.type == "cuda" else int((inputs.target != -100).sum())  # a CPU leaves out the others
            assert recorded.calls == [*gather, ("all_gather", FLOAT * numbers * kept)], recorded.calls
            with RecordCollectives() as recorded:
                loss.backward()
            assert recorded.calls == [reduction], recorded.calls


@pytest.mark.parametrize("world", worlds(2, 4))
def test_chunks_exchange_their_own_tokens_and_leave_one_input_gradient(world):
    run_in_world(world, traffic_of_chunks)


def traffic_of_chunks(device):
    mesh = mesh_of(device, dist.get_world_size())
    for dtype in (torch.float32, torch.bfloat16):
        inputs = to_device(make_inputs((300, D, 509), dtype=dtype, ignored=0.0), device)
        placed = place(inputs, mesh, [R], [Shard(0)])
        with flce_ops.workspace(1):
            with RecordCollectives() as recorded:
                loss = flce_ops.linear_cross_entropy(*placed.args)
            chunks = flce_ops.last_path().chunks
        assert chunks > 1 and [name for name, _ in recorded.calls] == ["all_gather"] * chunks, recorded.calls
        assert sum(nbytes for _, nbytes in recorded.calls) == FLOAT * 2 * 300, recorded.calls
        with RecordCollectives() as recorded:
            loss.backward()
        assert recorded.calls == [("all_reduce", 300 * D * dtype.itemsize)], recorded.calls


@pytest.mark.parametrize("world", SQUARE)
def test_two_mesh_dimensions_send_numbers_per_token_and_one_input_gradient(world):
    run_in_world(world, traffic_of_two_dimensions)


def traffic_of_two_dimensions(device):
    mesh = mesh_of(device, 2, dist.get_world_size() // 2)
    inputs = make_inputs((32, D, V), ignored=0.0)
    placed = place(to_device(inputs, device), mesh, [Shard(0), R], [R, Shard(0)])
    with RecordCollectives() as recorded:
        loss = flce_ops.linear_cross_entropy(*placed.args, softcap=5.0, z_loss=1e-2)
    number = ("all_reduce", FLOAT)  # along dp: the count of valid tokens, the loss
    assert recorded.calls == [number, ("all_gather", FLOAT * 2 * 16), number], recorded.calls
    with RecordCollectives() as recorded:
        loss.backward()
    assert recorded.calls == [("all_reduce", FLOAT * 16 * D)], recorded.calls  # along tp; d linear_weight stays Partial


@pytest.mark.parametrize("world", ANY)
def test_target_outside_the_whole_vocabulary_is_an_index_error_on_every_rank(world):
    if world[0] == "cuda":
        pytest.skip("a device-side assert would end the processes")
    run_in_world(world, target_out_of_range)


def target_out_of_range(device):
    for vocab in (V, 1):  # 1: ranks without classes
        inputs = batch(device, vocab=vocab)
        inputs.target[0, 0] = vocab
        placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
        for function in (flce_ops.linear_cross_entropy, flce_ops.linear_log_probs):
            with pytest.raises(IndexError, match=f"flce_ops: expected target in \\[0, {vocab}\\)"):
                function(*placed.args)


@pytest.mark.parametrize("world", worlds(2))
def test_second_derivatives_through_a_sharded_vocabulary(world):
    run_in_world(world, second_derivatives)


def second_derivatives(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, dtype=torch.float64)
    placed = place(inputs, mesh, [R], [Shard(0)])
    found = squared_gradient_norm(flce_ops.linear_cross_entropy(*placed.args), placed.input)
    exact = squared_gradient_norm(flce_ops.linear_cross_entropy(*inputs.args), inputs.input)
    for leaf, expected in ((placed.input, inputs.input), (placed.linear_weight, inputs.linear_weight)):
        assert error(full(leaf.grad), expected.grad) < TOLERANCE
    assert error(full(found), exact) < TOLERANCE


@pytest.mark.parametrize("world", worlds(2, 4))
@pytest.mark.parametrize("function", [torch.square, torch.exp], ids=["square", "exp"])
def test_second_derivatives_of_functions_of_the_loss(world, function):
    run_in_world(world, second_derivatives_of_a_function, function)


def second_derivatives_of_a_function(device, function):
    """The gradient that reaches the loss then depends on the loss, so it has a derivative of its own."""
    size = dist.get_world_size()
    cases = [(mesh_of(device, size), *layouts) for layouts in (([Shard(0)], [R]), ([R], [Shard(0)]), ([R], [R]))]
    if size == 4:
        cases.append((mesh_of(device, 2, 2), [Shard(0), R], [R, Shard(0)]))
    for mesh, tokens, rows in cases:
        inputs = batch(device, dtype=torch.float64, token_weight=True)
        placed = place(inputs, mesh, tokens, rows)
        loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options)
        found = squared_gradient_norm(function(loss), placed.input)
        exact = squared_gradient_norm(function(plain_loss(*inputs.args, **inputs.options)), inputs.input)
        assert error(full(found), exact) < 1e-12
        for name, expected in inputs.leaves.items():
            assert error(full(placed.leaves[name].grad), expected.grad) < 1e-12, (name, tokens, rows)


@pytest.mark.parametrize("world", worlds(2))
def test_derivatives_of_hidden_states_made_with_the_sharded_head(world):
    run_in_world(world, dependent_operands)


def dependent_operands(device):
    """A path from linear_weight to input is taken once, with and without create_graph."""
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, dtype=torch.float64)
    placed = place(inputs, mesh, [R], [Shard(0)])

    def derivatives(made: Inputs, loss_function) -> list[Tensor]:
        hidden = (made.input @ made.linear_weight.T).tanh() @ made.linear_weight
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(mesh, [R])
        loss = loss_function(hidden, made.linear_weight, made.target)
        (first,) = torch.autograd.grad(loss, made.linear_weight, retain_graph=True)
        (with_graph,) = torch.autograd.grad(loss, made.linear_weight, create_graph=True)
        return [first, with_graph, *torch.autograd.grad(with_graph.square().sum(), made.linear_weight)]

    found = derivatives(placed, flce_ops.linear_cross_entropy)
    names = ["first", "with a graph", "second"]
    if torch.__version__ < TorchVersion("2.13"):  # 2.11 loses a part of it where DTensors are multiplied
        names.remove("second")
    for name, ours, exact in zip(names, found, derivatives(inputs, plain_loss)):
        assert error(full(ours), exact) < 1e-12, (name, error(full(ours), exact))


@pytest.mark.parametrize("world", worlds(2))
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_rows_of_a_sharded_logit_gradient_add_up_to_zero_at_any_magnitude(world, offset):
    run_in_world(world, sums_of_sharded_rows, offset)


def sums_of_sharded_rows(device, offset):
    """Each shard's lse is rounded, to 5e-4 at 10^4, but their shares of the softmax add up to 1."""
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, bias=True)
    inputs.linear_bias.data += offset
    for reduction in ("sum", "none"):
        placed = place(inputs, mesh, [R], [Shard(0)])
        flce_ops.linear_cross_entropy(*placed.args, reduction=reduction).sum().backward()
        assert abs(float(full(placed.linear_bias.grad).double().sum())) / inputs.target.numel() < 5e-7, reduction


@pytest.mark.parametrize("world", worlds(2))
def test_second_derivatives_beside_a_rank_of_padded_classes(world):
    run_in_world(world, second_derivatives_with_padding)


def second_derivatives_with_padding(device):
    inputs = batch(device, dtype=torch.float64, bias=True)
    placed = place(with_padding(inputs, 2, -torch.inf), mesh_of(device, 2), [R], [Shard(0)])
    found = squared_gradient_norm(flce_ops.linear_cross_entropy(*placed.args), placed.input)
    exact = squared_gradient_norm(flce_ops.linear_cross_entropy(*inputs.args), inputs.input)
    assert error(full(found), exact) < TOLERANCE
    for name in ("input", "linear_weight", "linear_bias"):
        grad, expected = full(placed.leaves[name].grad), inputs.leaves[name].grad
        assert error(grad[: len(expected)], expected) < TOLERANCE and not grad[len(expected) :].any(), name


def squared_gradient_norm(loss: Tensor, input: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, input, create_graph=True)
    penalty = gradient.square().sum()
    penalty.backward()
    return penalty.detach()


@pytest.mark.parametrize("world", worlds(2, 4))
def test_sharded_vocabulary_makes_scalar_gradients_in_one_pass_over_several_chunks(world):
    run_in_world(world, one_pass_in_chunks)


def one_pass_in_chunks(device):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        inputs = to_device(make_inputs((300, D, V), bias=True, weight=True, token_weight=True), device)
        placed = place(inputs, mesh, [R], [Shard(0)])
        with flce_ops.workspace(1):
            check_same_as_one_process(placed, inputs, **options)
            path = flce_ops.last_path()
        if options.get("reduction") != "none":
            assert path.op == "linear_cross_entropy_vocab_parallel_with_grad" and path.chunks > 1, path


@pytest.mark.parametrize("world", worlds(2, 4))
def test_a_step_on_a_sharded_vocabulary_is_three_gemm_passes_over_the_shard(world):
    run_in_world(world, count_flops)


def count_flops(device):
    inputs = batch(device, vocab=64)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    with FlopCounterMode(display=False) as counter:
        flce_ops.linear_cross_entropy(*placed.args).backward()
    assert counter.get_total_flops() == 3 * 2 * B * T * D * 64 // dist.get_world_size()


@pytest.mark.parametrize("world", worlds(2))
def test_upstream_gradients_and_a_second_backward_scale_the_saved_gradients_once(world):
    run_in_world(world, second_backward)


def second_backward(device):
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    loss = 3 * flce_ops.linear_cross_entropy(*placed.args)
    loss.backward(retain_graph=True)
    loss.backward()
    exact = run_reference(inputs, torch.tensor(6.0))
    for name, leaf in placed.leaves.items():
        assert error(full(leaf.grad), exact[name]) < TOLERANCE, name


@pytest.mark.parametrize("world", [pytest.param(("cpu", 2), id="interpreter2")])
def test_triton_one_pass_equals_the_aten_one_pass(world):
    if torch.cuda.is_available():
        pytest.skip("the kernels run for real on this machine: the bfloat16 tests")
    run_in_world(world, triton_one_pass)


def triton_one_pass(device):
    from flce_ops.triton.vocab_parallel_with_grad import launch_vocab_parallel_with_grad

    mesh = mesh_of(device, dist.get_world_size())
    layout = layout_of(*(distribute_tensor(torch.zeros(35, 1), mesh, [p]) for p in (R, Shard(0))))
    start, size = layout.vocabulary_range(131)
    for options, scale, off in (
        ({}, 1.0, 131),
        ({"softcap": 4.0, "logit_scale": 0.7, "z_loss": 1e-2}, 1.0, 131),
        ({"label_smoothing": 0.1, "logit_scale": 0.7}, 1.0, 131),
        ({"z_loss": 1e-2}, 60.0, 131),  # losses of hundreds of nats: shards whose share of the softmax underflows
        ({"z_loss": 1e-2}, 1.0, 66),  # a bias of -inf switches off the second rank
    ):
        inputs = make_inputs((140, 35, 131), bias=True, weight=True, requires_grad=False)
        inputs.target.clamp_(max=off - 1)
        inputs.linear_bias[off:] = -torch.inf
        own = slice(start, start + size)
        row_scale = torch.linspace(-0.2, 1.0, 140)
        sharing = {"group": mesh.get_group().group_name, "ranks": mesh.size(), "vocab_start": start}
        arguments = {**sharing, "vocab_size": 131, "output_mask": [True, True, True], **scalars(options)}
        arguments |= dict.fromkeys(("argmax", "lse", "entropy", "log_sum_sq_probs", "mean_logit"), scale == 1.0)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
            if scale != 1.0:
                if dtype == torch.float16:
                    continue
                tolerance = 5e-5  # a float32 logit of hundreds is right to 3e-5
            # float16 stands in for bfloat16, whose exponent has room for the losses above 11 nats that 0.3 keeps away
            input = inputs.input * (0.3 if dtype == torch.float16 else scale)
            operands = (input, inputs.linear_weight[own], inputs.target, inputs.linear_bias[own])
            halved = [x.to(dtype) if x.is_floating_point() else x for x in operands]
            with flce_ops.workspace(1):  # two chunks
                found = launch_vocab_parallel_with_grad(*halved, inputs.weight, row_scale, **arguments)
            doubled = [x.double() if x.is_floating_point() else x for x in (*halved, inputs.weight, row_scale)]
            exact = vocab_parallel_with_grad(*doubled, **arguments)
            for name, ours, truth in zip(("loss", "losses", "input", "weight", "bias"), found, exact):
                assert error(ours, truth) < tolerance, (name, dtype, options, error(ours, truth))
            if dtype == torch.float32:
                assert torch.equal(found[5], exact[5])
                assert all(error(ours, truth) < tolerance for ours, truth in zip(found[6:], exact[6:]))


@pytest.mark.parametrize("world", worlds(2))
def test_a_low_rank_pair_beside_dtensors_is_refused_by_name(world):
    run_in_world(world, low_rank_pair_refused)


def low_rank_pair_refused(device):
    inputs = to_device(make_inputs((16, D, V)), device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    pair = torch.zeros(16, 3, device=device), torch.zeros(V, 3, device=device)
    with pytest.raises(NotImplementedError, match=r"\(LoRA\) on the head is not implemented for DTensors"):
        torch.ops.flce.linear_cross_entropy_low_rank(placed.input, placed.linear_weight, *pair, placed.target)


@pytest.mark.parametrize("world", worlds(2))
def test_one_pass_operator_passes_opcheck(world):
    run_in_world(world, opcheck_one_pass)


def opcheck_one_pass(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = to_device(make_inputs((37, D, 60), bias=True, weight=True, requires_grad=False), device)
    own = slice(30 * mesh.get_local_rank(), 30 * mesh.get_local_rank() + 30)
    row_scale = torch.full((37,), 0.1, device=device)
    operands = (inputs.input, inputs.linear_weight[own], inputs.target, inputs.linear_bias[own], inputs.weight)
    sharing = {"group": mesh.get_group().group_name, "ranks": 2, "vocab_start": own.start, "vocab_size": 60}
    op = torch.ops.flce.linear_cross_entropy_vocab_parallel_with_grad.default
    checks = ("test_schema", "test_faketensor")  # its autograd is VocabParallelWithGrad, above the dispatcher
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        arguments = {**sharing, "output_mask": mask, **scalars({"z_loss": 1e-3}, device)}
        torch.library.opcheck(op, (*operands, row_scale), arguments, test_utils=checks)


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("world", SQUARE)
def test_two_mesh_dimensions_give_the_loss_and_gradients_of_one_process(world):
    run_in_world(world, two_dimensions)


def two_dimensions(device):
    mesh = mesh_of(device, 2, dist.get_world_size() // 2)
    every = {"bias": True, "weight": True, "token_weight": True}
    for tokens in ([Shard(0), R], [Shard(0), Shard(1)], [Shard(1), R], [R, R], [R, Shard(0)]):
        inputs = batch(device, **every)
        placed = place(inputs, mesh, tokens, [R, Shard(0)])
        check_same_as_one_process(placed, inputs, label_smoothing=0.1, z_loss=1e-2)
        assert placed.linear_weight.grad.placements == (Partial() if tokens[0] != R else R, Shard(0))
    for options in OPTIONS:
        inputs = batch(device, **every, normalizer="reduction" not in options)
        check_same_as_one_process(place(inputs, mesh, [Shard(0), R], [R, Shard(0)]), inputs, **options)
    for tokens in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), R]):  # no dimension shards the vocabulary
        inputs = batch(device, **every)
        check_same_as_one_process(place(inputs, mesh, tokens, [R, R]), inputs, label_smoothing=0.1, z_loss=1e-2)
    inputs = batch(device, **every)  # both do
    check_same_as_one_process(place(inputs, mesh, [R, R], [Shard(0), Shard(0)]), inputs, label_smoothing=0.1)


@pytest.mark.parametrize("world", worlds(8, gloo=(8,)))
def test_three_mesh_dimensions_give_the_loss_and_gradients_of_one_process(world):
    run_in_world(world, three_dimensions)


def three_dimensions(device):
    mesh = mesh_of(device, 2, 2, 2)
    inputs = batch(device, weight=True, token_weight=True)
    placed = place(inputs, mesh, [Shard(0), Shard(1), R], [R, R, Shard(0)])
    check_same_as_one_process(placed, inputs, label_smoothing=0.1)


# ---------------------------------------------------------------- without DTensor


@pytest.mark.parametrize("world", ANY)
def test_documented_losses_without_dtensor_are_those_of_one_process(world):
    run_in_world(world, without_dtensor)


def without_dtensor(device):
    page = (Path(__file__).resolve().parent.parent / "docs" / "distributed.md").read_text()
    (recipe,) = re.findall(r"```python\n(def vocab_parallel_losses.*?)```", page, re.DOTALL)
    namespace = {"torch": torch, "dist": dist}
    exec(recipe, namespace)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = -(-V // size)
    inputs = to_device(make_inputs((37, D, V)), device)
    cotangent = torch.linspace(0.5, 1.5, 37, device=device)
    exact = run_reference(inputs, cotangent, reduction="none")
    hidden = inputs.input.detach().requires_grad_()
    shard = inputs.linear_weight.detach()[rank * rows : rank * rows + rows].clone().requires_grad_()
    losses = namespace["vocab_parallel_losses"](hidden, shard, inputs.target, V)
    losses.backward(cotangent)
    dist.all_reduce(hidden.grad)
    assert error(losses, exact["loss"]) < TOLERANCE
    assert error(hidden.grad, exact["input"]) < TOLERANCE
    assert error(shard.grad, exact["linear_weight"][rank * rows : rank * rows + rows]) < TOLERANCE


# ---------------------------------------------------------------- torch.compile, autocast, no_grad, half precision


@pytest.mark.parametrize("world", worlds(2, 8))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_one_graph_gives_the_eager_result(world, backend):
    run_in_world(world, compiled, backend)


def compiled(device, backend):
    mesh = mesh_of(device, dist.get_world_size())
    cases = [([Shard(0)], [R]), ([R], [Shard(0)]), ([Shard(1)], [Shard(0)])]
    for tokens, rows in cases if backend == "aot_eager" else cases[1:2]:
        torch._dynamo.reset()
        loss_function = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend=backend)
        inputs = batch(device, weight=True, token_weight=True)
        placed = place(inputs, mesh, tokens, rows, plain=("weight",))
        check_same_as_one_process(placed, inputs, loss_function, label_smoothing=0.1)


@pytest.mark.parametrize("world", worlds(2))
def test_every_option_compiles_as_one_graph(world):
    run_in_world(world, compiled_options)


def compiled_options(device):
    mesh = mesh_of(device, dist.get_world_size())
    # each option by itself beside a sharded vocabulary; elsewhere the reductions, which communicate, and all at once
    several = [{}, {"reduction": "sum"}, {"reduction": "none"}, OPTIONS[-1]]
    for tokens, rows in ((Shard(0), R), (R, Shard(0)), (Shard(1), Shard(0))):
        for options in OPTIONS if (tokens, rows) == (R, Shard(0)) else several:
            torch._dynamo.reset()
            loss_function = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend="aot_eager")
            inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer="reduction" not in options)
            check_same_as_one_process(place(inputs, mesh, [tokens], [rows]), inputs, loss_function, **options)
    torch._dynamo.reset()
    inputs = batch(device, vocab=1)  # one rank without classes
    check_same_as_one_process(place(inputs, mesh, [R], [Shard(0)]), inputs, loss_function)


@pytest.mark.parametrize("world", worlds(4))
def test_two_mesh_dimensions_compile_as_one_graph(world):
    run_in_world(world, compiled_two_dimensions)


def compiled_two_dimensions(device):
    mesh = mesh_of(device, 2, 2)
    loss_function = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    options = {"softcap": 4.0, "z_loss": 1e-2, "logit_scale": 1.3}
    inputs = batch(device, bias=True, weight=True, token_weight=True)
    placed = place(inputs, mesh, [Shard(0), Shard(1)], [R, Shard(0)])
    check_same_as_one_process(placed, inputs, loss_function, **options)


@pytest.mark.parametrize("world", worlds(2, 4))
def test_no_grad_gives_the_loss(world):
    run_in_world(world, without_gradients)


def without_gradients(device):
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)])):
        inputs = batch(device)
        placed = place(inputs, mesh, tokens, rows)
        with torch.no_grad():
            loss = flce_ops.linear_cross_entropy(*placed.args)
        assert not loss.requires_grad
        assert error(full(loss), run_reference(inputs)["loss"]) < TOLERANCE


@pytest.mark.parametrize("world", worlds(2))
def test_inference_mode_gives_the_loss_with_plain_arguments_too(world):
    run_in_world(world, in_inference_mode)


def in_inference_mode(device):
    mesh = mesh_of(device, dist.get_world_size())
    try:
        leaf = place(batch(device), mesh, [R], [R]).input
        with torch.inference_mode():
            leaf.redistribute(mesh, [R])
    except NotImplementedError:
        assert torch.__version__ < "2.12"  # DTensor itself does not work in inference mode
        return
    for tokens, rows in ((Shard(0), R), (R, Shard(0))):
        inputs = batch(device, bias=True, weight=True, token_weight=True)
        exact = run_reference(inputs)["loss"]
        plain = ("target", "weight", "linear_bias", "token_weight")
        for placed in (place(inputs, mesh, [tokens], [rows]), place(inputs, mesh, [tokens], [rows], plain=plain)):
            head = (placed.input, placed.linear_weight)
            with torch.inference_mode():
                loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options)
                same, metrics = flce_ops.linear_cross_entropy(*placed.args, **placed.options, return_metrics=True)
                probs = flce_ops.linear_log_probs(*head, placed.target, placed.linear_bias)
                divergence = flce_ops.linear_kl_div(*head, *head, target=placed.target)
            assert error(full(loss), exact) < TOLERANCE and torch.equal(full(loss), full(same))
            with torch.no_grad():
                expected = flce_ops.linear_log_probs(*head, placed.target, placed.linear_bias)
            assert torch.equal(full(probs.log_probs), full(expected.log_probs))
            assert full(metrics.argmax).shape == inputs.target.shape and full(divergence).abs() < TOLERANCE


@pytest.mark.parametrize("world", worlds(2))
@pytest.mark.parametrize("rows", [R, Shard(0)], ids=["replicated", "sharded"])
def test_gradients_are_laid_out_as_their_leaves(world, rows):
    run_in_world(world, gradient_strides, rows)


def gradient_strides(device, rows):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, vocab=64)
    exact = run_reference(inputs)
    placed = place(inputs, mesh, [R], [rows])
    transposed = placed.linear_weight.to_local().detach().t().contiguous().t()
    layout = {"run_check": False, "shape": (64, D), "stride": (1, 64)}
    weight = DTensor.from_local(transposed, mesh, [rows], **layout).detach().requires_grad_()
    flce_ops.linear_cross_entropy(placed.input, weight, placed.target).backward()
    for leaf in (placed.input, weight):
        assert leaf.grad.stride() == leaf.stride()
        assert leaf.grad.to_local().stride() == leaf.to_local().stride()
    assert error(full(weight.grad), exact["linear_weight"]) < TOLERANCE


@pytest.mark.parametrize("world", worlds(2))
def test_frozen_head_or_frozen_trunk_get_only_the_gradient_asked_for(world):
    run_in_world(world, frozen)


def frozen(device):
    mesh = mesh_of(device, dist.get_world_size())
    for name in ("input", "linear_weight"):
        for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)])):
            inputs = batch(device)
            getattr(inputs, name).requires_grad_(False)
            check_same_as_one_process(place(inputs, mesh, tokens, rows), inputs)


@pytest.mark.parametrize("world", worlds(2, 4, 8))
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_bfloat16_shards_are_as_accurate_as_one_process(world, autocast):
    run_in_world(world, bfloat16, autocast, False)


@pytest.mark.parametrize("world", worlds(2, 4, 8, gloo=(2,)))  # what is compiled is the same for any number of ranks
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_compiled_bfloat16_shards_are_as_accurate_as_one_process(world, autocast):
    run_in_world(world, bfloat16, autocast, True)


def bfloat16(device, autocast, compiled):
    """On GPUs this is the Triton path."""
    loss_function = flce_ops.linear_cross_entropy
    if compiled:
        loss_function = torch.compile(loss_function, fullgraph=True, backend="aot_eager")
    mesh = mesh_of(device, dist.get_world_size())
    for tokens, rows in (([Shard(0)], [R]), ([R], [Shard(0)]), ([Shard(1)], [Shard(0)])):
        inputs = batch(device, vocab=509, dtype=torch.float32 if autocast else torch.bfloat16)
        exact = run_reference(inputs)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            alone = inputs.clone()
            flce_ops.linear_cross_entropy(*alone.args).backward()
            placed = place(inputs, mesh, tokens, rows)
            loss = loss_function(*placed.args)
        loss.backward()
        assert loss.dtype == torch.float32
        assert error(full(loss), exact["loss"]) < 5e-3
        for name, leaf in placed.leaves.items():
            of_one = error(getattr(alone, name).grad, exact[name])
            # the sum over ranks of gradients already rounded to bfloat16: half a unit in the last place per level
            assert error(full(leaf.grad), exact[name]) <= 2 * of_one + 2e-3 * math.log2(2 * mesh.size()), name


@pytest.mark.parametrize("world", worlds(2, 4, 8))
def test_bfloat16_vocabulary_shards_in_several_chunks_are_as_accurate_as_one_process(world):
    run_in_world(world, bfloat16_in_chunks)


def bfloat16_in_chunks(device):
    mesh = mesh_of(device, dist.get_world_size())
    for options in OPTIONS:
        inputs = make_inputs((300, D, 509), dtype=torch.bfloat16, bias=True, weight=True, token_weight=True)
        inputs = to_device(inputs, device)
        cotangent = torch.ones((300,) if options.get("reduction") == "none" else (), device=device)
        exact = run_reference(inputs, cotangent, **options)
        alone, placed = inputs.clone(), place(inputs, mesh, [R], [Shard(0)])
        with flce_ops.workspace(1):
            flce_ops.linear_cross_entropy(*alone.args, **alone.options, **options).backward(cotangent)
            loss = flce_ops.linear_cross_entropy(*placed.args, **placed.options, **options)
            loss.backward(distribute_tensor(cotangent, mesh, [R]))
        assert error(full(loss), exact["loss"]) < 5e-3
        for name, leaf in placed.leaves.items():
            of_one = error(getattr(alone, name).grad, exact[name])
            allowed = 2 * of_one + 2e-3 * math.log2(2 * mesh.size())
            assert error(full(leaf.grad), exact[name]) <= allowed, (name, options)


@pytest.mark.parametrize("world", worlds(2, 4, 8))
def test_tokens_whose_loss_is_hundreds_of_nats_stay_finite_and_right(world):
    run_in_world(world, extreme_logits)


def extreme_logits(device):
    """The classes of one rank then hold all of the probability, those of the others none."""
    mesh = mesh_of(device, dist.get_world_size())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        inputs = to_device(make_inputs((150, D, V), dtype=dtype), device)
        with torch.no_grad():
            inputs.input.mul_(60.0)
        placed = place(inputs, mesh, [R], [Shard(0)])
        loss = flce_ops.linear_cross_entropy(*placed.args, z_loss=1e-3)
        loss.backward()
        exact = run_reference(inputs, z_loss=1e-3)
        assert error(full(loss), exact["loss"]) < tolerance
        for name, leaf in placed.leaves.items():
            assert error(full(leaf.grad), exact[name]) < tolerance, (name, dtype, error(full(leaf.grad), exact[name]))


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("world", worlds(2))
def test_mistakes_are_refused_with_what_to_do(world):
    run_in_world(world, mistakes)


def learnt_scale_is_refused(device):
    inputs = batch(device)
    placed = place(inputs, mesh_of(device, dist.get_world_size()), [R], [Shard(0)])
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="tensor as logit_scale.*DTensors.*number"):
        flce_ops.linear_cross_entropy(*placed.args, logit_scale=scale)


def mistakes(device):
    learnt_scale_is_refused(device)
    mesh = mesh_of(device, dist.get_world_size())
    other = init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("one", "all"))
    inputs = batch(device, bias=True, weight=True, token_weight=True, normalizer=True)
    whole = place(inputs, mesh, [R], [Shard(0)])
    loss = flce_ops.linear_cross_entropy

    with pytest.raises(ValueError, match="input is a plain tensor.*register_fsdp_forward_method.*VocabParallel"):
        loss(inputs.input, whole.linear_weight, inputs.target)
    with pytest.raises(ValueError, match="linear_weight is a plain tensor.*distribute_tensor"):
        loss(whole.input, inputs.linear_weight, inputs.target)
    with pytest.raises(ValueError, match="another argument is a DTensor.*to_local"):
        loss(inputs.input, inputs.linear_weight, whole.target)
    with pytest.raises(ValueError, match=r"sharded along its features \(D\).*VocabParallel"):
        loss(whole.input, distribute_tensor(inputs.linear_weight.detach(), mesh, [Shard(1)]), inputs.target)
    elsewhere = distribute_tensor(inputs.linear_weight.detach(), other, [R, Shard(0)])
    with pytest.raises(ValueError, match="both must be on one mesh"):
        loss(whole.input, elsewhere, inputs.target)
    for name in ("target", "linear_bias", "weight", "token_weight", "normalizer"):
        on_other_mesh = distribute_tensor(getattr(inputs, name).detach(), other, [R, R])
        arguments = {"target": inputs.target, name: on_other_mesh}
        with pytest.raises(ValueError, match=rf": {name} is .* but input is .*{name}\.full_tensor"):
            loss(whole.input, whole.linear_weight, **arguments)
    tokens = place(inputs, mesh, [Shard(1)], [R])
    with pytest.raises(ValueError, match="the tokens of this rank only.*from_local"):
        loss(tokens.input, tokens.linear_weight, tokens.target.to_local())
    for metrics in (False, True):
        short = distribute_tensor(inputs.target[:, 0].contiguous(), mesh, [R])
        with pytest.raises(ValueError, match="expected target of shape"):
            loss(tokens.input, tokens.linear_weight, short, return_metrics=metrics)
    for numbers in (V * D, 0):  # DeepSpeed ZeRO-3 leaves an empty one
        with pytest.raises(ValueError, match="expected linear_weight of shape .*1-D weight is what FSDP1 leaves"):
            loss(inputs.input, inputs.linear_weight.detach().flatten()[:numbers], inputs.target)


@pytest.mark.parametrize("world", worlds(2))
def test_shards_that_are_quantized_are_refused_by_name(world):
    run_in_world(world, quantized_shards)


def quantized_shards(device):
    mesh = mesh_of(device, dist.get_world_size())
    for rows in (Shard(0), R):
        whole = place(batch(device), mesh, [R], [rows])
        weight = whole.linear_weight.detach()
        shard = Quantized(weight.to_local())
        shards = DTensor.from_local(shard, mesh, [rows], run_check=False, shape=weight.shape, stride=weight.stride())
        words = "linear_weight to be a dense tensor, got a quantized one"
        for function in (flce_ops.linear_cross_entropy, flce_ops.linear_log_probs):
            with pytest.raises(TypeError, match=f"{function.__name__}: expected {words}"):
                function(whole.input, shards, whole.target)
        with pytest.raises(TypeError, match=f"linear_kl_div: expected {words}"):
            flce_ops.linear_kl_div(whole.input, shards, whole.input.detach(), weight)
        with pytest.raises(TypeError, match="linear_kl_div: expected teacher_weight to be a dense tensor"):
            flce_ops.linear_kl_div(whole.input, weight, whole.input.detach(), shards)


@pytest.mark.parametrize("world", worlds(4))
def test_a_process_outside_the_mesh_is_told_so(world):
    run_in_world(world, outside_the_mesh)


def outside_the_mesh(device):
    pair = DeviceMesh(device.type, [0, 1], mesh_dim_names=("pair",))
    inputs = batch(device)
    for tokens, rows in ((Shard(0), R), (R, Shard(0))):
        operands = (distribute_tensor(inputs.input.detach(), pair, [tokens], src_data_rank=None),)
        operands += (distribute_tensor(inputs.linear_weight.detach(), pair, [rows], src_data_rank=None),)
        if dist.get_rank() < 2:
            loss = flce_ops.linear_cross_entropy(*operands, inputs.target)
            assert error(full(loss), run_reference(inputs)["loss"]) < TOLERANCE
            continue
        with pytest.raises(ValueError, match="not part of the mesh"):
            flce_ops.linear_cross_entropy(*operands, inputs.target)


@pytest.mark.parametrize("world", worlds(2))
def test_import_of_the_package_leaves_dtensor_alone(world):
    run_in_world(world, import_is_lazy)


def import_is_lazy(device):
    import subprocess
    import sys

    code = (
        "import sys, flce_ops; assert 'torch.distributed.tensor' not in sys.modules; "
        "flce_ops.VocabParallel(); assert 'torch.distributed.tensor' in sys.modules"
    )
    if dist.get_rank() == 0:
        subprocess.run([sys.executable, "-c", code], check=True)
