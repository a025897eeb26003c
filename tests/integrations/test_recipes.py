"""The recipes of examples/ at toy size: each agrees with dense logits, and its loss falls."""

import copy
import statistics

import pytest
import torch
import torch.nn.functional as F
from test_memory import LargestTensor

import flce_ops
from examples import distill, grpo, multi_token_prediction, pretrain_loop
from examples.decoder import Decoder

# K heads, B batch, T tokens of one sequence, D hidden, V vocabulary

VOCAB = 97


def falls(losses: list[float]) -> bool:
    return statistics.mean(losses[-3:]) < statistics.mean(losses[:3]) - 0.1


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))


def check_same(model: torch.nn.Module, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    exact = gradients(model, theirs)
    for name, gradient in gradients(model, ours).items():
        atol = 1e-5 * exact[name].abs().max().item()
        torch.testing.assert_close(gradient, exact[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def make_decoder(dim: int = 16) -> Decoder:
    model = Decoder(VOCAB, dim, depth=1)
    torch.nn.init.normal_(model.token.weight, std=0.5)  # logits of a few units
    return model


# ---------------------------------------------------------------- Trainer


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_fine_tuning_under_trainer_follows_the_dense_losses(lora):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if lora:
        pytest.importorskip("peft")
    from examples import finetune_trainer

    theirs = finetune_trainer.main(6, lora=lora, patched=False)
    flce_ops.linear_cross_entropy(torch.randn(5, 2).double(), torch.randn(3, 2).double(), torch.zeros(5).long())
    ours = finetune_trainer.main(6, lora=lora)
    assert flce_ops.last_path().reason.startswith("cpu tensors in torch.float32")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=0)
    assert lora or ours[-1] < ours[0] - 0.1


# ---------------------------------------------------------------- pretraining


def make_micro_batches(count: int = 4):
    made = []
    for i in range(count):
        tokens = torch.randint(VOCAB, (2, 9))
        target = torch.randint(VOCAB, (2, 9))
        target[:, 1 + 2 * i :] = pretrain_loop.IGNORE  # 2, 6, 10 and 14 targets
        made.append((tokens, target))
    return made


def test_a_pretraining_step_is_the_dense_step_of_the_whole_batch():
    model = pretrain_loop.LanguageModel(VOCAB, 16)
    dense, micro_batches = copy.deepcopy(model), make_micro_batches()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, dense)]
    loss = pretrain_loop.training_step(model, optimizers[0], micro_batches, largest_norm=0.5)

    tokens, target = (torch.cat(part) for part in zip(*micro_batches, strict=True))
    logits = dense.head(dense.decoder(tokens)).flatten(0, 1)
    lse = torch.where(target.flatten() != pretrain_loop.IGNORE, logits.logsumexp(-1), 0)
    count = (target != pretrain_loop.IGNORE).sum()
    expected = F.cross_entropy(logits, target.flatten()) + 1e-4 * lse.square().sum() / count
    expected.backward()
    assert torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5) > 0.5  # clipping has an effect
    optimizers[1].step()

    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for (name, mine), exact in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_pretraining_loop_learns_under_autocast():
    assert falls(pretrain_loop.main(8, bf16=True, backend="aot_eager"))


# ---------------------------------------------------------------- multi-token prediction


def dense_multi_token_loss(model: multi_token_prediction.MultiTokenModel, tokens: torch.Tensor) -> torch.Tensor:
    hidden, loss = model.decoder(tokens), 0.0
    for i, branch in enumerate(model.branches):
        weight = model.decoder.token.weight if model.weights is None else model.weights[i]
        logits = F.linear(branch(hidden[:, : -1 - i]), weight)  # (B, T - 1 - i, V)
        loss = loss + 0.8**i * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 + i :].flatten())
    return loss


own_weights = pytest.mark.parametrize("own_weights", [False, True], ids=["one weight", "a weight each"])


