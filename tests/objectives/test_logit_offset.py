"""An offset that all logits of a row share, such as 3000, costs no digits: the softmax does not see it."""

# N tokens, D hidden, V vocabulary

import statistics

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_worlds import in_worlds
from inputs import make_inputs, scalars
from process_pool import worlds
from reference_loss import error
from sharded_inputs import R, full, mesh_of
from torch.distributed.tensor import Shard, distribute_tensor

import flce_ops

OFFSETS = [3000.0, -2e4, 1e6]
SHAPE = (29, 16, 1021)
OPTIONS = [{"label_smoothing": 0.1}, {"label_smoothing": 1.0}, {"label_smoothing": 0.3, "weight": True}]


def problem(offset, options, *, device="cpu", dtype=torch.float32):
    """Operands whose products are exact: multiples of 1/16. So all differences come after the logits."""
    inputs = make_inputs(SHAPE, device=device, weight="weight" in options)
    x = (inputs.input.detach() * 4).round() / 4
    w = (inputs.linear_weight.detach() * 4).round() / 4
    made = {**options, "weight": inputs.weight} if "weight" in options else options
    return x.to(dtype), w.to(dtype), inputs.target, torch.full((SHAPE[2],), offset, dtype=dtype, device=device), made


def dense(x, w, target, bias, *, reduction="none", **options):
    weight = options.pop("weight", None)
    weight = None if weight is None else weight.to(x.dtype)
    return F.cross_entropy(F.linear(x, w, bias), target, weight, reduction=reduction, **options)


def given(x, w, target, bias, **options):
    return flce_ops.cross_entropy(F.linear(x, w, bias), target, **options)


def loss_of(target_logit, pair, logit_sum, target, weight, smoothing, classes):
    of_target = 1.0 if weight is None else weight[target.clamp(min=0)]
    nll = of_target * ((pair[:, 0] - target_logit) + pair[:, 1])
    return torch.where(target >= 0, (1 - smoothing) * nll - smoothing / classes * logit_sum, 0.0)


@pytest.mark.parametrize("function", [flce_ops.linear_cross_entropy, given])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
def test_smoothed_losses_keep_their_digits(device, offset, options, function):
    arguments = problem(offset, options, device=device)
    *operands, made = arguments
    exact = dense(*(t.double() if t.is_floating_point() else t for t in operands), **made)
    plain, found = dense(*operands, **made), function(*operands, reduction="none", **made)
    assert error(found, exact) <= 4 * error(plain, exact) + 2e-7


@pytest.mark.parametrize("function", [flce_ops.linear_cross_entropy, given])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_smoothed_mean_of_one_pass_keeps_its_digits(device, options, function):
    """The error of a single mean is luck: of 200 draws its median is 6e-8 with class weights, its largest 2.7e-7 (plain
    torch without an offset: 6e-8 and 2.1e-7). A lost rounding of a logit near 3000 would make it about 2e-6.
    """
    errors = []
    for _ in range(5):
        *operands, made = problem(3000.0, options, device=device)
        exact = dense(*(t.double() if t.is_floating_point() else t for t in operands), reduction="mean", **made)
        x = operands[0].clone().requires_grad_()
        loss = function(x, *operands[1:], **made)
        loss.backward()
        errors.append(error(loss.detach(), exact))
    assert statistics.median(errors) <= 3e-7


@pytest.mark.parametrize("function", [flce_ops.linear_cross_entropy, given])
@pytest.mark.parametrize("offset", OFFSETS)
def test_second_derivatives_keep_their_digits(device, offset, function):
    """What rounding took from lse scales every probability: at an offset of 2e4 by up to a thousandth."""
    *operands, _ = problem(offset, {}, device=device)
    per_token, along = torch.randn(SHAPE[0], device=device), torch.randn(*SHAPE[:2], device=device)

    def second(function, dtype):
        x, w, bias = (operands[k].to(dtype).requires_grad_() for k in (0, 1, 3))
        losses = function(x, w, operands[2], bias, reduction="none")
        (first,) = torch.autograd.grad(losses @ per_token.to(dtype), x, create_graph=True)
        return torch.autograd.grad((first * along.to(dtype)).sum(), (x, w))

    exact = second(dense, torch.float64)
    for found, plain, truth in zip(second(function, torch.float32), second(dense, torch.float32), exact, strict=True):
        assert error(found, truth) <= 4 * error(plain, truth) + 1e-6


