"""main_grad: backward adds the gradient of linear_weight to a buffer; forward leaves the buffer unchanged."""

# N tokens, D hidden, V vocabulary

import contextlib
import functools

import pytest
import torch
from in_worlds import in_worlds
from inputs import RAGGED, make_inputs
from process_pool import worlds
from reference_loss import error, plain_loss, run, run_reference
from test_checkpoint import COMPILABLE, WAYS
from test_memory import MiB, peak_on_cpu, peak_on_cuda
from test_numerics import ARGUMENTS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flce_ops

N, D, V = 40, 16, 61


def buffer_of(inputs, dtype=None):
    """A buffer of nonzero numbers, which shows if something is written instead of added."""
    return torch.randn_like(inputs.linear_weight.detach(), dtype=dtype)


def added(main_grad, inputs, function=flce_ops.linear_cross_entropy, cotangent=None, **options):
    """The results of `run`, with linear_weight's gradient replaced by what was added to main_grad."""
    before = main_grad.clone()
    inputs = inputs.clone()
    loss = function(*inputs.args, **inputs.options, main_grad=main_grad, **options)
    assert torch.equal(main_grad, before)
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent.to(loss.dtype))
    found = {"loss": loss.detach(), **{name: leaf.grad for name, leaf in inputs.leaves.items()}}
    assert found["linear_weight"] is None
    return found | {"linear_weight": main_grad.double() - before.double()}


# Tolerance beyond autograd's own error, or plain torch's: twice the excess that 8 seeds showed on the CPU. For float16
# it covers sums in another order on CUDA.
SLACK = {torch.float64: 8e-16, torch.float32: 4e-7, torch.bfloat16: 8e-4, torch.float16: 1e-5}


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_gradient_is_added_and_the_others_are_autograds(device, name, reduction, dtype, poisoned_memory):
    made, options = ARGUMENTS[name]
    made = made | {"normalizer": made.get("normalizer", False) and reduction == "mean"}
    inputs = make_inputs((70, 33, 123), device=device, dtype=dtype, **made)
    cotangent = torch.randn(70 if reduction == "none" else (), device=device)
    exact = run_reference(inputs, cotangent, reduction=reduction, **options)
    # autograd's gradients of a scalar loss are made in forward; they, or plain torch's, may be exact by luck
    usual = run(flce_ops.linear_cross_entropy, inputs, cotangent, reduction=reduction, **options)
    plain = run(plain_loss, inputs, cotangent, reduction=reduction, **options)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    main_grad = (exact["linear_weight"].std() * buffer_of(inputs, torch.float64)).to(sums)
    found = added(main_grad, inputs, cotangent=cotangent, reduction=reduction, **options)
    assert flce_ops.last_path().op == "linear_cross_entropy_backward_"
    for key, result in found.items():
        theirs = max(error(other[key], exact[key]) for other in (usual, plain))
        assert error(result, exact[key]) <= 1.1 * theirs + SLACK[dtype], key


