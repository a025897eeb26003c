"""Ignored tokens cost nothing on a CPU. The contents of their rows, even nan, have no effect."""

# N tokens, D hidden, V vocabulary

import functools

import pytest
import torch
import torch.distributed as dist
from inputs import make_inputs
from process_pool import run_in_world
from reference_divergence import KINDS
from reference_loss import error
from test_memory import MiB, peak_of, results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops
from flce_ops import aten
from flce_ops.aten import chunks
from flce_ops.aten.chunks import with_zeroed_rows

N, D, V = 60, 16, 61
SHARES = [0.0, 0.5, 0.99, 1.0]
BAD = [torch.nan, torch.inf, -torch.inf]
TOLERANCE = 1e-12  # float64, with sums in another order


def problem(share, bad=torch.nan, tokens=N, dtype=torch.float64, device="cpu", **made):
    """Rows of ignored tokens contain `bad`."""
    inputs = make_inputs((tokens, D, V), dtype=dtype, device=device, bias=True, ignored=0.0, **made)
    dropped = torch.randperm(tokens)[: round(share * tokens)]
    inputs.target[dropped] = -100
    inputs.input.data[dropped] = bad
    return inputs


def loss(**options):
    def mode(input, linear_weight, target, linear_bias):
        return {"loss": flce_ops.linear_cross_entropy(input, linear_weight, target, linear_bias, **options)}

    return mode


def log_probs(*args):
    return flce_ops.linear_log_probs(*args, entropy=True, argmax=True, tail=True, softcap=5.0)._asdict()


def metrics(*args):
    value, found = flce_ops.linear_cross_entropy(*args, reduction="sum", return_metrics=True)
    return {"loss": value, **found._asdict()}


def metrics_of_losses(*args):
    found = flce_ops.linear_cross_entropy(*args, reduction="none", return_metrics=("lse", "entropy"))
    return {"loss": found[0], **found[1]}


def divergence(input, linear_weight, target, linear_bias, kind="jsd", reduction="sum"):
    teacher_weight = torch.linspace(-1.0, 1.0, V * D, dtype=input.dtype).reshape(V, D).sin()
    teacher = input.detach().flip(1), teacher_weight  # nan and inf in the teacher's rows, too
    options = {"linear_bias": linear_bias, "target": target, "kind": kind, "reduction": reduction}
    return {"loss": flce_ops.linear_kl_div(input, linear_weight, *teacher, **options)}


def divergence_of_probs(input, linear_weight, target, linear_bias):
    probs = input.detach().nan_to_num(0.0).double() @ torch.linspace(-1.0, 1.0, V * D).reshape(D, V).double()
    probs = probs.softmax(-1).to(input.dtype).masked_fill((target == -100)[:, None], torch.nan)
    options = {"teacher_probs": probs, "linear_bias": linear_bias, "target": target}
    return {"loss": flce_ops.linear_kl_div(input, linear_weight, **options)}


def gradient_norm(*args):
    value = flce_ops.linear_cross_entropy(*args, reduction="sum", softcap=5.0, z_loss=0.01)
    first = torch.autograd.grad(value, [args[0], args[1], args[3]], create_graph=True)
    return {"loss": sum(gradient.square().sum() for gradient in first)}


EVERY_TERM = {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1}
MODES = {
    "sum": loss(reduction="sum"),
    "mean": loss(),
    "every term": loss(reduction="sum", **EVERY_TERM),
    "none": loss(reduction="none", **EVERY_TERM),
    "log-probs": log_probs,
    "metrics": metrics,
    "metrics of losses": metrics_of_losses,
    **{f"divergence, {kind}": functools.partial(divergence, kind=kind) for kind in KINDS},
    "divergence, none": functools.partial(divergence, reduction="none"),
    "divergence of probabilities": divergence_of_probs,
    "second derivatives": gradient_norm,
}


def run(mode, inputs):
    """Returns results and gradients by name."""
    inputs = inputs.clone()
    found = mode(*inputs.args)
    differentiable = [result for result in found.values() if result is not None and result.requires_grad]
    if differentiable:
        sum(result.sum() for result in differentiable).backward()
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in inputs.leaves.items() if leaf.grad is not None}
    return {name: result.detach() for name, result in found.items()} | gradients