@own_weights
def test_multi_token_prediction_is_the_sum_of_dense_heads(own_weights):
    model = multi_token_prediction.MultiTokenModel(VOCAB, 3, 16, own_weights=own_weights)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(VOCAB, (3, 11))
    check_same(model, model(tokens), dense_multi_token_loss(model, tokens))


@own_weights
def test_multi_token_prediction_holds_the_logits_of_no_head(own_weights):
    vocabulary, tokens = 3001, torch.randint(3001, (8, 64))
    model = multi_token_prediction.MultiTokenModel(vocabulary, 3, 16, own_weights=own_weights)
    with LargestTensor() as mode, flce_ops.workspace(1 << 20):
        model(tokens).backward()
    assert mode.numel < tokens.numel() * vocabulary / 3  # for one head


@own_weights
def test_multi_token_prediction_learns(own_weights):
    assert falls(multi_token_prediction.main(12, 2, own_weights=own_weights))


# ---------------------------------------------------------------- GRPO


def dense_log_probs(model: Decoder, tokens: torch.Tensor, prompt: int, temperature: float) -> torch.Tensor:
    logits = F.linear(model(tokens[:, :-1]), model.token.weight) / temperature
    log_probs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.where(torch.arange(tokens.shape[1] - 1) >= prompt - 1, log_probs, 0.0)


def test_grpo_step_is_the_dense_step():
    policy, prompt, temperature = make_decoder(), 3, 0.7
    tokens = torch.randint(VOCAB, (6, 10))
    ours, theirs = (
        log_probs(policy, tokens, prompt, temperature) for log_probs in (grpo.log_probs_of, dense_log_probs)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    completion = (torch.arange(9) >= prompt - 1).expand(6, -1)
    # ratios on both sides of the clip, and a reference model that differs
    others = [(theirs + 0.4 * torch.randn_like(theirs)).detach() for _ in range(2)]
    advantages = torch.randn(6)
    check_same(
        policy,
        grpo.grpo_loss(ours, *others, advantages, completion),
        grpo.grpo_loss(theirs, *others, advantages, completion),
    )


def test_grpo_clips_what_would_move_the_policy_too_far():
    log_probs = torch.zeros(1, 4, requires_grad=True)
    old = -torch.tensor([[1.0, -1.0, 0.1, 0.0]])  # ratios e, 1 / e, 1.1, 1
    completion = torch.tensor([[True, True, True, False]])
    for advantage, moves in ((1.0, [False, True, True, False]), (-1.0, [True, False, True, False])):
        loss = grpo.grpo_loss(log_probs, old, log_probs.detach(), torch.tensor([advantage]), completion)
        assert (torch.autograd.grad(loss, log_probs)[0] != 0).tolist() == [moves]


def test_grpo_raises_the_reward():
    rewards = grpo.main(20)
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.1


# ---------------------------------------------------------------- distillation


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_distillation_loss_is_the_dense_loss(kind):
    student, teacher, temperature = make_decoder(), make_decoder(24), 1.7
    tokens, target = torch.randint(VOCAB, (2, 3, 8))
    target[0, :3] = -100
    hidden, teacher_hidden = student(tokens), teacher(tokens).detach()
    ours = distill.distillation_loss(
        hidden,
        student.token.weight,
        teacher_hidden,
        teacher.token.weight,
        target,
        kind=kind,
        temperature=temperature,
        share=0.6,
    )
    valid = target != -100
    logits = F.linear(hidden[valid], student.token.weight)
    q = (logits / temperature).log_softmax(-1)
    p = (F.linear(teacher_hidden[valid], teacher.token.weight.detach()) / temperature).log_softmax(-1)
    pair = (q, p) if kind == "forward" else (p, q)
    divergence = F.kl_div(*pair, log_target=True, reduction="batchmean")
    theirs = 0.6 * temperature**2 * divergence + 0.4 * F.cross_entropy(logits, target[valid])
    check_same(student, ours, theirs)


def test_distillation_learns():
    assert falls(distill.main(12))
