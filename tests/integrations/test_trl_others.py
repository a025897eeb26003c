"""TRL's other trainers under patch(): a classifier of rewards trains as before, and the others are made."""

import importlib

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import trl
from test_trl import PAIRS, POLICY, PRIVILEGED, PROMPTS, SAMPLED, prefer_even, tokenizer, warned
from tiny_models import make_model
from transformers import LlamaForSequenceClassification, set_seed
from trl_inputs import STEPS

from flce_ops.integrations.trl import patched

__all__ = ["tokenizer", "warned"]  # fixtures

COMMON = {"max_steps": STEPS, "per_device_train_batch_size": 4, "optim": "sgd", "report_to": "none"}
COMMON |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}


def made(library, kind, data, options, tokenizer, folder, **extra):
    from datasets import Dataset

    options = {**options}
    if "reward_funcs" in options:
        extra["reward_funcs"] = options.pop("reward_funcs")
    if "model" not in extra:
        extra["model"] = make_model()
        extra["model"].save_pretrained(folder / "model")  # a reference model or teacher is read from there
        extra["model"].config._name_or_path = str(folder / "model")
    args = getattr(library, f"{kind}Config")(output_dir=str(folder), **COMMON, **options)
    rows = Dataset.from_dict(data)
    return getattr(library, f"{kind}Trainer")(args=args, train_dataset=rows, processing_class=tokenizer, **extra)


def classifier():
    set_seed(3)
    config = make_model().config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def test_a_trainer_of_rewards_takes_the_same_steps_without_a_warning(tokenizer, tmp_path, warned):
    """Its logits are one number of each sequence, so it holds none of the vocabulary's."""
    theirs = made(trl, "Reward", PAIRS, {"learning_rate": 0.5}, tokenizer, tmp_path, model=classifier())
    theirs.train()
    with patched():
        ours = made(trl, "Reward", PAIRS, {"learning_rate": 0.5}, tokenizer, tmp_path, model=classifier())
        before = {name: parameter.detach().clone() for name, parameter in ours.model.named_parameters()}
        ours.train()
    assert not warned()
    for found, expected in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert any(not torch.equal(before[name], parameter) for name, parameter in ours.model.named_parameters())


EXPERIMENTAL = {
    "a2po": ("A2PO", PROMPTS, {**SAMPLED, "reward_funcs": prefer_even}),
    "gmpo": ("GMPO", PROMPTS, POLICY),
    "sdft": ("SDFT", PRIVILEGED, {**SAMPLED, "num_generations": 2}),
    "tpo": ("TPO", {**PAIRS, "reference": PAIRS["chosen"]}, {}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of experimental trainers
@pytest.mark.parametrize("module", EXPERIMENTAL)
def test_other_trainers_are_made_under_patch(module, tokenizer, tmp_path):
    kind, data, options = EXPERIMENTAL[module]
    library = importlib.import_module(f"trl.experimental.{module}")
    with patched():
        assert made(library, kind, data, options, tokenizer, tmp_path).model is not None