def expected_of(mode, inputs):
    """Runs the valid tokens alone, and puts their rows back among those of the ignored tokens."""
    valid = inputs.target != -100
    compact = inputs.clone()
    compact.input = inputs.input.detach()[valid].requires_grad_()
    compact.target = inputs.target[valid]
    expected = run(mode, compact)
    for name, result in expected.items():
        if name == "gradient of input" or (
            name not in ("gradient of linear_weight",) and result.shape[:1] == (int(valid.sum()),)
        ):
            whole = result.new_full((len(valid), *result.shape[1:]), -1 if name == "argmax" else 0)
            whole[valid] = result
            expected[name] = whole
    return expected


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, result in found.items():
        exact = expected[name]
        assert result.shape == exact.shape and torch.equal(result.isnan(), exact.isnan()), name
        if not result.is_floating_point():
            assert torch.equal(result, exact), name
        elif result.numel():
            assert error(result.nan_to_num(0.0), exact.nan_to_num(0.0)) <= TOLERANCE, name


def assert_exactly_zero_where_ignored(found, ignored):
    for name in ("gradient of input", "log_probs", "lse", "entropy"):
        if name in found:
            assert not found[name][ignored].any(), name


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODES)
def test_results_are_those_of_the_other_tokens_alone(name, share, poisoned_memory):
    for bad in BAD:
        inputs = problem(share, bad)
        found = run(MODES[name], inputs)
        assert_same(found, expected_of(MODES[name], inputs))
        assert_exactly_zero_where_ignored(found, inputs.target == -100)


@pytest.mark.parametrize("name", ["sum", "every term", "none", "log-probs", "metrics", "divergence, jsd"])
def test_several_chunks(name):
    inputs = problem(0.5, tokens=500)
    with flce_ops.workspace(1):
        found = run(MODES[name], inputs)
        assert flce_ops.last_path().chunks > 1
        reason = flce_ops.last_path().reason
    assert reason.startswith("cpu tensors in torch.float64") and reason.endswith(", without ignored tokens")
    assert_same(found, expected_of(MODES[name], inputs))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["sum", "none", "log-probs", "divergence, jsd"])
def test_compiled_they_are_the_same(name, share):
    inputs = problem(share)
    mode = torch.compile(MODES[name], backend="aot_eager", fullgraph=True)
    assert_same(run(mode, inputs), expected_of(MODES[name], inputs))


# ---------------------------------------------------------------- where the host must not wait


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Rows of ignored tokens are read as zeros, as on a GPU, where finding them would need a host synchronisation."""

    def on_all_tokens(body, call, results, fills):
        valid = call.operands.valid if "valid" in call.index else call.operands.target != call.ignore_index
        if valid is None:
            body(call, results)
        else:
            valid = valid if valid.dim() == 1 else valid.any(1)
            with_zeroed_rows(body, call, results, fills, ~valid)

    monkeypatch.setattr(chunks, "on_valid_tokens", on_all_tokens)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", MODES)
def test_zeroed_rows_give_the_same(name, share, as_on_a_gpu, poisoned_memory):
    for bad in BAD:
        inputs = problem(share, bad)
        inputs.linear_bias.data *= 1000.0 if name != "second derivatives" else 1.0
        found = run(MODES[name], inputs)
        assert "without" not in flce_ops.last_path().reason
        assert_same(found, expected_of(MODES[name], inputs))
        assert_exactly_zero_where_ignored(found, inputs.target == -100)


# ---------------------------------------------------------------- cost


def products(step) -> int:
    """Multiplications in matrix products, divided by D V: the rows of GEMM passes."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    factors = {"aten::mm": slice(0, 2), "aten::addmm": slice(1, 3), "aten::addmm_": slice(1, 3)}
    shapes = [e.input_shapes[factors[e.name]] for e in profile.events() if e.name in factors]
    return sum(rows * inner * columns for (rows, inner), (_, columns) in shapes) // (D * V)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("name", "passes"), [("mean", 3), ("none", 3), ("metrics", 3), ("log-probs", 3)])
