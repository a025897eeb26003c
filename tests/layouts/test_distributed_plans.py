"""parallelize_module plans for the modules: VocabParallel, and torch's ColwiseParallel."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from collectives import RecordCollectives
from in_worlds import in_worlds
from process_pool import worlds
from reference_loss import dense_logits, error, run_reference
from sharded_inputs import ANY, FLOAT, TOLERANCE, D, V, batch, full, mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import flce_ops

TOKENS = 16  # tokens of one sequence; sequence parallelism divides them evenly


def owner_with_weights(module, inputs):
    """The module in a parent module, with the weights of `inputs`. The caller chooses V."""
    linear = getattr(module, "linear", module)
    with torch.no_grad():
        linear.weight.copy_(inputs.linear_weight)
        if linear.bias is not None:
            linear.bias.copy_(inputs.linear_bias)
    return nn.ModuleDict({"head": module})


def local_part(tensor: torch.Tensor, layout: Placement) -> torch.Tensor:  # (B, T, ...) -> (B, T / size, ...) or all
    parts = dist.get_world_size() if layout == Shard(1) else 1
    return tensor.detach().chunk(parts, 1)[dist.get_rank() % parts].clone()


def assert_exact(loss, hidden, layout: Placement, linear, exact):
    """Checks the loss over all ranks, and after backward the gradients of this rank's `hidden` and of `linear`."""
    assert error(loss, exact["loss"]) < TOLERANCE
    assert error(hidden.grad, local_part(exact["input"], layout)) < TOLERANCE
    assert error(full(linear.weight.grad), exact["linear_weight"]) < TOLERANCE


@in_worlds(ANY)
@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["replicated input", "sequence parallel"])
def test_vocab_parallel_gives_the_loss_and_gradients_of_one_process(device, layout):
    mesh = mesh_of(device, dist.get_world_size())
    options = {"label_smoothing": 0.1, "softcap": 6.0, "z_loss": 1e-3}
    for head in (True, False):
        for target_layout in {Replicate(), layout}:
            inputs = batch(device, tokens=TOKENS, bias=True, weight=True, token_weight=True)
            if head:
                module = flce_ops.LinearCrossEntropyHead(D, V, bias=True, device=device, **options)
            else:
                module = flce_ops.LinearCrossEntropyLoss(
                    D, V, bias=True, device=device, weight=inputs.weight, **options
                )
            parent = owner_with_weights(module, inputs)
            plan = flce_ops.VocabParallel(input_layouts=layout, target_layouts=target_layout)
            parallelize_module(parent, mesh, {"head": plan})
            hidden = local_part(inputs.input, layout).requires_grad_()
            target = local_part(inputs.target, target_layout)
            token_weight = local_part(inputs.token_weight, target_layout)
            more = {"weight": inputs.weight} if head else {}
            loss = parent["head"](hidden, target, token_weight=token_weight, **more)
            assert type(loss) is torch.Tensor
            loss.backward()
            exact = run_reference(inputs, **options)
            linear = module if head else module.linear
            assert_exact(loss, hidden, layout, linear, exact)
            assert error(full(linear.bias.grad), exact["linear_bias"]) < TOLERANCE
            assert linear.weight.placements == (Shard(0),)


@in_worlds(ANY)
@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["replicated input", "sequence parallel"])
def test_vocab_parallel_takes_normalizers_and_returns_metrics_and_losses_per_token(device, layout):
    mesh = mesh_of(device, dist.get_world_size())

    def sharded(module, inputs):
        parent = owner_with_weights(module, inputs)
        parallelize_module(parent, mesh, {"head": flce_ops.VocabParallel(input_layouts=layout)})
        return module, local_part(inputs.input, layout)

    inputs = batch(device, tokens=TOKENS, token_weight=True, normalizer=True)
    head, hidden = sharded(flce_ops.LinearCrossEntropyHead(D, V, z_loss=1e-2, device=device), inputs)
    options = {"token_weight": inputs.token_weight, "normalizer": inputs.normalizer}
    exact = run_reference(inputs, z_loss=1e-2)["loss"]
    assert error(head(hidden, inputs.target, **options), exact) < TOLERANCE
    loss, metrics = head(hidden, inputs.target, **options, return_metrics=True)
    assert error(loss, exact) < TOLERANCE
    valid = inputs.target != inputs.ignore_index
    largest = dense_logits(inputs.input, inputs.linear_weight).argmax(-1).where(valid, -1)
    assert torch.equal(metrics.argmax, largest)  # over all tokens; a plain tensor, as the loss is
    right = (largest == inputs.target)[valid].double().mean()
    assert error(metrics.token_accuracy, right) < TOLERANCE
    _, named = head(hidden, inputs.target, **options, return_metrics=["is_top1"])
    assert torch.equal(named["is_top1"], valid & (largest == inputs.target))

    inputs = batch(device, tokens=TOKENS)
    per_token, hidden = sharded(flce_ops.LinearCrossEntropyLoss(D, V, reduction="none", device=device), inputs)
    exact = run_reference(inputs, torch.ones(inputs.target.shape, device=device), reduction="none")["loss"]
    assert error(per_token(hidden, inputs.target), exact) < TOLERANCE


