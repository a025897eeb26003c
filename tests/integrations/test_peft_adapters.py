"""Everything that PEFT does with the adapters of a head: each has the unpatched model's loss and gradients, or PEFT's
own error. Adapters of two kinds at once, switched, disabled, merged, mixed in a batch.
"""

import copy

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from test_peft import draw_adapters
from tiny_models import check_same, has_logits, make_batch, make_model

from flce_ops.integrations.transformers import patch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, about adapters of this kind

# ---------------------------------------------------------------- several adapters

LORA = {"target_modules": ["q_proj", "lm_head"]}
BLOCKS = {"target_modules": ["q_proj"]}
DORA = LORA | {"use_dora": True}
BOTH = {"target_modules": ["embed_tokens", "lm_head"]}
SAVED = BLOCKS | {"modules_to_save": ["lm_head"]}
SAVED_BOTH = BLOCKS | {"modules_to_save": ["lm_head", "embed_tokens"]}
TOKENS = BLOCKS | {"trainable_token_indices": {"lm_head": [3, 5]}}
OTHER_TOKENS = BLOCKS | {"trainable_token_indices": {"lm_head": [4, 7, 9]}}
EMBEDDED = BLOCKS | {"trainable_token_indices": [3, 5]}

ADAPTERS = {  # the first adapter, the second
    "LoRA, LoRA": (LORA, LORA | {"r": 2}),
    "LoRA, DoRA": (LORA, DORA),
    "dropout, LoRA": (LORA | {"lora_dropout": 0.3}, LORA),
    "blocks, LoRA": (BLOCKS, LORA),
    "LoRA of both ends": (BOTH, BOTH),
    "saved, saved": (SAVED, SAVED),
    "both ends saved": (SAVED_BOTH, SAVED_BOTH),
    "tokens, tokens": (TOKENS, OTHER_TOKENS),
    "tokens, saved": (TOKENS, SAVED),
    "tokens of the embedding": (EMBEDDED, BLOCKS | {"trainable_token_indices": [4, 8]}),
    "tokens of the embedding, LoRA": (EMBEDDED, LORA),  # of tied weights, PEFT refuses to make it
    "LoRA by invocation": (LORA | {"alora_invocation_tokens": [5]}, LORA),
    "LoRA and tokens at once": (LORA | {"trainable_token_indices": [3, 5]}, LORA),
    "LoRA, embedding saved": (LORA | {"modules_to_save": ["embed_tokens"]}, LORA),
    "LoRA, head saved": (LORA | {"modules_to_save": ["lm_head"]}, SAVED),
    "tokens, head saved": (EMBEDDED | {"modules_to_save": ["lm_head"]}, BLOCKS),
}


def make_two(name, adapters):
    """A model with two adapters that change it, and a patched copy."""
    configs = [{"task_type": "CAUSAL_LM", "r": 3, "init_lora_weights": False} | config for config in adapters]
    theirs = peft.get_peft_model(make_model(name), peft.LoraConfig(**configs[0]))
    theirs.add_adapter("second", peft.LoraConfig(**configs[1]))
    for name in ("second", "default"):
        theirs.set_adapter(name)
        draw_adapters(theirs)
    return patch(copy.deepcopy(theirs)), theirs


def step(model, batch, **options):
    loss = model(**batch, **options).loss
    loss.backward()
    return loss


def after(change):
    """A step of a model after `change`, of which every parameter is trained."""
    return lambda model, batch: step((change(model) or model).requires_grad_(True), batch)


def disabled(model, batch):
    with model.disable_adapter():
        return after(lambda model: None)(model, batch)


def disabled_in_backward(model, batch):
    loss = model(**batch).loss
    with model.disable_adapter():
        loss.backward()
    return loss


def two_adapters_one_backward(model, batch):
    loss = model(**batch).loss
    model.set_adapter("second")
    loss = loss + 2.0 * model(**batch).loss
    model.set_adapter("default")
    loss.backward()
    return loss


def mixed(model, batch, names=("default", "second", "__base__")):
    return step(model.eval().requires_grad_(True), batch, adapter_names=list(names))


def weighted(model):
    model.add_weighted_adapter(["default", "second"], [0.3, 0.6], "sum", combination_type="linear")
    model.set_adapter("sum")


WAYS = {
    "first": step,
    "second": after(lambda model: model.set_adapter("second")),
    "both": after(lambda model: model.base_model.set_adapter(["default", "second"])),
    "disabled": disabled,
    "disabled in backward": disabled_in_backward,
    "two adapters, one backward": two_adapters_one_backward,
    "mixed": mixed,
    "mixed, unknown": lambda model, batch: mixed(model, batch, ["no"] * 3),
    "mixed, in training": lambda model, batch: step(model.train(), batch, adapter_names=["second"] * 3),
    "merged": after(lambda model: model.merge_adapter()),
    "merged and unmerged": after(lambda model: (model.merge_adapter(), model.unmerge_adapter())[1]),
    "weighted": after(weighted),
    "deleted": after(lambda model: (model.set_adapter("second"), model.delete_adapter("default"))[1]),
    "merged for good": after(lambda model: model.merge_and_unload()),
    "unloaded": after(lambda model: model.unload()),
}


def outcome(model, way, batch):
    """The loss and gradients, or what PEFT says."""
    torch.manual_seed(3)  # of dropout
    try:
        loss = WAYS[way](model, batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("adapters", ADAPTERS)
def test_adapters_of_a_head_act_as_unpatched_or_peft_refuses(adapters, name, way):
    try:
        ours, theirs = make_two(name, ADAPTERS[adapters])
    except ValueError as error:  # before there is anything to patch
        assert name == "Gemma2" and "Target module" in str(error)
        return
    batch = make_batch()
    batch["input_ids"][:, 4] = 5  # invokes
    found, expected = outcome(ours, way, batch), outcome(theirs, way, batch)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert not isinstance(found, str), found
        check_same(found, expected)


def test_a_mixed_batch_takes_logits_and_says_so(caplog, monkeypatch):
    """Each sequence has a head of its own."""
    ours, theirs = make_two("Llama", ADAPTERS["LoRA, LoRA"])
    batch, names = make_batch(), ["default", "second", "__base__"]
    monkeypatch.setattr("flce_ops.integrations.full_logits._logged", set())
    with torch.no_grad():
        assert has_logits(ours.eval()(**batch, adapter_names=names))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "_adapter_names_pre_forward_hook" in caplog.text
        assert not has_logits(ours(**batch))


@pytest.mark.parametrize("adapted", [False, True])
def test_an_argument_that_a_hook_gives_to_the_head_is_not_dropped(adapted):
    model = make_two("Llama", ADAPTERS["LoRA, LoRA"])[0] if adapted else patch(make_model())
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs | {"scale": 2}), with_kwargs=True)
    with pytest.raises(NotImplementedError, match=r"called with hidden states alone, got \['scale'\] too"):
        model(**make_batch())
