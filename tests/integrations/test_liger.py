"""Liger-Kernel's kernels beside the patched loss, the refusal where both replace the loss, and Liger's losses by the
names of docs/from_liger.md.

The refusals are tested with a stand-in of Liger's forward, and with Liger itself where it is installed.
"""

import copy
import math
from types import MethodType

import pytest
import torch
from test_transformers_training import make_rows, run_trainer
from tiny_models import has_logits, make_batch, make_model

import flce_ops
from flce_ops.integrations.transformers import patch, unpatch

REFUSAL = r"Liger-Kernel has replaced its loss \(liger_kernel\..*fused_linear_cross_entropy=False.*then patch"


def lce_forward(self, input_ids=None, labels=None, **kwargs):
    raise AssertionError("the stand-in computes nothing")


lce_forward.__module__ = "liger_kernel.transformers.model.qwen3"


@pytest.fixture
def liger(monkeypatch):
    """apply_liger_kernel_to_qwen3, whose replacements of Transformers' names end with the test."""
    transformers = pytest.importorskip("liger_kernel.transformers")
    from transformers.models.qwen3 import modeling_qwen3

    for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP"):
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))
    monkeypatch.setattr(modeling_qwen3.Qwen3ForCausalLM, "forward", modeling_qwen3.Qwen3ForCausalLM.forward)
    return transformers.apply_liger_kernel_to_qwen3


def test_a_model_whose_loss_is_ligers_is_refused():
    model = make_model("Qwen3")
    model.forward = MethodType(lce_forward, model)
    with pytest.raises(NotImplementedError, match=f"Qwen3ForCausalLM: {REFUSAL}"):
        patch(model)
    del model.forward
    assert not has_logits(patch(model)(**make_batch()))


def test_a_class_whose_loss_is_ligers_is_refused_and_its_instances(monkeypatch):
    model = make_model("Qwen3")
    monkeypatch.setattr(type(model), "forward", lce_forward)
    for patched in (model, type(model)):
        with pytest.raises(NotImplementedError, match=f"Qwen3ForCausalLM: {REFUSAL}"):
            patch(patched)


def test_trainer_refuses_a_patched_model_whose_loss_is_ligers_now(tmp_path):
    model = patch(make_model("Qwen3"))
    model.forward = MethodType(lce_forward, model)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        run_trainer(model, make_rows(), tmp_path)
    unpatch(model)
    with pytest.raises(AssertionError, match="computes nothing"):  # Liger's own loss is left alone
        run_trainer(model, make_rows(), tmp_path)


def test_ligers_loss_is_refused_before_and_after_patch(liger, tmp_path):
    first, second = make_model("Qwen3"), patch(make_model("Qwen3"))
    liger(model=first, rope=False, rms_norm=False, swiglu=False)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        patch(first)
    liger(model=second, rope=False, rms_norm=False, swiglu=False)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        run_trainer(second, make_rows(), tmp_path)


def test_ligers_kernels_take_the_patched_loss(liger):
    """Its SwiGLU and RMSNorm are Triton kernels: on a CPU they are put in place, and only the loss runs."""
    model = make_model("Qwen3")
    batch = make_batch()
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
    exact = copy.deepcopy(model)(**batch).loss
    liger(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    assert "Liger" in repr(model.model.norm)
    patch(model)
    model.model.forward = lambda **_: hidden
    output = model(**batch)
    assert not has_logits(output)
    torch.testing.assert_close(output.loss, exact, rtol=1e-5, atol=0)


# ---------------------------------------------------------------- the names of docs/from_liger.md

N, D, V = 13, 8, 37


def operands(*more: tuple[int, ...]) -> list[torch.Tensor]:
    """Hidden states, weight, targets with ignored ones, and further tensors."""
    target = torch.randint(V, (N,))
    target[:3] = -100
    hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    return [hidden, weight, target, *(torch.randn(shape) for shape in more)]


def same_loss_and_gradients(ours: torch.Tensor, theirs: torch.Tensor, *of: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, other in zip(torch.autograd.grad(ours, of), torch.autograd.grad(theirs, of)):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_beside_hard_labels(beta):
    losses = pytest.importorskip("liger_kernel.chunked_loss")
    hidden, weight, target, teacher, teacher_weight = operands((N, 5), (V, 5))
    theirs = losses.LigerFusedLinearJSDLoss(0.4, 0.6, beta=beta, temperature=2.0, compiled=False)
    soft = flce_ops.linear_kl_div(
        hidden, weight, teacher, teacher_weight, target=target, kind="jsd", beta=beta, temperature=2.0
    )
    ours = 0.4 * flce_ops.linear_cross_entropy(hidden, weight, target) + 0.6 * soft
    same_loss_and_gradients(ours, theirs(hidden, weight, teacher, teacher_weight, target), hidden, weight)


OF_TYPES = {
    "dapo": lambda mask: {"normalizer": mask.sum()},
    "bnpo": lambda mask: {},
    "grpo": lambda mask: {"token_weight": mask / mask.sum(-1, keepdim=True), "normalizer": len(mask)},
    "dr_grpo": lambda mask: {"normalizer": len(mask) * 9},
    "cispo": lambda mask: {
        "normalizer": mask.sum(),
        "objective": "cispo",
        "clip_low": math.inf,
        "clip_high": 0.3,
        "dual_clip": None,
    },
}


@pytest.mark.parametrize("loss_type", OF_TYPES)
def test_grpo(loss_type):
    losses = pytest.importorskip("liger_kernel.chunked_loss")
    mask = (torch.arange(6) < torch.tensor([6, 3, 5, 2])[:, None]).float()
    ids, advantages = torch.randint(V, (4, 6)), torch.randn(4)
    hidden, weight = torch.randn(4, 6, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    old, reference = (torch.randn(4, 6) - 4 for _ in range(2))
    sampler = torch.rand(4, 6) + 0.5
    high = 1.3 if loss_type == "cispo" else 0.3
    theirs = losses.LigerFusedLinearGRPOLoss(
        beta=0.1,
        epsilon_low=0.2,
        epsilon_high=high,
        loss_type=loss_type,
        max_completion_length=9,
        temperature=0.7,
        delta=2.0,
        compiled=False,
    )
    named = {"ref_per_token_logps": reference, "old_per_token_logps": old, "vllm_is_ratio": sampler}
    expected = theirs(hidden, weight, ids, mask, advantages, **named)[0]
    options = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 2.0, **OF_TYPES[loss_type](mask)}
    ours = flce_ops.linear_policy_loss(
        hidden,
        weight,
        ids.masked_fill(mask == 0, -100),
        advantages[:, None].expand_as(ids) * sampler,
        old,
        reference,
        beta=0.1,
        temperature=0.7,
        **options,
    ).loss
    same_loss_and_gradients(ours, expected, hidden, weight)


@pytest.fixture
def fused():
    """Liger's losses in Triton, in the interpreter, which does not take its softcap and class weights."""
    if torch.cuda.is_available():
        pytest.skip("there is no interpreter on this machine")
    return pytest.importorskip("liger_kernel.transformers")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 1e-2}])