@in_worlds(ANY)
def test_colwise_parallel_on_the_head_takes_targets_by_keyword(device):
    mesh = mesh_of(device, dist.get_world_size())
    for layout in (Replicate(), Shard(1)):
        inputs = batch(device, tokens=TOKENS)
        parent = owner_with_weights(flce_ops.LinearCrossEntropyHead(D, V, device=device), inputs)
        plan = ColwiseParallel(input_layouts=layout, output_layouts=Replicate())
        parallelize_module(parent, mesh, {"head": plan})
        hidden = local_part(inputs.input, layout).requires_grad_()
        loss = parent["head"](hidden, target=inputs.target)
        loss.backward()
        exact = run_reference(inputs)
        assert_exact(loss, hidden, layout, parent["head"], exact)


@in_worlds(worlds(2, 4))
def test_without_targets_the_sharded_head_returns_logits(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, tokens=TOKENS)
    exact = dense_logits(inputs.input, inputs.linear_weight, softcap=6.0)
    head = flce_ops.LinearCrossEntropyHead(D, V, softcap=6.0, device=device)
    parent = owner_with_weights(head, inputs)
    parallelize_module(parent, mesh, {"head": flce_ops.VocabParallel()})
    assert error(head(inputs.input), exact) < TOLERANCE
    head = flce_ops.LinearCrossEntropyHead(D, V, softcap=6.0, device=device)
    parent = owner_with_weights(head, inputs)
    parallelize_module(parent, mesh, {"head": flce_ops.VocabParallel(logits_layouts=Shard(-1), use_local_output=False)})
    logits = head(inputs.input)
    assert isinstance(logits, DTensor) and logits.placements[0].is_shard()
    assert error(full(logits), exact) < TOLERANCE


@in_worlds(worlds(2, 4))
def test_a_sharded_head_compiles_as_one_graph_and_under_checkpoint(device):
    mesh = mesh_of(device, dist.get_world_size())
    inputs = batch(device, tokens=TOKENS)
    exact = run_reference(inputs)
    for compiled, checkpointed in ((True, False), (False, True), (True, True)):
        torch._dynamo.reset()
        head = flce_ops.LinearCrossEntropyHead(D, V, device=device)
        parent = owner_with_weights(head, inputs)
        parallelize_module(parent, mesh, {"head": flce_ops.VocabParallel(input_layouts=Shard(1))})
        hidden = local_part(inputs.input, Shard(1)).requires_grad_()

        def step(hidden, target, head=head, checkpointed=checkpointed):
            hidden = hidden * 1.0
            if checkpointed:
                return checkpoint(head, hidden, target, use_reentrant=False)
            return head(hidden, target)

        if compiled:
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        loss = step(hidden, inputs.target)
        loss.backward()
        assert_exact(loss, hidden, Shard(1), head, exact)


@in_worlds(worlds(2))
def test_sharded_loss_modules_and_colwise_heads_compile_as_one_graph(device):
    mesh = mesh_of(device, dist.get_world_size())
    options = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}
    for colwise in (False, True):
        torch._dynamo.reset()
        inputs = batch(device, tokens=TOKENS, bias=True, weight=True)
        if colwise:
            module = linear = flce_ops.LinearCrossEntropyHead(D, V, bias=True, device=device, **options)
            plan = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        else:
            module = flce_ops.LinearCrossEntropyLoss(D, V, bias=True, device=device, weight=inputs.weight, **options)
            linear, plan = module.linear, flce_ops.VocabParallel(input_layouts=Shard(1))
        parallelize_module(owner_with_weights(module, inputs), mesh, {"head": plan})
        more = {"weight": inputs.weight} if colwise else {}
        step = torch.compile(
            lambda x, target, module=module, more=more: module(x, target=target, **more),
            fullgraph=True,
            backend="aot_eager",
        )
        hidden = local_part(inputs.input, Shard(1)).requires_grad_()
        loss = step(hidden, inputs.target)
        loss.backward()
        exact = run_reference(inputs, **options)
        assert_exact(loss, hidden, Shard(1), linear, exact)


@in_worlds(worlds(2))
def test_vocab_parallel_moves_nothing_of_the_size_of_logits_or_weight(device):
    size = dist.get_world_size()
    inputs = batch(device, tokens=TOKENS)
    head = flce_ops.LinearCrossEntropyHead(D, V, device=device)
    parent = owner_with_weights(head, inputs)
    parallelize_module(parent, mesh_of(device, size), {"head": flce_ops.VocabParallel(input_layouts=Shard(1))})
    hidden = local_part(inputs.input, Shard(1)).requires_grad_()
    with RecordCollectives() as recorded:
        head(hidden, inputs.target).backward()
    N = inputs.target.numel()
    valid = N if device.type == "cuda" else int((inputs.target != -100).sum())  # a CPU leaves out ignored tokens
    gathered = [("all_gather", FLOAT * N * D // size), ("all_gather", FLOAT * 3 * valid)]
    expected = [*gathered, ("reduce_scatter", FLOAT * N * D)]
    assert recorded.calls == expected, recorded.calls


@in_worlds(worlds(4))
def test_vocab_parallel_refuses_what_it_cannot_shard(device):
    mesh = mesh_of(device, dist.get_world_size())
    with pytest.raises(TypeError, match="expected a LinearCrossEntropyLoss or LinearCrossEntropyHead.*ColwiseParallel"):
        parallelize_module(nn.Linear(D, V), mesh, flce_ops.VocabParallel())
    with pytest.raises(ValueError, match="1-D mesh"):
        flce_ops.VocabParallel()._apply(flce_ops.LinearCrossEntropyHead(D, V), mesh_of(device, 2, 2))
