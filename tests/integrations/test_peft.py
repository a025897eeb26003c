"""PEFT with patched models: adapters on the blocks and on the head, added before and after patch."""

import copy

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from reference_loss import error
from small_transformer import SmallTransformer, make_batches
from test_memory import LargestTensor
from tiny_models import TOKENS, VOCAB, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.integrations.transformers import patch, unpatch

# N tokens, D hidden, V vocabulary


def make_adapted(name: str = "Llama", *, patch_first: bool, **options):
    """Returns (patched, unpatched) models with the same weights and adapters."""
    model = make_model(name)
    config = {
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 12,
        "init_lora_weights": False,
        "target_modules": ["q_proj", "down_proj"],
        **options,
    }
    seed = torch.random.get_rng_state()
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    torch.random.set_rng_state(seed)
    ours = patch(model) if patch_first else model
    ours = peft.get_peft_model(ours, peft.LoraConfig(**config))
    return (ours if patch_first else patch(ours)), theirs


def give_the_same_weights(ours, theirs):
    """Each model has drawn its own adapters."""
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters()):
            other.copy_(mine)


def draw_adapters(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def check_patched(ours, theirs, *, logits=False):
    batch = make_batch()
    assert has_logits(ours(**batch)) == logits
    check_same(loss_and_gradients(ours, **batch), loss_and_gradients(theirs, **batch))


patch_order = pytest.mark.parametrize("patch_first", [True, False], ids=["patched before", "patched after"])


ADAPTED = {
    "transform": ("BERT, transform", {"target_modules": ["query"], "modules_to_save": ["cls"], "task_type": None}),
    "all linear": ("Llama", {"target_modules": "all-linear"}),
    "tied": ("Llama tied", {"target_modules": ["embed_tokens", "v_proj"]}),
    "masked": ("BERT, transform", {"target_modules": ["query", "decoder"], "task_type": None}),
}


@patch_order
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_of_embeddings_transforms_and_heads(case, patch_first):
    name, options = ADAPTED[case]
    check_patched(*make_adapted(name, patch_first=patch_first, **options))


@patch_order
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_lora_on_the_blocks(name, patch_first):
    ours, theirs = make_adapted(name, patch_first=patch_first)
    check_patched(ours, theirs)
    adapters = [n for n, p in ours.named_parameters() if p.grad is not None]
    assert adapters and all("lora_" in n for n in adapters)


@pytest.mark.parametrize("name,head", [("Llama", "lm_head"), ("BERT, transform", "cls")])
def test_a_hook_on_the_wrapper_of_a_head_that_is_trained_whole_acts_on_logits(name, head):
    targets = {"target_modules": ["q_proj", "query"], "modules_to_save": [head], "task_type": None}
    ours, theirs = make_adapted(name, patch_first=True, **targets)
    for model in (ours, theirs):
        model.base_model.model.get_submodule(head).register_forward_hook(lambda module, args, output: output / 2)
    check_patched(ours, theirs, logits=True)


@patch_order
@pytest.mark.parametrize("wanted", ["adapters", "everything"])
def test_a_frozen_head_gets_no_weight_gradient(patch_first, wanted):
    model = make_adapted(patch_first=patch_first)[0] if wanted == "adapters" else patch(make_model())
    with FlopCounterMode(display=False) as counter:
        model(**make_batch()).loss.backward()
    flops = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "flce" in str(op))
    one_pass = 2 * (3 * TOKENS) * 24 * VOCAB
    assert flops == (2 if wanted == "adapters" else 3) * one_pass


@patch_order
def test_a_head_in_modules_to_save_is_trained(patch_first):
    ours, theirs = make_adapted(patch_first=patch_first, modules_to_save=["lm_head"])
    batch = make_batch()
    result = loss_and_gradients(ours, **batch)
    check_same(result, loss_and_gradients(theirs, **batch))
    assert not has_logits(ours(**batch))
    trained = [name for name, gradient in result[1].items() if gradient is not None and "lm_head" in name]
    assert trained == ["base_model.model.lm_head.modules_to_save.default.weight"]
    unpatch(ours)
    assert has_logits(ours(**batch))


