"""The replacements of TRL's head and divergence give TRL's results, for whole and for sharded heads."""

import contextlib
import copy

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import torch.distributed as dist
from tiny_models import VOCAB, make_batch, make_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction
from trl_inputs import head_inputs, trl_divergence, trl_utils

import flce_ops
from flce_ops.integrations.trl import patched, zero3
from flce_ops.integrations.trl.divergence import chunked_divergence_loss
from flce_ops.integrations.trl.log_probs import ChunkedLogProbs
from flce_ops.integrations.trl.sft import SummedLogProbs


def results_and_gradients(apply, inputs, options, outputs):
    inputs = [
        None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs
    ]
    found = apply(*inputs, *options, outputs)
    loss = sum((row * torch.linspace(-1, 1, len(row))).sum() for row in found[:2] if row is not None)
    loss.backward()
    return found, [None if tensor is None else tensor.grad for tensor in inputs[:3]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap,scale,temperature", [(None, 1.0, 1.0), (None, 0.3, 0.7), (3.0, 1.7, 1.3)])
@pytest.mark.parametrize("outputs", [("log_probs", *OPTIONAL_OUTPUTS), ("log_probs", "entropy"), ("log_probs",)])
def test_every_output_is_that_of_trl(outputs, softcap, scale, temperature, bias):
    inputs, options = head_inputs(torch.float32, bias=bias), (temperature, 32, softcap, scale)
    ours = results_and_gradients(ChunkedLogProbs.apply, inputs, options, outputs)
    theirs = results_and_gradients(ChunkedLogProbFunction.apply, inputs, options, outputs)
    for name, our, their in zip(("log_probs", *OPTIONAL_OUTPUTS), ours[0], theirs[0], strict=True):
        assert (our is None) == (their is None) == (name not in outputs)
        if our is not None:
            # the entropy and the sum of p^2 are differences of numbers near lse; the error is 1e-6 of lse
            torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert our.requires_grad == (name in ("log_probs", "entropy"))
    for our, their in zip(ours[1], theirs[1]):
        if their is not None:
            torch.testing.assert_close(our, their, rtol=0, atol=1e-5 * float(their.abs().max()))  # 3e-6 was seen


# --- SFT's nll: sums over the tokens ---


def sums_and_gradients(apply, inputs, options, outputs):
    inputs = [
        None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs
    ]
    log_probs, *others = apply(*inputs, *options, outputs)
    (-log_probs.sum() / 7).backward()
    gradients = [tensor.grad for tensor in inputs[:3] if tensor is not None]
    return [log_probs.sum(), *(row.sum(dtype=torch.float64) for row in others if row is not None)], gradients


@pytest.mark.parametrize("outputs", [("log_probs", "entropy", "is_top1"), ("log_probs", *OPTIONAL_OUTPUTS)])
@pytest.mark.parametrize("softcap,scale,temperature", [(None, 1.0, 1.0), (3.0, 1.7, 1.3)])
@pytest.mark.parametrize("dtype,bias", [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("tokens", [37, 1])
def test_sums_of_an_sft_head_are_those_of_trl(tokens, dtype, bias, softcap, scale, temperature, outputs):
    inputs, options = head_inputs(dtype, bias=bias, tokens=tokens), (temperature, 32, softcap, scale)
    doubles = [t if t is None or t.dtype == torch.int64 else t.detach().double().requires_grad_() for t in inputs]
    exact = sums_and_gradients(SummedLogProbs.apply, doubles, options, outputs)
    ours = sums_and_gradients(SummedLogProbs.apply, inputs, options, outputs)
    theirs = sums_and_gradients(ChunkedLogProbFunction.apply, inputs, options, outputs)
    for of_ours, of_theirs, of_exact in zip(*(both[0] + both[1] for both in (ours, theirs, exact)), strict=True):
        # gradients were made in forward, for the mean of these tokens: their share of the loss is one rounding. A draw
        # of TRL's sum may have no error.
        rounding = 4 * torch.finfo(of_ours.dtype).eps * of_exact.norm()
        assert (of_ours - of_exact).norm() <= 1.5 * (of_theirs - of_exact).norm() + rounding + 1e-5


def test_an_sft_head_makes_its_gradients_in_forward():
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False)
    SummedLogProbs.apply(hidden, weight, None, targets, 1.0, 32)
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"


def test_an_sft_batch_without_valid_tokens_has_gradients_of_zero():
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False, tokens=0)
    found = SummedLogProbs.apply(hidden, weight, None, targets, 1.0, 32)
    assert [row.shape for row in found] == [(0,)] * 5
    found[0].sum().backward()
    assert not weight.grad.any() and hidden.grad.shape == hidden.shape


def test_an_sft_head_refuses_gradients_that_differ():
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False)
    log_probs = SummedLogProbs.apply(hidden, weight, None, targets, 1.0, 32)[0]
    with pytest.raises(RuntimeError, match="a gradient that differs from token to token; train without flce_ops"):
        (log_probs * log_probs.detach().exp() * torch.arange(37)).sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_head_under_bfloat16_hidden_states(autocast):
    """FSDP2's master weights with mixed precision: close to float64's result, at least as close as TRL's."""
    hidden, weight, bias, targets = head_inputs(torch.float32, bias=True)
    hidden = hidden if autocast else hidden.detach().bfloat16().requires_grad_()
    exact = [None if t is None else t.detach().bfloat16().double() for t in (hidden, weight, bias)]
    expected, _ = results_and_gradients(
        ChunkedLogProbs.apply, (*(t.requires_grad_() for t in exact), targets), (0.9, 32, None, 1.0), OPTIONAL_OUTPUTS
    )
    errors = []
    for apply in (ChunkedLogProbs.apply, ChunkedLogProbFunction.apply):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, gradients = results_and_gradients(
                apply, (hidden, weight, bias, targets), (0.9, 32, None, 1.0), OPTIONAL_OUTPUTS
            )
        assert found[0].dtype == torch.float32 and gradients[1].dtype == torch.float32
        errors.append([float((row - exact).norm() / exact.norm()) for row, exact in zip(found[:4], expected[:4])])
    for ours, theirs in zip(*errors):
        assert ours <= 1.5 * theirs