def test_products_have_the_rows_of_the_valid_tokens(name, passes, share):
    inputs = problem(share)
    valid = int((inputs.target != -100).sum())
    assert products(lambda: run(MODES[name], inputs)) == passes * valid


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_follows_the_valid_tokens(reduction):
    peaks = []
    for share in (0.0, 0.9):
        inputs = make_inputs((2000, 8, 4003), ignored=0.0)
        inputs.target[torch.randperm(2000)[: round(share * 2000)]] = -100
        with flce_ops.workspace(retained=0):  # chunks have the same number of rows whatever is ignored
            peaks.append(peak_of(flce_ops.linear_cross_entropy, inputs, reduction=reduction) - results(inputs))
    rows = peaks[0] / (4003 * 4)
    assert peaks[1] < peaks[0] * max(200 / rows, 0.2) + MiB, [peak / MiB for peak in peaks]


def test_a_wide_input_is_not_copied_whole():
    """Rows are gathered one chunk at a time, and those of grad_input are moved in place."""
    inputs = make_inputs((4096, 1024, 67), ignored=0.0)  # input: 16 MiB
    inputs.target[::2] = -100
    with flce_ops.workspace(MiB):
        temporary = peak_of(flce_ops.linear_cross_entropy, inputs) - results(inputs)
    assert temporary < 4 * MiB, f"{temporary / MiB:.1f} MiB"


def test_nothing_is_gathered_where_nothing_is_ignored():
    inputs = make_inputs((64, D, V), ignored=0.0)
    with torch.profiler.profile() as profile:
        flce_ops.linear_cross_entropy(*inputs.args).backward()
    assert not {event.name for event in profile.events()} & {"aten::index_select", "aten::nonzero", "aten::index_copy_"}
    assert "without" not in flce_ops.last_path().reason


@pytest.mark.parametrize("operator", [aten.forward, aten.with_grad], ids=["forward", "with_grad"])
def test_a_target_out_of_range_is_refused_with_its_own_position(operator):
    inputs = problem(0.5)
    position = int((inputs.target != -100).nonzero()[-1, 0])
    inputs.target[position] = V
    more = () if operator is aten.forward else (None, torch.ones(N, dtype=torch.float64))
    options = {} if operator is aten.forward else {"output_mask": [True] * 3}
    with pytest.raises(IndexError, match=f"got {V} at flat position {position}"):
        operator(*(t if t is None else t.detach() for t in inputs.args), *more, **options)


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["sum", "none", "log-probs", "metrics", "divergence", "weight 0"])
def test_shards_of_the_vocabulary_and_of_the_tokens(name, share):
    run_in_world(("cpu", 2), sharded, name, share)


def sharded(device, name, share):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = problem(share, device=device)
    weights = torch.rand(N, dtype=torch.float64).mul(2).floor() if name == "weight 0" else None
    teacher = (torch.randn(N, 5, dtype=torch.float64), torch.randn(V, 5, dtype=torch.float64))

    def mode(input, linear_weight, target, linear_bias, token_weight, *teacher):
        if name == "divergence":
            options = {"target": target, "linear_bias": linear_bias, "reduction": "sum"}
            return {"loss": flce_ops.linear_kl_div(input, linear_weight, *teacher, **options)}
        if name == "weight 0":
            args = (input, linear_weight, target, linear_bias)
            return {"loss": flce_ops.linear_cross_entropy(*args, token_weight=token_weight, reduction="sum")}
        return MODES[name](input, linear_weight, target, linear_bias)

    def step(args):
        leaves = [arg.detach().requires_grad_() if i in (0, 1, 3) else arg for i, arg in enumerate(args)]
        found = mode(*leaves)
        sum(result.sum() for result in found.values() if result.requires_grad).backward()
        found |= {f"gradient of {i}": leaves[i].grad for i in (0, 1, 3)}
        return {key: r.full_tensor() if hasattr(r, "full_tensor") else r for key, r in found.items()}

    args = [*inputs.args, weights, *teacher]
    expected = step(args)
    for tokens, rows in ((Replicate(), Shard(0)), (Shard(0), Replicate())):
        placements = (tokens, rows, tokens, rows, tokens, tokens, rows)
        placed = [
            arg if arg is None else distribute_tensor(arg.detach(), mesh, [placement])
            for arg, placement in zip(args, placements)
        ]
        found = step(placed)
        assert_same(
            {key: result.detach() for key, result in found.items()}, {k: r.detach() for k, r in expected.items()}
        )
        assert not found["gradient of 0"][inputs.target == -100].any()
