"""Axolotl, run by a configuration as its users write one: the steps without the guide's plugin, and with it."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("axolotl", reason="Axolotl asks for one version of every package")

import torch
from safetensors.torch import load_file
from tiny_models import make_model
from trl_inputs import texts, word_tokenizer

import flce_ops

STEPS = 3
CONFIGURATION = """
base_model: {folder}/model
datasets:
  - path: {folder}/texts.jsonl
    type: completion
output_dir: {folder}/{name}
dataset_prepared_path: {folder}/prepared
dataset_num_proc: 1
sequence_len: 32
sample_packing: false
micro_batch_size: 4
gradient_accumulation_steps: 2
max_steps: {steps}
optimizer: sgd
lr_scheduler: constant
learning_rate: 0.1
bf16: false
fp16: false
tf32: false
logging_steps: 1
special_tokens:
  pad_token: <pad>
"""


def recipe() -> tuple[str, str]:
    """The plugin and the lines of the configuration that docs/clients.md has."""
    text = (Path(flce_ops.__file__).parents[1] / "docs" / "clients.md").read_text()
    section = text[text.index("### Axolotl") :]
    return tuple(re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("py", "yaml"))


def test_a_configuration_with_the_plugin_takes_the_steps_of_one_without(tmp_path, monkeypatch):
    train_cli = pytest.importorskip("axolotl.cli.train")
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    monkeypatch.syspath_prepend(tmp_path)
    plugin, lines = recipe()
    (tmp_path / "my_plugin.py").write_text(plugin)
    torch.manual_seed(0)
    for made in (make_model(), word_tokenizer()):
        made.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts(64, 12, seed=0)))

    def train(name: str, more: str) -> dict[str, torch.Tensor]:
        path = tmp_path / f"{name}.yml"
        path.write_text(CONFIGURATION.format(folder=tmp_path, name=name, steps=STEPS) + more)
        train_cli.do_cli(str(path))
        return load_file(tmp_path / name / "model.safetensors")

    theirs, start = train("theirs", ""), load_file(tmp_path / "model" / "model.safetensors")
    ours = train("ours", lines)
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    step = max(float((theirs[name] - before).abs().max()) for name, before in start.items())
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-4 * step)
