"""Shared by the tests of TRL: its modules, texts and a tokenizer for them, and inputs of its head."""

import importlib

import torch
from tiny_models import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# N tokens, D hidden, V vocabulary

STEPS = 3
UTILS, SFT, DISTILLATION = "trl.trainer.utils", "trl.trainer.sft_trainer", "trl.trainer.distillation_trainer"


def trl_utils():
    # Not imported at the top: TRL with its trainers takes seconds to import, in every process that collects tests.
    return importlib.import_module(UTILS)


def trl_divergence():
    return importlib.import_module(DISTILLATION)._chunked_divergence_loss


def texts(count: int, words: int, seed: int) -> list[str]:
    tokens = torch.randint(3, VOCAB, (count, words), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{token}" for token in row) for row in tokens.tolist()]


def word_tokenizer() -> PreTrainedTokenizerFast:
    names = {0: "<pad>", 2: "<eos>"}
    words = models.WordLevel({names.get(token, f"w{token}"): token for token in range(VOCAB)}, "w1")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w1")


def head_inputs(dtype: torch.dtype, *, bias: bool, tokens: int = 37):
    """hidden (N, D), weight (V, D), bias (V,), targets (N,)."""
    hidden, weight = torch.randn(tokens, 24), 0.5 * torch.randn(VOCAB, 24)
    leaves = [hidden, weight, torch.randn(VOCAB) if bias else None]
    leaves = [None if leaf is None else leaf.to(dtype).requires_grad_() for leaf in leaves]
    return *leaves, torch.randint(VOCAB, (tokens,))
