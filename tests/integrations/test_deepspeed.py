"""DeepSpeed's ZeRO-3 around patched models, heads and TRL's trainer: the steps that it takes with their own losses."""

import contextlib
import importlib.util

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world
from torch import nn

import flce_ops

for needed in ("deepspeed", "transformers", "accelerate"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

# B batch of a rank, T tokens, D hidden, V vocabulary

B, T, D, V, STEPS, RANKS = 2, 8, 24, 101, 3, 2
ZERO3 = {
    "train_micro_batch_size_per_gpu": B,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def without_a_build():
    """On a CPU DeepSpeed would build a communication of its own through shared memory, which takes a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def train(model, loss_of) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of STEPS, and the parameters behind them."""
    deepspeed = without_a_build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, config=ZERO3, optimizer=optimizer)
    tokens = torch.randint(3, V, (STEPS, RANKS * B, T), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in tokens:
        loss = loss_of(engine, batch[dist.get_rank() * B :][:B])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert all(parameter.numel() == 0 for parameter in model.parameters())  # taken away
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.destroy()
    return losses, after


def check_same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for name, parameter in expected[1].items():
        atol = 1e-5 * float(parameter.abs().max())
        torch.testing.assert_close(found[1][name], parameter, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["Llama", "Llama tied"])
def test_a_patched_model_of_transformers(name):
    run_in_world(("cpu", RANKS), train_a_model_of_transformers, name)


def train_a_model_of_transformers(_, name):
    from tiny_models import make_model

    from flce_ops.integrations.transformers import patch

    found = []
    for ours in (False, True):
        torch.manual_seed(1)
        model = make_model(name)
        found.append(train(patch(model) if ours else model, lambda engine, t: engine(input_ids=t, labels=t).loss))
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    check_same(*reversed(found))


class Model(nn.Module):
    def __init__(self, reduction: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.reduction = nn.Embedding(V, D), reduction
        if reduction is None:
            self.head = nn.Linear(D, V, bias=True)
        else:
            self.head = flce_ops.LinearCrossEntropyHead(D, V, bias=True)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(V, D))
            self.head.bias.copy_(torch.randn(V))

    def forward(self, tokens):
        hidden, target = self.embed(tokens[:, :-1]).tanh(), tokens[:, 1:]
        if self.reduction is None:
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())
        return self.head(hidden, target, reduction=self.reduction).mean()


@pytest.mark.parametrize("reduction", ["mean", "none"])  # gradients made in forward, in backward
def test_a_head(reduction):
    run_in_world(("cpu", RANKS), train_a_head, reduction)


def train_a_head(_, reduction):
    check_same(*(train(Model(kind), lambda engine, tokens: engine(tokens)) for kind in (reduction, None)))


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_an_sft_trainer_of_trl(loss_type, tmp_path):
    pytest.importorskip("trl")
    run_in_world(("cpu", RANKS), train_by_trl, loss_type, str(tmp_path))


def train_by_trl(_, loss_type, folder):
    import os

    from datasets import Dataset
    from tiny_models import make_model
    from trl import SFTConfig, SFTTrainer
    from trl_inputs import texts, word_tokenizer

    from flce_ops.integrations.trl import patched

    without_a_build()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533", "LOCAL_WORLD_SIZE": str(RANKS)}
    logs = []
    for patching in (contextlib.nullcontext(), patched()):
        torch.manual_seed(0)
        model = make_model("Llama")
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=B,
                loss_type=loss_type,
                learning_rate=0.5,
                optim="sgd",
                lr_scheduler_type="constant",
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                deepspeed=ZERO3,
            ),
            train_dataset=Dataset.from_dict({"text": texts(4 * RANKS * B, T, seed=0)}),
            processing_class=word_tokenizer(),
        )
        with patching:
            trainer.train()
        assert model.lm_head.weight.numel() == 0
        logs.append(trainer.state.log_history)
    numbers = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    for theirs, ours in zip(*logs, strict=True):
        for number in numbers:
            if number in theirs:
                assert ours[number] == pytest.approx(theirs[number], rel=1e-5), number
    assert len(logs[0]) >= STEPS
