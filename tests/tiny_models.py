"""Small language models of Transformers, made from configs, with random weights."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import PreTrainedModel

VOCAB = 101  # prime
TOKENS = 11
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # logits of several units; with smaller ones a softcap or a scale would change little
    "initializer_range": 0.4,
}
NUM_ITEMS = {  # forms of num_items_in_batch
    "number": 17,
    "0-d tensor": torch.tensor(17),
    "0-d floating tensor": torch.tensor(17.5),  # as Trainer passes it under tensor parallelism
    "1-d tensor": torch.tensor([17]),  # as Trainer passes it under DataParallel
}
HEAD_DIM = {"head_dim": 8}

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
VISION |= {"patch_size": 4, "projection_dim": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
START = {"decoder_start_token_id": 2}
BART = {"d_model": 24, "dropout": 0.0, "init_std": 0.4}
BART |= {f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in [("layers", 2), ("attention_heads", 4)]}
BART |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
BIASES = ("logits_bias", "lm_head.bias", "decoder.bias", "projector.bias", "predictions.bias")  # zeros in a new model

# (class, additions to SIZES in its config)
MODELS = {
    "Llama": ("LlamaForCausalLM", {}),
    "Llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3ForCausalLM", HEAD_DIM),
    "Mistral": ("MistralForCausalLM", HEAD_DIM),
    "Gemma2": ("Gemma2ForCausalLM", {**HEAD_DIM, "final_logit_softcapping": 3.0}),
    "Gemma3": ("Gemma3ForCausalLM", {**HEAD_DIM, "final_logit_softcapping": 2.5}),
    "Gemma3 without softcap": ("Gemma3ForCausalLM", HEAD_DIM),
    "Phi3": ("Phi3ForCausalLM", {}),
    "Granite": ("GraniteForCausalLM", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "Cohere": ("CohereForCausalLM", {"logit_scale": 0.25}),
    # models on the generic path
    "Gemma": ("GemmaForCausalLM", HEAD_DIM),
    "Phi, head with bias": ("PhiForCausalLM", {"hidden_size": 32}),
    "GPT-2, tied": (
        "GPT2LMHeadModel",
        {"n_embd": 24, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "HyperCLOVA, scaled in the line of the head": ("HyperCLOVAXForCausalLM", {"logits_scaling": 0.5}),
    "Mixtral, router loss": (
        "MixtralForCausalLM",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3},
    ),
    # a path into the configuration
    "Mamba, cast to the weight's dtype": ("MambaForCausalLM", {"state_size": 4, "expand": 2}),
    "RecurrentGemma, softcap on one line": (
        "RecurrentGemmaForCausalLM",
        {"logits_soft_cap": 2.0, "lru_width": 24, "head_dim": 6, "use_cache": False, "block_types": ["attention"]},
    ),
    "PaliGemma, softcap of the text model": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        },
    ),
    "Gemma4, softcap assigned in its test": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **{**SIZES, "model_type": "gemma4_text", "head_dim": 8, "final_logit_softcapping": 2.0},
                **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 101, "num_kv_shared_layers": 0},
            },
            "vision_config": None,
            "audio_config": None,
        },
    ),
    "T5Gemma, softcap of the decoder": (
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {**SIZES, "head_dim": 8},
            "decoder": {**SIZES, "head_dim": 8, "cross_attention_hidden_size": 24, "final_logit_softcapping": 2.0},
        },
    ),
    # encoder-decoders whose forward has its own cross-entropy
    "T5, scaled before its tied head": (
        "T5ForConditionalGeneration",
        {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, **START},
    ),
    "T5, head of its own": (
        "T5ForConditionalGeneration",
        {
            **{"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
            **{"tie_word_embeddings": False, **START},
        },
    ),
    "BART, bias that is a buffer": ("BartForConditionalGeneration", {**BART, **START}),
    "BART, causal": ("BartForCausalLM", BART),
    # masked language models with heads that end in a linear layer
    "BERT, transform, causal": ("BertLMHeadModel", {"is_decoder": True, **NO_DROPOUT}),
    "BERT, transform": ("BertForMaskedLM", NO_DROPOUT),
    "ALBERT, transform to fewer features": ("AlbertForMaskedLM", {"embedding_size": 16, **NO_DROPOUT}),
    "ESM, transform and bias": ("EsmForMaskedLM", {**NO_DROPOUT, "mask_token_id": 3}),
    "ELECTRA, scores named twice": ("ElectraForMaskedLM", {"embedding_size": 24, **NO_DROPOUT}),
    "DistilBERT, loss that is a module": (
        "DistilBertForMaskedLM",
        {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "ModernBERT, loss without a shift": (
        "ModernBertForMaskedLM",
        {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
    "ModernBERT, head on labelled tokens alone": (
        "ModernBertForMaskedLM",
        {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "sparse_prediction": True},
    ),
    # forwards that shift and cut the logits themselves, or ask for their shape
    "CLVP, shift of its own": ("ClvpForCausalLM", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "BLIP's text model, shift and smoothing of its own": (
        "BlipTextLMHeadModel",
        {"is_decoder": True, "label_smoothing": 0.1, "encoder_hidden_size": 24, **NO_DROPOUT},
    ),
    "xLSTM, softcap in a function": ("xLSTMForCausalLM", {"hidden_size": 32, "num_heads": 2, "use_cache": False}),
    "Qwen2-Audio, tokens of a mask": (
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "qwen2"},
            "audio_config": {
                **{"model_type": "qwen2_audio_encoder", "d_model": 16, "num_mel_bins": 8},
                **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
            },
        },
    ),
    "Llama 4 with images, a model in a model": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **{**SIZES, "model_type": "llama4_text", "head_dim": 8, "num_local_experts": 2},
                **{"intermediate_size_mlp": 40, "interleave_moe_layer_step": 2},
            },
            "vision_config": {
                **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
                **{"image_size": 8, "patch_size": 4, "vision_output_dim": 16},
                **{"projector_input_dim": 16, "projector_output_dim": 16},
            },
        },
    ),
    "DeBERTa, one of two heads": ("DebertaV2ForMaskedLM", {"legacy": True, **NO_DROPOUT}),
    "Inkling, padded vocabulary": (
        "InklingForCausalLM",
        {**HEAD_DIM, "unpadded_vocab_size": 97, "n_routed_experts": 2, "num_experts_per_tok": 1},
    ),
    "Inkling 2": ("Inkling2ForCausalLM", {**HEAD_DIM, "moe_intermediate_size": 16}),
    # of Transformers 5.24
    "Inkling 2 with loops": ("Inkling2LoopForCausalLM", HEAD_DIM),
    "Apertus 1.5": ("Apertus1p5TextForCausalLM", {}),
    "Dory, a learnt scale of each class": ("DoryForCausalLM", {"use_cache": False}),
    "Lara Mini": ("LaraMiniForCausalLM", {}),
}

BROKEN = {("Llama4ForConditionalGeneration", "5.24.0")}


def make_model(name: str = "Llama", **changes) -> PreTrainedModel:
    class_name, extra = MODELS[name]
    version = transformers.__version__
    if not hasattr(transformers, class_name) or (class_name, version) in BROKEN:
        pytest.skip(f"Transformers {version} has no {class_name}, or one that raises in its own forward")
    model_class = getattr(transformers, class_name)
    named_otherwise = ("hidden_size", "num_", "max_") if {"n_embd", "d_model", "dim"} & set(extra) else ()
    sizes = {name: size for name, size in SIZES.items() if not name.startswith(named_otherwise)}
    model = model_class(model_class.config_class(**{**sizes, **extra, **changes})).train()
    with torch.no_grad():
        for tensor in [tensor for name, tensor in model.state_dict().items() if name.endswith(BIASES)]:
            tensor.normal_()
    return model


def make_batch(sequences: int = 3) -> dict[str, Tensor]:
    """Zipf-like tokens (B, T), padded on the right; labels ignore the padding and a prompt."""
    rank = torch.arange(VOCAB - 3).float()
    tokens = 3 + torch.multinomial(1 / (1 + rank), sequences * TOKENS, replacement=True).view(sequences, TOKENS)
    attention_mask, labels = torch.ones_like(tokens), tokens.clone()
    for i in range(sequences):
        labels[i, : 1 + 2 * i] = -100
        if i > 0:
            attention_mask[i, -i:], labels[i, -i:], tokens[i, -i:] = 0, -100, 0
    return {"input_ids": tokens, "attention_mask": attention_mask, "labels": labels}


def has_logits(output) -> bool:
    return isinstance(output.logits, Tensor)


def loss_and_gradients(model: nn.Module, **inputs) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_same(ours, theirs, tolerance: float = 2e-5) -> None:
    """Compares losses and gradients, each gradient relative to its own largest entry.

    The bias of a key changes no softmax, so its gradient is only rounding, 1e-7 of the largest in the model.
    """
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    largest = max((gradient.abs().max().item() for gradient in theirs[1].values() if gradient is not None), default=0)
    for name, expected in theirs[1].items():
        if expected is None:
            assert ours[1][name] is None, name
        else:
            atol = max(tolerance * expected.abs().max().item(), 1e-6 * largest)
            torch.testing.assert_close(ours[1][name], expected, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