def test_no_token_at_all():
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False, tokens=0)
    found = ChunkedLogProbs.apply(hidden, weight, None, targets, 1.0, 32)
    assert [row.shape for row in found] == [(0,)] * 5
    found[0].sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("items", [None, 50, torch.tensor(50.0)])
def test_the_divergence_is_that_of_trl(beta, items):
    def results(function):
        torch.manual_seed(0)
        student, teacher = torch.randn(3, 7, 24), torch.randn(3, 7, 32)
        weight, teacher_weight = (0.3 * torch.randn(VOCAB, size) for size in (24, 32))
        leaves = [student.requires_grad_(), weight.requires_grad_(), torch.randn(VOCAB).requires_grad_()]
        mask = (torch.rand(3, 7) < 0.6).long()
        loss, entropy, count = function(
            *(student, teacher, weight, teacher_weight.requires_grad_(), mask, beta, items, leaves[2], None),
            *(0.8, 1.2, None, 4.0, 1.5),
        )
        (3 * loss).backward()
        assert teacher_weight.grad is None
        return loss, entropy, count, *(leaf.grad for leaf in leaves)

    for ours, theirs in zip(results(chunked_divergence_loss), results(trl_divergence()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max()))


def test_a_divergence_without_valid_tokens_is_zero_and_so_are_its_gradients():
    student, weight = torch.randn(1, 7, 24, requires_grad=True), torch.randn(VOCAB, 24, requires_grad=True)
    teacher, teacher_weight, mask = torch.randn(1, 7, 32), torch.randn(VOCAB, 32), torch.zeros(1, 7, dtype=torch.long)
    loss, entropy, count = chunked_divergence_loss(
        *(student, teacher, weight, teacher_weight, mask, 0.3, None, None, None), *(1.0, 1.0, None, None, 1.0)
    )
    loss.backward()
    assert loss == 0 and entropy == 0 and count == 0
    assert not student.grad.any() and not weight.grad.any()


# --- heads that are sharded ---


class TakenAway:
    """A stand-in for ZeRO-3: outside of TRL's context, parameters are empty, as DeepSpeed leaves them."""

    def __init__(self, *parameters) -> None:
        self.whole = {id(parameter): parameter.data for parameter in parameters}

    @contextlib.contextmanager
    def gather(self, *parameters):
        parameters = [parameter for parameter in parameters if parameter is not None]
        for parameter in parameters:
            parameter.data = self.whole[id(parameter)]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)


@pytest.mark.parametrize("apply", [ChunkedLogProbs.apply, ChunkedLogProbFunction.apply], ids=["ours", "TRL's"])
def test_parameters_that_are_taken_away_before_backward(apply, monkeypatch):
    hidden, weight, bias, targets = head_inputs(torch.float32, bias=True)
    weight, bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight, bias))
    zero = TakenAway(weight, bias)
    monkeypatch.setattr(trl_utils(), "maybe_gather_lm_head_ctx", zero.gather)
    monkeypatch.setattr(zero3, "is_deepspeed_zero3_enabled", lambda: True)
    with trl_utils().maybe_gather_lm_head_ctx(weight, bias):
        log_probs = apply(hidden, weight, bias, targets, 1.0, 32, None, 1.0, ("log_probs",))[0]
        edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in (hidden, weight, bias)]
    assert weight.numel() == bias.numel() == 0
    gradients = torch.autograd.grad(-log_probs.sum(), edges)
    assert weight.numel() == bias.numel() == 0
    for gradient, expected in zip(gradients, wanted):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_head_that_fsdp2_has_sharded(one_process):
    """TRL gathers the head by full_tensor()."""
    model, batch = make_model("Llama"), make_batch()
    reference = copy.deepcopy(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    assert isinstance(model.lm_head.weight, DTensor)
    outputs = []
    for module in (model, reference):
        trl_utils().add_fused_lm_head(module, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        with patched() if module is model else contextlib.nullcontext():
            output = module(**batch, fused_lm_head=True)
        (output.loss + 0.1 * output.entropy.sum()).backward()
        outputs.append(output)
    assert outputs[0].keys() == outputs[1].keys()
    for name in outputs[1].keys():
        torch.testing.assert_close(outputs[0][name], outputs[1][name], rtol=1e-5, atol=1e-5)
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        atol = 1e-5 * float(expected.grad.abs().max())
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=0, atol=atol, msg=name)


def test_a_divergence_of_heads_that_fsdp2_has_sharded(one_process):
    hidden, teacher_hidden, mask = torch.randn(2, 5, 24), torch.randn(2, 5, 24), torch.ones(2, 5)
    losses, gradients = [], []
    for sharded in (True, False):
        torch.manual_seed(0)
        heads = [torch.nn.Linear(24, VOCAB) for _ in range(2)]
        if sharded:
            heads = [fully_shard(head) for head in heads]
        student, teacher = heads
        losses.append(
            chunked_divergence_loss(
                *(hidden, teacher_hidden, student.weight, teacher.weight, mask, 0.5, None, student.bias, teacher.bias)
            )
        )
        losses[-1][0].backward()
        gradients.append(student.weight.grad.full_tensor() if sharded else student.weight.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