@pytest.mark.parametrize("rows", [0, 128, 256])
def test_tokens_whose_logits_are_saved_take_three_passes_and_others_four(rows):
    inputs = make_inputs(RAGGED)
    N, D, V = RAGGED
    row_bytes = 2 * flce_ops.math.options.saved_columns(V, torch.float32)
    main_grad = buffer_of(inputs)
    with (
        flce_ops.workspace(1 << 20, retained=-(-rows // 128) * 128 * row_bytes),
        FlopCounterMode(display=False) as counter,
    ):
        flce_ops.linear_cross_entropy(*inputs.args, main_grad=main_grad).backward()
    retained = min(-(-rows // 128) * 128, N)
    assert counter.get_total_flops() == 2 * D * V * (4 * N - retained)
    said = flce_ops.last_path().reason
    assert f"grad_linear_weight added to main_grad in torch.float32, logits of {retained} of {N} tokens saved" in said


def test_eight_micro_batches_are_summed_with_less_error_than_in_half(device):
    """With bfloat16 operands the buffer is float32, while .grad is rounded for each micro-batch."""
    inputs = make_inputs((1024, D, V), device=device, dtype=torch.bfloat16)
    exact = run_reference(inputs, reduction="sum")["linear_weight"]
    main_grad, weight = torch.zeros_like(exact, dtype=torch.float32), inputs.linear_weight
    for input, target in zip(inputs.input.split(128), inputs.target.split(128)):
        flce_ops.linear_cross_entropy(input, weight, target, reduction="sum", main_grad=main_grad).backward()
        assert weight.grad is None
    for input, target in zip(inputs.input.split(128), inputs.target.split(128)):
        flce_ops.linear_cross_entropy(input, weight, target, reduction="sum").backward()
    assert error(main_grad, exact) < 0.8 * error(weight.grad, exact)


def test_a_half_buffer_is_rounded_once_a_chunk_on_a_gpu_and_once_a_micro_batch_on_a_cpu(device):
    inputs = make_inputs((2048, 8, 300), device=device, dtype=torch.bfloat16)
    exact = run_reference(inputs)["linear_weight"]
    rounded_once = error(exact.bfloat16(), exact)
    main_grad = torch.zeros_like(inputs.linear_weight)
    with flce_ops.workspace(1 << 18):
        found = added(main_grad, inputs)
        chunks = flce_ops.last_path().chunks
        assert chunks > 8
        usual = run(flce_ops.linear_cross_entropy, inputs)
    rounded = rounded_once * (chunks**0.5 if device == "cuda" else 1.0)
    assert error(found["linear_weight"], exact) <= error(usual["linear_weight"], exact) + rounded


@pytest.mark.parametrize("ignored", [0.15, 1.0])
def test_tokens_that_do_not_count_add_nothing(device, ignored):
    inputs = make_inputs((N, D, V), device=device, ignored=ignored)
    if ignored == 1.0:
        inputs.target.fill_(-100)
    with torch.no_grad():
        inputs.input[inputs.target == -100] = torch.nan
    main_grad = buffer_of(inputs)
    before = main_grad.clone()
    flce_ops.linear_cross_entropy(*inputs.args, reduction="sum", main_grad=main_grad).backward()
    assert torch.equal(main_grad, before) if ignored == 1.0 else main_grad.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpointed_region_adds_once(device, way):
    inputs = make_inputs((N, D, V), device=device)

    def region(*args, main_grad):
        block = functools.partial(flce_ops.linear_cross_entropy, main_grad=main_grad)
        return checkpoint(block, *args, **WAYS[way])

    found = added(buffer_of(inputs), inputs, region)
    assert error(found["linear_weight"], run_reference(inputs)["linear_weight"]) < 3e-6


def test_every_backward_adds_and_one_that_asks_for_other_gradients_does_not(device):
    inputs = make_inputs((N, D, V), device=device)
    exact = run_reference(inputs)["linear_weight"]
    main_grad = torch.zeros_like(inputs.linear_weight)
    loss = flce_ops.linear_cross_entropy(*inputs.args, main_grad=main_grad)
    (of_input,) = torch.autograd.grad(loss, inputs.input, retain_graph=True)
    assert not main_grad.any() and of_input.any()
    loss.backward(retain_graph=True)
    loss.backward(inputs=[inputs.linear_weight], retain_graph=True)
    assert error(main_grad, 2 * exact) < 1e-6
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(loss, inputs.linear_weight)


@pytest.mark.parametrize("wanted", ["linear_weight alone", "linear_weight and linear_bias"])
def test_of_a_frozen_trunk(device, wanted):
    inputs = make_inputs((N, D, V), device=device, bias=True)
    inputs.input.requires_grad_(False)
    inputs.linear_bias.requires_grad_("bias" in wanted)
    found, exact = added(torch.zeros_like(inputs.linear_weight), inputs), run_reference(inputs)
    assert found.keys() == exact.keys() and all(error(found[name], exact[name]) < 1e-6 for name in exact)


def test_forwards_may_come_before_the_backwards(device):
    """A pipeline runs in this order. If autograd saved the buffer, the second backward would be refused, because the
    first one changed it.
    """
    inputs = make_inputs((N, D, V), device=device)
    main_grad = torch.zeros_like(inputs.linear_weight)
    losses = [flce_ops.linear_cross_entropy(*inputs.args, main_grad=main_grad) for _ in range(2)]
    # this product saves the buffer, so its backward is refused after the change
    other = (inputs.linear_weight * main_grad).sum()
    for loss in losses:
        loss.backward()
    assert error(main_grad, 2 * run_reference(inputs)["linear_weight"]) < 1e-6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_autocast_metrics_and_a_learnt_scale(device):
    inputs = make_inputs((N, D, V), device=device, bias=True)
    main_grad, scale = torch.zeros_like(inputs.linear_weight), torch.tensor(0.7, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        options = {"logit_scale": scale, "return_metrics": True}
        loss, _ = flce_ops.linear_cross_entropy(*inputs.args, main_grad=main_grad, **options)
        loss.backward()
        made, scale.grad = scale.grad, None
        loss, _ = flce_ops.linear_cross_entropy(*inputs.clone().args, **options)
        loss.backward()
    exact = run_reference(inputs, logit_scale=0.7)["linear_weight"]
    assert error(main_grad, exact) < 2e-2 and error(made, scale.grad) < 1e-2 and inputs.linear_weight.grad is None


def test_no_gradient_of_linear_weight_is_held_beside_the_buffer(device):
    """The step's peak has no matrix of the weight's size, while autograd's has one."""
    inputs = make_inputs((64, 512, 4001), device=device)
    main_grad = torch.zeros_like(inputs.linear_weight)

    def step(**options):
        flce_ops.linear_cross_entropy(*inputs.args, **options).backward()
        # deleted here, so that the next step's peak does not start with these gradients
        inputs.input.grad = inputs.linear_weight.grad = None

    peak_of = peak_on_cpu if device == "cpu" else peak_on_cuda
    with flce_ops.workspace(MiB):
        ours, autograds = (peak_of(functools.partial(step, **options)) for options in ({"main_grad": main_grad}, {}))
    assert ours <= autograds - main_grad.nbytes + 2 * MiB  # saved logits, as large as float32 ones: 1 MiB


# ---------------------------------------------------------------- torch.compile


def compiled_loss(input, linear_weight, target, main_grad):
    return 2 * flce_ops.linear_cross_entropy(torch.sin(input), linear_weight, target, main_grad=main_grad)


def test_compiled_steps_add_what_eager_ones_add():
    """The backward graph changes an input of the graph. create_graph is refused."""
    inputs = make_inputs((N, D, V))
    args = inputs.args[:3]
    ours, eager = buffer_of(inputs), buffer_of(inputs)
    ours.copy_(eager)
    before, place = ours.clone(), ours.data_ptr()
    compiled = torch.compile(compiled_loss, fullgraph=True)
    for _ in range(2):
        compiled(*args, ours).backward()
        compiled_loss(*args, eager).backward()
    assert error(ours, eager) < 1e-7 and ours.data_ptr() == place and inputs.linear_weight.grad is None
    assert error(ours - before, eager - before) < 1e-6
    with pytest.raises(RuntimeError, match="mutations .* in backward for create_graph=True"):
        torch.autograd.grad(compiled(*args, ours), inputs.input, create_graph=True)


def loss_beside_a_view(input, linear_weight, target, memory):
    """The buffer is part of a larger one, as in Megatron."""
    return flce_ops.linear_cross_entropy(torch.sin(input), linear_weight, target, main_grad=memory[3:])


def forwards_first(loss, args, buffer):
    for made in [loss(*args, buffer), loss(*args, buffer)]:
        made.backward()


def zeroed_between(loss, args, buffer):
    made = loss(*args, buffer)
    buffer.zero_()
    made.backward()


@pytest.mark.parametrize("schedule", [forwards_first, zeroed_between])
@pytest.mark.parametrize("function", [compiled_loss, loss_beside_a_view])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_buffer_that_changes_between_a_compiled_forward_and_its_backward_is_never_wrong(backend, function, schedule):
    """A compiled graph saves the buffer, and torch checks its version. Inductor's graph need not raise the version of a
    view that its backward changes; the sum is right then. An eager loss takes every schedule.
    """
    inputs = make_inputs((N, D, V))
    ours = torch.randn(V + 3 if function is loss_beside_a_view else V, D)
    eager = ours.clone()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    schedule(function, inputs.args[:3], eager)
    unchecked = backend == "inductor" and function is loss_beside_a_view and schedule is forwards_first
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with contextlib.nullcontext() if unchecked else refused:
        schedule(compiled, inputs.args[:3], ours)
    assert not unchecked or error(ours, eager) < 1e-6


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("in_the_graph", [True, False])
def test_another_reader_of_the_buffer_is_refused_beside_a_compiled_loss(backend, in_the_graph):
    """As in eager mode: the saved buffer has changed."""
    inputs = make_inputs((N, D, V))
    args, main_grad = inputs.args[:3], torch.zeros_like(inputs.linear_weight)

    def with_reader(*args):
        return compiled_loss(*args) + (args[1] * args[3]).sum()

    compiled = torch.compile(with_reader if in_the_graph else compiled_loss, fullgraph=True, backend=backend)
    first = compiled(*args, main_grad)
    second = compiled(*args, main_grad) if in_the_graph else (inputs.linear_weight * main_grad).sum()
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("way", COMPILABLE)
def test_a_compiled_checkpoint_adds_once(way):
    inputs = make_inputs((N, D, V))
    main_grad = torch.zeros_like(inputs.linear_weight)
    region = lambda *args: checkpoint(compiled_loss, *args, **WAYS[way])  # noqa: E731
    torch.compile(region, fullgraph=True, backend="aot_eager")(*inputs.args[:3], main_grad).backward()
    expected = torch.zeros_like(main_grad)
    compiled_loss(*inputs.clone().args[:3], expected).backward()
    assert error(main_grad, expected) < 1e-6


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("main_grad", "error_type", "match"),
    [
        (lambda w: torch.zeros_like(w, requires_grad=True), ValueError, "main_grad without requires_grad"),
        (lambda w: torch.zeros(V, D + 1), ValueError, r"main_grad contiguous and of linear_weight's shape \(61, 16\)"),
        (lambda w: torch.zeros(D, V).T, ValueError, "main_grad contiguous .* strides"),
        (lambda w: torch.zeros(V, D, dtype=torch.float64), TypeError, "main_grad in torch.float32, got torch.float64"),
        (lambda w: torch.zeros(V, D, dtype=torch.int32), TypeError, "main_grad in torch.float32, got torch.int32"),
        (lambda w: torch.zeros(V, D, device="meta"), ValueError, "main_grad on linear_weight's device cpu, got meta"),
        (lambda w: torch.zeros(V, D).to_sparse(), TypeError, "expected main_grad to be a dense tensor"),
        (lambda w: w.detach(), ValueError, "main_grad in memory of its own, got memory that linear_weight shares"),
    ],
)
def test_a_buffer_that_cannot_be_added_to_is_refused(main_grad, error_type, match):
    inputs = make_inputs((N, D, V))
    for function in (flce_ops.linear_cross_entropy, functools.partial(flce_ops.linear_cross_entropy, reduction="none")):
        with pytest.raises(error_type, match=f"^linear_cross_entropy: .*{match}"):
            function(*inputs.args, main_grad=main_grad(inputs.linear_weight))


def test_neighbours_in_one_memory_are_taken_and_overlaps_are_not():
    memory = torch.randn(2 * V * D)
    weight, main_grad = (part.view(V, D) for part in memory.split(V * D))
    weight.requires_grad_()
    input, target = torch.randn(N, D), torch.randint(V, (N,))
    flce_ops.linear_cross_entropy(input, weight, target, main_grad=main_grad).backward()
    with pytest.raises(ValueError, match="memory that linear_weight shares"):
        flce_ops.linear_cross_entropy(input, weight, target, main_grad=memory[D : D + V * D].view(V, D))
    with pytest.raises(ValueError, match="memory that input shares"):
        flce_ops.linear_cross_entropy(main_grad[:N], weight, target, main_grad=main_grad)


def test_what_has_no_gradient_to_add_is_refused():
    inputs = make_inputs((N, D, V))
    input, weight, target, _ = inputs.args
    main_grad = buffer_of(inputs)
    with pytest.raises(ValueError, match="takes the gradient of linear_weight, which requires none"):
        flce_ops.linear_cross_entropy(input, weight.detach(), target, main_grad=main_grad)
    with torch.no_grad():
        flce_ops.linear_cross_entropy(input, weight.detach(), target, main_grad=main_grad)
    with pytest.raises(NotImplementedError, match="main_grad is not implemented for a target of class probabilities"):
        flce_ops.linear_cross_entropy(input, weight, torch.rand(N, V), main_grad=main_grad)
    with pytest.raises(NotImplementedError, match="main_grad is not implemented for a K-dimensional loss"):
        flce_ops.linear_cross_entropy(input, weight[:, None], target[:, None], main_grad=main_grad[:, None])


def test_derivatives_of_what_was_added_are_refused():
    inputs = make_inputs((N, D, V))
    input, weight, target, _ = inputs.args
    main_grad = buffer_of(inputs)
    before = main_grad.clone()
    loss = flce_ops.linear_cross_entropy(input, weight, target, main_grad=main_grad)
    with pytest.raises(NotImplementedError, match=r"adds to main_grad cannot be differentiated \(create_graph=True\)"):
        torch.autograd.grad(loss, weight, create_graph=True)
    of_input = functools.partial(
        flce_ops.linear_cross_entropy, linear_weight=weight, target=target, main_grad=main_grad
    )
    with pytest.raises(NotImplementedError, match="main_grad is not implemented under torch.func"):
        torch.func.grad(of_input)(input)
    with pytest.raises(NotImplementedError, match="main_grad is not implemented under torch.func"):
        torch.func.vmap(lambda input: of_input(input))(input.expand(2, N, D))
    assert torch.equal(main_grad, before)


# ---------------------------------------------------------------- data parallelism


class Head(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.scale = nn.Parameter(weight.new_ones(weight.shape[1]))

    def forward(self, input, target, main_grad):
        options = {} if main_grad is None else {"main_grad": main_grad}
        return flce_ops.linear_cross_entropy(input * self.scale, self.weight, target, reduction="sum", **options)


@in_worlds(worlds(2, gloo=(2,)))
def test_buffers_of_data_parallel_ranks_sum_to_the_gradient(device):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = make_inputs((8 * ranks, D, V), device=device)
    weight = inputs.linear_weight.detach()
    ddp = DistributedDataParallel(Head(weight))
    micro_batches = list(zip(inputs.input.detach().split(4), inputs.target.split(4)))[rank::ranks]
    exact = run_reference(inputs, reduction="sum")["linear_weight"]
    of_ddp = torch.zeros_like(weight)
    for input, target in micro_batches:
        ddp(input, target, of_ddp).backward()
    dist.all_reduce(of_ddp)
    assert error(of_ddp, exact) < 1e-6
    assert ddp.module.weight.grad is None or not ddp.module.weight.grad.any()

    sharded = Head(weight)
    fully_shard(sharded)
    of_fsdp = torch.zeros_like(weight)  # for the gathered weight, which is a plain tensor inside the module's forward
    for input, target in micro_batches:
        sharded(input, target, of_fsdp).backward()
    dist.all_reduce(of_fsdp)
    assert error(of_fsdp, exact) < 1e-6 and sharded.weight.grad is None
    assert error(sharded.scale.grad.full_tensor() * ranks, ddp.module.scale.grad * ranks) < 1e-5
    with pytest.raises(NotImplementedError, match="main_grad beside DTensors is not implemented"):
        flce_ops.linear_cross_entropy(*micro_batches[0][:1], sharded.weight, target, main_grad=of_fsdp)
