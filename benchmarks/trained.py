"""`python -m benchmarks.trained FILE`: hidden states, head and targets of a language model trained for a few minutes.

    python -m benchmarks.trained trained.safetensors --minutes 4 --compile      # on a GPU; then
    python -m benchmarks --data trained:trained.safetensors --modes fwd_bwd

    text          of any Python installation: the sources, with docstrings, of the standard library and the installed
                  packages; or the files and folders of --text. A text that occurs twice counts once.
    tokens        byte-pair encoding trained on that text: ids in the order of the merges, frequent ones first
    model         the Llama of llama.py: float32 parameters under bf16 autocast, with flce_ops' loss
    operands      from documents that training never saw: input (N, D), linear_weight (V, D) in bf16, target (N,) int64

The seed fixes the order of the documents, the initial weights and the batches. The learning rate follows the clock, or
with --steps the steps. A run that reaches all its steps is reproducible, except for the order in which kernels add.

B sequences of T tokens, N tokens of operands, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import flce_ops

from .corpus import tokens_of
from .data import TRAINED
from .llama import Llama, LlamaSize
from .report import environment, say

WARMUP, LAST_RATE = 0.05, 0.1  # shares: of the run, and of the highest learning rate
LOGGED = 20  # steps between log lines


def windows(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(B, T) tokens from each start on, and the token that follows each."""
    places = starts.to(tokens.device)[:, None] + torch.arange(length + 1, device=tokens.device)
    found = tokens[places].long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def learning_rate(progress: float, highest: float) -> float:
    """Rises linearly, then falls as a cosine; progress is in [0, 1]."""
    if progress < WARMUP:
        return highest * max(progress, 1e-3) / WARMUP
    falling = (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2
    return highest * (LAST_RATE + (1 - LAST_RATE) * falling)


def train(
    model: nn.Module,  # (B, T) tokens, (B, T) targets -> loss
    tokens: Tensor,
    size: LlamaSize,
    *,
    seconds: float,
    steps: int | None,
    highest: float,
    seed: int,
    # called every LOGGED steps and at the end, with the step and the mean loss since the last call
    log: Callable[[int, float], None] | None = None,
) -> tuple[int, float]:
    """Ends after `seconds` or `steps`, whichever comes first. Returns the steps, and a mean of the last losses."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=tokens.is_cuda or None)
    recent: list[Tensor] = []
    started, step, loss = time.perf_counter(), 0, float("nan")
    while True:
        spent = time.perf_counter() - started
        progress = step / steps if steps else spent / seconds
        last = progress >= 1 or spent >= seconds
        if recent and (last or step % LOGGED == 0):
            loss = torch.stack(recent).mean().item()  # waits for the GPU, so that the clock counts finished work
            recent.clear()
            if log:
                log(step, loss)
            if last or step % (10 * LOGGED) == 0:
                read = step * size.sequences * size.context
                say(f"{spent:.0f} s: step {step}, {read / 1e6:.1f} million tokens, loss {loss:.3f}")
        if last:
            return step, loss
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, highest)
        starts = torch.randint(0, tokens.shape[0] - size.context, (size.sequences,), generator=generator)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            value = model(*windows(tokens, starts, size.context))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(value.detach())
        step += 1


@torch.no_grad()
def operands(model: Llama, tokens: Tensor, size: LlamaSize, count: int) -> dict[str, Tensor]:
    """The operands of `count` held-out tokens, in evenly spread sequences of the training length."""
    sequences = -(-count // size.context)
    starts = torch.linspace(0, tokens.shape[0] - size.context - 1, sequences, dtype=torch.float64).long()
    hidden, targets = [], []
    for some in starts.split(size.sequences):
        read, target = windows(tokens, some, size.context)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden.append(model.hidden_states(read).flatten(0, 1).bfloat16())
        targets.append(target.flatten())
    return {
        "input": torch.cat(hidden)[:count].contiguous(),
        "linear_weight": model.head.weight.detach().bfloat16(),
        "target": torch.cat(targets)[:count].contiguous(),
    }


def size_of(options: argparse.Namespace) -> LlamaSize:
    heads = max(1, options.hidden // 64)
    mlp = max(64, options.hidden * 8 // 3 // 64 * 64)
    return LlamaSize(options.hidden, options.layers, heads, mlp, options.vocabulary, options.context, options.sequences)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.trained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="to write, *.safetensors")
    parser.add_argument("--text", type=Path, nargs="+", default=None, help="files and folders instead of the sources")
    parser.add_argument("--megabytes", type=float, default=256, help="of text, at most")
    # The default, 192 * 256, is accepted by every peer. 50257 is GPT-2's.
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=64, help="of a step")
    parser.add_argument("--tokens", type=int, default=16384, help="of the operands")
    parser.add_argument("--minutes", type=float, default=4, help="of training; text and tokenizer come before")
    parser.add_argument("--steps", type=int, default=None, help="the most; as many as the minutes give")
    parser.add_argument("--rate", type=float, default=6e-4, help="the highest learning rate")
    parser.add_argument("--compile", action="store_true", help="the model's blocks by torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--commit", default=None, help="to note in the file, where git cannot tell")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    options = parse(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    here = environment(device, options.commit)

    started = time.perf_counter()
    text = tokens_of(options.text, megabytes=options.megabytes, vocabulary=options.vocabulary, seed=options.seed)
    training, held_out = (tokens.to(device) for tokens in text)
    sequences = -(-options.tokens // options.context)
    for name, tokens, least in (
        ("training", training, options.context + 1),
        ("held-out", held_out, sequences * options.context + 1),
    ):
        if tokens.shape[0] < least:
            raise ValueError(f"expected {least} {name} tokens or more, the text gave {tokens.shape[0]}")
    torch.manual_seed(options.seed)
    size = size_of(options)
    model = Llama(size, fused_head=True).to(device)
    if options.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)
    steps, loss = train(
        model,
        training,
        size,
        seconds=60 * options.minutes,
        steps=options.steps,
        highest=options.rate,
        seed=options.seed,
    )
    found = operands(model, held_out, size, options.tokens)
    held_out_loss = flce_ops.linear_cross_entropy(found["input"], found["linear_weight"], found["target"]).item()
    write(
        options.file,
        found,
        seed=options.seed,
        steps=steps,
        tokens_read=steps * size.sequences * size.context,
        loss=loss,
        held_out_loss=held_out_loss,
        layers=options.layers,
        text=[str(path) for path in options.text] if options.text else "Python sources",
        **here.__dict__,
    )
    say(f"{time.perf_counter() - started:.0f} s: held-out loss {held_out_loss:.3f} -> {options.file}")
    return options.file


def write(path: Path, tensors: dict[str, Tensor], **facts: object) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt", TRAINED: json.dumps(facts)})


def facts_of(path: Path) -> dict:
    """How the operands in a file were made."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[TRAINED])


if __name__ == "__main__":
    main()
