"""Trains a small Llama on tokens, and writes the operands of its head on text that the model never saw.

The seed fixes the batches. The learning rate follows the steps. Parameters are float32 under bf16 autocast. The file is
what `--data trained:FILE` takes: input (N, D) and linear_weight (V, D) in bf16, target (N,) int64.

B sequences of T tokens, N tokens of operands, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .data import TRAINED
from .llama import Llama, LlamaSize

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
    steps: int,
    highest: float,
    seed: int,
    # called every LOGGED steps and at the end, with the step and the mean loss since the last call
    log: Callable[[int, float], None],
) -> tuple[int, float]:
    """Ends after `steps`, or early after `seconds`. Returns the steps, and a mean of the last losses."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=tokens.is_cuda or None)
    recent: list[Tensor] = []
    started, step, loss = time.perf_counter(), 0, float("nan")
    while True:
        last = step >= steps or time.perf_counter() - started >= seconds
        if recent and (last or step % LOGGED == 0):
            loss = torch.stack(recent).mean().item()  # waits for the GPU, so that the clock counts finished work
            recent.clear()
            log(step, loss)
        if last:
            return step, loss
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / steps, highest)
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


def write(path: Path, tensors: dict[str, Tensor], **facts: object) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt", TRAINED: json.dumps(facts)})