def test_the_fused_loss(options, reduction, fused):
    hidden, weight, target = operands()
    shown = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
    theirs = fused.LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options, **shown)(weight, hidden, target)
    options = {"z_loss" if name == "lse_square_scale" else name: value for name, value in options.items()}
    names = ("z_loss", "token_accuracy", "argmax")
    loss, metrics = flce_ops.linear_cross_entropy(
        hidden, weight, target, reduction=reduction, return_metrics=names, **options
    )
    same_loss_and_gradients(loss, theirs.loss, hidden, weight)
    z_loss = metrics["z_loss"].sum() / (10 if reduction == "mean" else 1)
    torch.testing.assert_close(z_loss, theirs.z_loss.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(metrics["token_accuracy"], theirs.token_accuracy.detach())
    assert torch.equal(metrics["argmax"], theirs.predicted_tokens)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_token_scaling_is_a_weight_or_a_function_of_a_token(fused):
    hidden, weight, target = operands()
    theirs = fused.LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)(weight, hidden, target)
    ours = flce_ops.linear_token_loss(hidden, weight, target, lambda log_prob: -log_prob.detach().exp() * log_prob)
    same_loss_and_gradients(ours.loss, theirs, hidden, weight)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_the_guide_says_of_the_fused_loss_where_the_two_differ(fused):
    """If one of these fails, Liger has changed: take the line out of the guide."""
    liger, ours = fused.LigerFusedLinearCrossEntropyLoss(), flce_ops.linear_cross_entropy
    hidden, weight, target = operands()
    assert liger(weight, hidden, torch.full_like(target, -100)) == 0.0
    assert ours(hidden, weight, torch.full_like(target, -100)).isnan()

    frozen = hidden.detach()
    liger(weight, frozen, target).backward()
    assert weight.grad is None
    ours(frozen, weight, target).backward()
    assert weight.grad is not None

    for loss, times in ((liger(weight, hidden, target), 12), (ours(hidden, weight, target), 6)):
        (once,) = torch.autograd.grad(ours(hidden, weight, target), hidden)
        hidden.grad = None
        for _ in range(2):
            (3 * loss).backward(retain_graph=True)
        torch.testing.assert_close(hidden.grad, times * once, rtol=1e-4, atol=1e-6)

    spoilt = torch.cat([torch.full((1, D), torch.nan), frozen[1:]]).requires_grad_()  # target 0 is ignored
    for loss, spreads in ((liger(weight, spoilt, target), True), (ours(spoilt, weight, target), False)):
        assert bool(torch.autograd.grad(loss, weight)[0].isnan().any()) is spreads


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_fused_divergences(beta, fused):
    hidden, weight, target, teacher, teacher_weight = operands((N, 5), (V, 5))
    theirs = fused.LigerFusedLinearJSD(jsd_beta=beta, temperature=2.0)
    options = {"target": target, "kind": "jsd", "beta": beta, "temperature": 2.0}
    ours = flce_ops.linear_kl_div(hidden, weight, teacher, teacher_weight, **options)
    same_loss_and_gradients(ours, theirs(hidden, weight, teacher, teacher_weight, target), hidden, weight)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("reduction, factor", [("batchmean", 1), ("mean", 1 / V), ("sum", 10)])
def test_the_fused_divergence_from_probabilities(reduction, factor, fused):
    hidden, weight, target, logits = operands((N, V))
    probs = logits.softmax(-1)
    theirs = fused.LigerFusedLinearKLDivLoss(reduction=reduction, temperature=2.0)(hidden, weight, probs, target)
    ours = flce_ops.linear_kl_div(hidden, weight, teacher_probs=probs, target=target, temperature=2.0)
    same_loss_and_gradients(factor * ours, theirs, hidden, weight)