@pytest.mark.parametrize("classes", [510, 512, 1021])
def test_weights_and_smoothing_of_given_logits_at_any_alignment(device, classes):
    """Triton compiles another kernel for each alignment of the rows, of which 3.6 once could not compile one."""
    inputs = make_inputs((SHAPE[0], SHAPE[1], classes), device=device, weight=True)
    logits = F.linear(inputs.input.detach(), inputs.linear_weight.detach()).double().float() + 3000.0
    weight, target = inputs.weight, inputs.target
    made = {"label_smoothing": 0.3, "reduction": "none"}
    exact = F.cross_entropy(logits.double(), target, weight.double(), **made)
    plain = F.cross_entropy(logits, target, weight, **made)
    assert error(flce_ops.cross_entropy(logits, target, weight=weight, **made), exact) <= 4 * error(plain, exact) + 2e-7


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("classes, padded", [(131, 3), (5, 0), (64, 0)])
def test_the_kernel_of_given_logits_keeps_their_digits(options, classes, padded):
    triton = pytest.importorskip("flce_ops.triton.logits.cross_entropy")
    inputs = make_inputs((SHAPE[0], SHAPE[1], classes), weight="weight" in options)
    logits = F.linear(inputs.input.detach(), inputs.linear_weight.detach()).double().float() + 3000.0
    logits = F.pad(logits, (0, padded))[:, :classes]
    target, smoothing = inputs.target, options["label_smoothing"]
    numbers = scalars({"label_smoothing": smoothing})
    weight = None if inputs.weight is None else inputs.weight.double()
    exact = F.cross_entropy(logits.double(), target, weight, reduction="none", label_smoothing=smoothing)
    given = logits, None, target, None, inputs.weight
    _, losses, *_ = triton.launch_with_grad(*given, None, torch.tensor(1.0), output_mask=[True] * 3, **numbers)
    assert error(losses, exact) <= 4e-7
    target_logit, pair, logit_sum, *_ = triton.launch_forward(*given, logit_sum=True)
    found = loss_of(target_logit, pair, logit_sum, target, inputs.weight, smoothing, classes)
    assert error(found, exact) <= 4e-7


@in_worlds(worlds(2))
def test_ranks_that_share_the_classes_keep_the_digits(device):
    mesh = mesh_of(device, dist.get_world_size())
    for options in [{}, *OPTIONS]:
        *operands, made = problem(3000.0, options)
        x, w, target, bias = (to_device_of(t, device) for t in operands)
        made = {name: to_device_of(value, device) for name, value in made.items()}
        for reduction in ("none", "mean"):
            exact_x, plain_x = x.double().requires_grad_(), x.clone().requires_grad_()
            exact = dense(exact_x, w.double(), target, bias.double(), reduction=reduction, **made)
            plain = dense(plain_x, w, target, bias, reduction=reduction, **made)
            placed_x = distribute_tensor(x, mesh, [R]).requires_grad_()
            placed = [distribute_tensor(t, mesh, [Shard(0)]) for t in (w, bias)]
            found = flce_ops.linear_cross_entropy(placed_x, placed[0], target, placed[1], reduction=reduction, **made)
            assert error(full(found), exact) <= 4 * error(plain, exact) + 3e-7, (options, reduction)
            for loss in (exact, plain, found):
                loss.sum().backward()
            usual = error(plain_x.grad, exact_x.grad)
            assert error(full(placed_x.grad), exact_x.grad) <= 4 * usual + 1e-6, (options, reduction)
            logits = distribute_tensor(F.linear(x, w, bias), mesh, [Shard(1)])
            found = flce_ops.cross_entropy(logits, target, reduction=reduction, **made)
            assert error(full(found), exact) <= 4 * error(plain, exact) + 3e-7, (options, reduction)


@in_worlds(worlds(1, 2, 4, gloo=(1, 2, 4)))
def test_metrics_of_ranks_that_share_the_classes_keep_their_digits(device):
    mesh = mesh_of(device, dist.get_world_size())
    *operands, _ = problem(3000.0, {})
    x, w, target, bias = (t.to(device) for t in operands)
    exact = dense_metrics(x.double(), w.double(), target, bias.double())
    plain = dense_metrics(x, w, target, bias)
    placed = [distribute_tensor(x, mesh, [R]), *(distribute_tensor(t, mesh, [Shard(0)]) for t in (w, bias))]
    for needs in (True, False):  # in one pass, and from the operator of per-token losses
        hidden = placed[0].detach().requires_grad_(needs)
        for reduction in ("mean", "none"):
            _, found = flce_ops.linear_cross_entropy(
                hidden, placed[1], target, placed[2], reduction=reduction, return_metrics=tuple(exact)
            )
            for name, right in exact.items():
                allowed = 4 * error(plain[name], right) + 3e-7
                assert error(full(found[name]), right) <= allowed, (name, needs, reduction)


def dense_metrics(x, w, target, bias):
    logits = F.linear(x, w, bias)
    log_p = logits.log_softmax(-1)
    found = {
        "lse": logits.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logit": logits.mean(-1),
    }
    return {name: torch.where(target >= 0, values, 0.0) for name, values in found.items()}


def to_device_of(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("scale", [-4.0, 4.0, -20.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_from_saved_logits_of_thousands(dtype, scale, options):
    """A GPU subtracts a tile's maximum from a logit before it rounds the logit, so the maximum itself may come out
    above it, by more than a step of the saved logits.
    """
    x, w = torch.randn(300, 64, device="cuda") * 12, torch.randn(1000, 64, device="cuda") * 12
    target = torch.randint(1000, (300,), device="cuda")

    def gradients(losses_of, dtype):
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (x.to(half), w.to(half))]
        return torch.autograd.grad(losses_of(*leaves).sum(), leaves)

    def dense(x, w):
        return F.cross_entropy(F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)) * scale, target)

    def ours(x, w):
        losses = flce_ops.linear_cross_entropy(x, w, target, reduction="none", logit_scale=scale, **options)
        return losses / target.numel()

    half = dtype
    for found, plain, exact in zip(gradients(ours, half), gradients(dense, half), gradients(dense, torch.float64)):
        assert error(found, exact) <= error(plain, exact) + 2e-3
    assert "saved" in str(flce_ops.last_path())
