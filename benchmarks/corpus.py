"""Turns text into tokens: byte-pair encoding, trained on the text itself. Some documents are held out.

The text is that of any Python installation (the sources of the standard library and of installed packages), or of files
and folders that are named. A text that occurs twice counts once. Ids are in the order of the merges, frequent ones
first. The seed fixes the order of the documents.
"""

from __future__ import annotations

import random
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .report import say

SUFFIXES = {".py", ".txt", ".md", ".rst"}  # of files in folders that --text names
LARGEST_FILE = 2**20  # bytes; larger sources are mostly generated tables
PIECE = 2**16  # bytes of the pieces into which a file named by --text is cut
HELD_OUT = 20  # every 20th document is held out
TOKENIZER_DOCUMENTS = 5000  # the merges are learnt from the first files
DOCUMENTS = 512  # documents encoded at a time
END = "<|endoftext|>"  # between documents; id 0


def documents_of(roots: Iterable[Path], suffixes: set[str]) -> Iterator[bytes]:
    """The files of a folder with one of the suffixes, whole. A root that is a file, whatever its name, in pieces."""
    for root in roots:
        if root.is_dir():
            for path in sorted(path for path in root.rglob("*") if path.suffix in suffixes and path.is_file()):
                if 0 < path.stat().st_size <= LARGEST_FILE:
                    yield path.read_bytes()
        else:
            content = root.read_bytes()
            yield from (content[start : start + PIECE] for start in range(0, len(content), PIECE))


def read_corpus(documents: Iterable[bytes], *, most_bytes: int, seed: int) -> tuple[list[str], list[str]]:
    """Documents in random order, each text once, up to most_bytes. Every HELD_OUT-th is kept from training."""
    documents, size = list(dict.fromkeys(documents)), 0
    random.Random(seed).shuffle(documents)
    training: list[str] = []
    held_out: list[str] = []
    for number, document in enumerate(documents, 1):
        if size >= most_bytes:
            break
        size += len(document)
        (training if number % HELD_OUT else held_out).append(document.decode(errors="replace"))
    return training, held_out


def train_tokenizer(texts: Iterable[str], vocabulary: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"expected {vocabulary} tokens, the text gave {tokenizer.get_vocab_size()}: bring more text")
    return tokenizer


def encode(tokenizer, texts: Sequence[str]) -> Tensor:
    """(tokens,) int32, with END after each text."""
    parts = []
    for start in range(0, len(texts), DOCUMENTS):
        encodings = tokenizer.encode_batch_fast(texts[start : start + DOCUMENTS])
        parts += [np.array([*encoding.ids, 0], dtype=np.int32) for encoding in encodings]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.int32)


class Tokens(NamedTuple):
    training: Tensor  # (tokens,) int32
    held_out: Tensor


def tokens_of(text: Sequence[Path] | None, *, megabytes: float, vocabulary: int, seed: int) -> Tokens:
    """Tokens of the files and folders, or of the installed Python sources. The tokenizer is trained on them first."""
    started = time.perf_counter()
    sources = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    documents = documents_of(text or sources, SUFFIXES if text else {".py"})
    texts = read_corpus(documents, most_bytes=round(megabytes * 1e6), seed=seed)
    tokenizer = train_tokenizer(texts[0][:TOKENIZER_DOCUMENTS], vocabulary)
    tokens = Tokens(*(encode(tokenizer, part) for part in texts))
    say(
        f"{time.perf_counter() - started:.0f} s: to train on {len(texts[0])} documents of"
        f" {len(tokens.training) / 1e6:.1f} million tokens, held out {len(texts[1])} of"
        f" {len(tokens.held_out) / 1e6:.2f} million"
    )
    return tokens