ON_THE_HEAD = {"target_modules": ["q_proj", "lm_head"]}


ADAPTERS_OF_THE_HEAD = {
    "LoRA": {},
    "rank-stabilised LoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},  # scales each class
    "LoRA with new tokens": {"trainable_token_indices": {"embed_tokens": [5, 7]}},
}


@patch_order
@pytest.mark.parametrize("kind", ADAPTERS_OF_THE_HEAD)
@pytest.mark.parametrize("name", ["Llama", "Llama tied", "Gemma2", "Phi, head with bias"])
def test_kinds_of_lora_on_the_head(name, kind, patch_first):
    ours, theirs = make_adapted(name, patch_first=patch_first, **ON_THE_HEAD | ADAPTERS_OF_THE_HEAD[kind])
    give_the_same_weights(ours, theirs)
    trained = trained_in_head(ours, theirs, make_batch())
    assert {name.split(".")[-3] for name in trained} >= {"lora_A", "lora_B"}


OTHER_ADAPTERS = {
    "IA3 on the output": lambda: peft.IA3Config(target_modules=["k_proj", "lm_head"], feedforward_modules=[]),
    "IA3 on the input": lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"]),
    "VeRA": lambda: peft.VeraConfig(r=3, target_modules=["lm_head"], d_initial=0.3),
    "LoRA of the parameter": lambda: peft.LoraConfig(target_modules=["q_proj"], target_parameters=["lm_head.weight"]),
}
OTHERS = ("FourierFT", "HRA", "Hira", "LoHa", "LoKr", "OFT", "RandLora", "TinyLora")
NO_PRODUCT = ("BOFT", "Delora", "Glora", "Pvera")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [*OTHER_ADAPTERS, *OTHERS, *NO_PRODUCT])
def test_other_adapters_on_the_head_are_exact_or_refused_by_name(kind):
    make = OTHER_ADAPTERS.get(kind) or (lambda: getattr(peft, f"{kind}Config")(target_modules=["lm_head"]))
    theirs = peft.get_peft_model(make_model(), make())
    draw_adapters(theirs)
    ours, batch = patch(copy.deepcopy(theirs)), make_batch()
    if kind not in NO_PRODUCT:
        assert trained_in_head(ours, theirs, batch)
        return
    with pytest.raises(NotImplementedError, match="leave.*unpatched"):
        ours(**batch)


def test_an_adapter_that_needs_the_logits_is_refused_not_ignored():
    class Squared(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x) ** 2

    model = make_model()
    model.lm_head = Squared(model.lm_head)
    with pytest.raises((NotImplementedError, TypeError)):
        patch(model)(**make_batch())


# ---------------------------------------------------------------- trainable rows of the head


TRAINABLE_TOKENS = {
    "tied": ("Llama tied", {"trainable_token_indices": [5, 7, VOCAB - 1]}),
    "untied": ("Llama", {"trainable_token_indices": {"embed_tokens": [5, 7], "lm_head": [6, VOCAB - 1]}}),
    "softcap": ("Gemma2", {"trainable_token_indices": {"lm_head": [6, VOCAB - 1]}}),
}


@patch_order
@pytest.mark.parametrize("case", TRAINABLE_TOKENS)
def test_trainable_tokens_of_the_head(case, patch_first):
    name, options = TRAINABLE_TOKENS[case]
    ours, theirs = make_adapted(name, patch_first=patch_first, **options)
    draw_adapters(ours)
    give_the_same_weights(ours, theirs)
    check_patched(ours, theirs)
    rows = [parameter.grad for name, parameter in ours.named_parameters() if "tokens_delta" in name]
    assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in rows)


# ---------------------------------------------------------------- adapters of the head


def trained_in_head(ours, theirs, batch) -> list[str]:
    """Names in the head that have a gradient, from one pass without logits; the unpatched model has the same."""
    assert not has_logits(ours(**batch))
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    result = loss_and_gradients(ours, **batch)
    check_same(result, loss_and_gradients(theirs, **batch))
    return [name for name, gradient in result[1].items() if gradient is not None and "lm_head" in name]


