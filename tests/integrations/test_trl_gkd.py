"""The loss of TRL's GKDTrainer as the example writes it, because that trainer has no function to replace."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
from tiny_models import make_batch, make_model
from transformers import set_seed
from trl_inputs import STEPS, texts, word_tokenizer


@pytest.fixture(scope="module")
def gkd_trainers(tmp_path_factory):
    """Makes TRL's GKDTrainer or the example's, with a model and a teacher."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from examples.gkd_trainer import FusedGKDTrainer

    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    questions = zip(texts(8, 4, seed=1), texts(8, 5, seed=2))
    roles = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in questions]
    folder = str(tmp_path_factory.mktemp("gkd"))

    def make(ours: bool, *, bf16: bool = False, beta: float = 0.3):
        set_seed(3)
        args = GKDConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=bf16,
            disable_tqdm=True,
            lmbda=0.0,  # nothing is sampled
            beta=beta,
        )
        kind = FusedGKDTrainer if ours else GKDTrainer
        models = {"model": make_model(), "teacher_model": make_model()}
        return kind(
            **models, args=args, train_dataset=Dataset.from_dict({"messages": roles}), processing_class=tokenizer
        )

    return make


@pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of experimental trainers
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_of_gkd_as_the_example_writes_it(beta, gkd_trainers):
    trainers, batch = [gkd_trainers(ours, beta=beta) for ours in (True, False)], make_batch()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    for inputs, items in ((batch, None), (batch, 11), (batch, torch.tensor(11)), (nothing, None)):
        results = []
        for trainer in trainers:
            trainer.model.zero_grad()
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
            loss.backward()
            results.append((loss.detach(), trainer.model.lm_head.weight.grad.clone()))
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bf16", [False, True])
def test_the_steps_of_gkd_as_the_example_writes_them(bf16, gkd_trainers):
    """In bfloat16 the trunks run outside of the forward that accelerate has wrapped in autocast."""
    ours, theirs = (gkd_trainers(ours, bf16=bf16) for ours in (True, False))
    before = {name: parameter.detach().clone() for name, parameter in theirs.model.named_parameters()}
    dtypes = set()
    ours.model.model.norm.register_forward_hook(lambda _, args, out: dtypes.add(args[0].dtype))
    ours.model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: dtypes.add(out.dtype))
    for trainer in (ours, theirs):
        trainer.train()
    expected = dict(theirs.model.named_parameters())
    largest = max(float((expected[name] - start).abs().max()) for name, start in before.items())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=(2e-2 if bf16 else 1e-4) * largest)
    assert (torch.bfloat16 in dtypes) == bf16
