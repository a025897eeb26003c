"""Training loops of other libraries with the operator, as in docs/clients.md: the same steps as with dense logits."""

import copy
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce_ops
from flce_ops.integrations.places import Place, Replacements

# B batch, T tokens, D hidden, V vocabulary

VOCAB, DIM, STEPS = 61, 16, 3


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = [torch.randint(VOCAB, (4, 9)) for _ in range(STEPS)]
    return [(batch[:, :-1], batch[:, 1:].where(torch.rand(4, 8) < 0.8, -100)) for batch in tokens]


def check_same_parameters(ours: nn.Module, theirs: nn.Module, start: nn.Module) -> None:
    for our, their, before in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        change = float((their - before).detach().abs().max())
        assert change > 1e-4
        torch.testing.assert_close(our, their, rtol=0, atol=1e-4 * change)


# ---------------------------------------------------------------- plain loops


def test_a_model_that_gives_logits_and_a_loop_that_takes_the_loss():
    """nanoGPT and nanochat: forward(idx, targets) ends with a head and a cross-entropy."""

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)

        def forward(self, tokens, target=None, fused=True):
            hidden = self.embed(tokens).tanh()
            if target is None:
                return 15 * torch.tanh(self.lm_head(hidden) / 15)
            target = target.masked_fill(target == -100, -1)  # their ignore_index
            if fused:
                return flce_ops.linear_cross_entropy(hidden, self.lm_head.weight, target, ignore_index=-1, softcap=15)
            return F.cross_entropy(self(tokens).flatten(0, 1), target.flatten(), ignore_index=-1)

    ours = GPT()
    theirs, start, data = copy.deepcopy(ours), copy.deepcopy(ours), batches()
    for model, fused in ((ours, True), (theirs, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for tokens, target in data:
            model(tokens, target, fused).backward()
            optimizer.step(), optimizer.zero_grad()
    check_same_parameters(ours, theirs, start)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_litgpt(softcap):
    """LitGPT's GPT returns logits, so a head that returns hidden states replaces its own."""
    litgpt = pytest.importorskip("litgpt", reason="litgpt 0.5 does not install beside the pinned Transformers")
    config = litgpt.Config(
        block_size=16, n_layer=1, n_embd=DIM, n_head=2, padded_vocab_size=VOCAB, final_logit_softcapping=softcap
    )
    ours = litgpt.GPT(config)
    theirs, start, data = copy.deepcopy(ours), copy.deepcopy(ours), batches()
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for tokens, target in data:
            if model is ours:
                hidden = hidden_states(model, tokens)
                loss = flce_ops.linear_cross_entropy(hidden, model.lm_head.weight, target, softcap=softcap)
            else:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
    check_same_parameters(ours, theirs, start)


def hidden_states(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden states that `model` passes to its lm_head, without computing logits."""
    kept = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: [kept.append(args[0]), (args[0][..., :0, :],)][1])
    model(tokens)
    hook.remove()
    return kept[0]


# ---------------------------------------------------------------- verl


def test_verl_heads():
    torch_functional = pytest.importorskip(
        "verl.utils.experimental.torch_functional", reason="verl 0.9 asks for transformers<5.11"
    )
    from flce_ops.integrations import verl

    head = torch_functional.FusedLinearForPPO()
    hidden, weight = torch.randn(2, 7, DIM).requires_grad_(), torch.randn(VOCAB, DIM).requires_grad_()
    tokens = torch.randint(VOCAB, (2, 7))
    results = []
    for put in (verl.patch, verl.unpatch):
        put()
        found = head(hidden_states=hidden, vocab_weights=weight, input_ids=tokens, temperature=0.7)
        loss = (found[0] * torch.randn(2, 7, generator=torch.Generator().manual_seed(0))).sum() + found[1].sum()
        results.append([*found, *torch.autograd.grad(loss, (hidden, weight))])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.detach().abs().max()))


# ---------------------------------------------------------------- LLaMA-Factory


def test_llama_factory(tmp_path, monkeypatch):
    """A configuration by its own way in, and by the guide's launcher."""
    tuner = pytest.importorskip("llamafactory.train.tuner", reason="LLaMA-Factory 0.9 asks for transformers<=5.6")
    from safetensors.torch import load_file
    from tiny_models import make_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from flce_ops.integrations.transformers import unpatch

    guide = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    launcher = re.search(r"### LLaMA-Factory.*?```py\n(.*?)```", guide, re.DOTALL)[1]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 2} | {f"w{i}": i for i in (1, *range(3, 101))}, "w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "w1"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path / "model")
    make_model().save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{token}" for token in row) for row in torch.randint(3, 101, (32, 6)).tolist()]
    rows = [{"instruction": ask, "input": "", "output": answer} for ask, answer in zip(texts[::2], texts[1::2])]
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"texts": {"file_name": "texts.json"}}))

    def train(name: str, run) -> dict[str, torch.Tensor]:
        data = {"dataset": "texts", "dataset_dir": str(tmp_path), "template": "empty", "cutoff_len": 32}
        steps = {"max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        rate = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd"}
        folders = {"model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path / name)}
        kind = {"stage": "sft", "do_train": True, "finetuning_type": "full", "report_to": "none", "use_cpu": True}
        options = {**data, **steps, **rate, **folders, **kind, "bf16": False, "enable_liger_kernel": False}
        (tmp_path / "sft.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in options.items()))
        monkeypatch.setattr(sys, "argv", ["launcher.py", str(tmp_path / "sft.yaml")])
        run()
        return load_file(tmp_path / name / "model.safetensors")

    theirs, start = train("theirs", tuner.run_exp), load_file(tmp_path / "model" / "model.safetensors")
    ours = train("ours", lambda: exec(launcher, {}))
    unpatch(LlamaForCausalLM)
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    step = max(float((theirs[name] - before).abs().max()) for name, before in start.items())
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-4 * step)


# ---------------------------------------------------------------- private names of other libraries


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("library")
    exec(
        "class Head:\n    def forward(self, hidden): return 0\ndef caller(): return Head().forward(1)", module.__dict__
    )
    monkeypatch.setitem(sys.modules, "library", module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.0")
    return module


def test_a_method_is_replaced_and_put_back(library):
    replacements = Replacements("library", "1.0", {Place("library", "Head.forward", ("self", "hidden")): lambda *_: 1})
    replacements.put()
    assert library.caller() == 1
    replacements.take_away()
    assert library.caller() == 0
    with pytest.raises(ValueError, match="library is not patched"):
        replacements.take_away()


@pytest.mark.parametrize(
    "place,message",
    [
        (Place("library", "Gone.forward", ("self",)), "library.Gone.forward is not there"),
        (Place("library", "Head.forward", ("self", "states")), "to take .'self', 'states'., got .'self', 'hidden'."),
        (Place("library", "Head.forward", ("self", "hidden"), caller="other"), "expected library.other to call"),
    ],
)
def test_a_place_that_has_moved_is_refused(library, place, message):
    with pytest.raises(NotImplementedError, match=f"library 2.0: .*{message}.*flce_ops knows it in library 1.0"):
        Replacements("library", "1.0", {place: None}).put()