def test_lora_on_the_head_takes_three_passes_over_features_of_both():
    """The frozen weight is copied beside B, and the copy's gradient is made."""
    ours, _ = make_adapted(patch_first=True, **ON_THE_HEAD)
    with FlopCounterMode(display=False) as counter, LargestTensor() as largest:
        ours(**make_batch()).loss.backward()
    flops = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "flce" in str(op))
    assert flops == 3 * 2 * (3 * TOKENS) * (24 + 3) * VOCAB
    assert largest.numel == VOCAB * (24 + 3)  # neither B A nor logits


@patch_order
def test_an_adapter_with_a_bias_of_its_own(patch_first):
    ours, theirs = make_adapted(
        "Phi, head with bias", patch_first=patch_first, lora_bias=True, target_modules=["lm_head"]
    )
    with torch.no_grad():  # B starts as 0
        for model in (ours, theirs):
            model.base_model.model.lm_head.lora_B["default"].bias.copy_(torch.linspace(-1, 1, VOCAB))
    check_patched(ours, theirs)


def test_peft_around_a_linear_cross_entropy_head():
    """LoRA of the parameter is exact. LoRA of the layer would add its logits to the loss."""
    body = {"target_modules": ["up"], "init_lora_weights": False}
    tokens, target = make_batches(1, 2, torch.device("cpu"))[0]
    for options in ({"target_parameters": ["head.weight"]}, {"modules_to_save": ["head"]}):
        model = peft.get_peft_model(SmallTransformer(), peft.LoraConfig(**body | options))
        draw_adapters(model)
        logits = model.head(model.hidden(tokens)).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, target.flatten())
        torch.testing.assert_close(model(tokens, target), expected)
    adapted = peft.get_peft_model(SmallTransformer(), peft.LoraConfig(target_modules=["head"]))
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        adapted(tokens, target).backward()


def test_float32_adapters_on_a_bfloat16_head():
    """PEFT makes float32 adapters. The pair's product is rounded where PEFT would round it."""
    model = make_model("Llama").bfloat16()
    config = peft.LoraConfig(r=3, init_lora_weights=False, **ON_THE_HEAD)
    theirs = peft.get_peft_model(model, config)
    exact, ours, batch = copy.deepcopy(theirs).double(), patch(copy.deepcopy(theirs)), make_batch()
    truth, found, plain = (loss_and_gradients(model, **batch) for model in (exact, ours, theirs))
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    for name, gradient in found[1].items():
        if gradient is not None:
            assert gradient.dtype == plain[1][name].dtype == torch.float32
            assert error(gradient, truth[1][name]) <= 2.0 * error(plain[1][name], truth[1][name]), name


@pytest.mark.parametrize("layer", ["lm_head", "lm_head.lora_B.default"])
def test_a_hook_on_what_makes_the_logits_of_an_adapted_head_acts_on_them(layer):
    ours, theirs = make_adapted(patch_first=True, **ON_THE_HEAD)
    for model in (ours, theirs):
        head = model.base_model.model.get_submodule(layer)
        head.register_forward_hook(lambda module, args, output: output / 2)
    check_patched(ours, theirs, logits=True)
    tokens = make_batch()["input_ids"]
    assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


@pytest.mark.parametrize("options", [ON_THE_HEAD, {"modules_to_save": ["lm_head"]}], ids=["LoRA", "whole"])
def test_an_adapted_head_compiles_as_one_graph_and_unpatches(options):
    ours, theirs = make_adapted(patch_first=False, **options)
    batch = make_batch() | {"use_cache": False}
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    check_same(loss_and_gradients(compiled, **batch)[:1] + ({},), loss_and_gradients(theirs, **batch)[:1] + ({},))
    unpatch(ours)
    assert has_logits(ours(**batch))


def test_prompt_tuning_ignores_its_virtual_tokens():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    theirs = peft.get_peft_model(make_model(), config)
    check_patched(patch(copy.deepcopy(theirs)), theirs)
