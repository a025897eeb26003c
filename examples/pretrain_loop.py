"""A pretraining step as large trainers write it: compiled, micro-batches, one token count, z-loss, clipping.

    python -m examples.pretrain_loop [--steps 20] [--bf16]

`training_step` is the part worth copying. The loss of every micro-batch is divided by the number of target tokens in
the whole batch, so that the gradient does not depend on how the batch is divided. (Averaging the means of micro-batches
with different numbers of tokens would.) With several ranks whose gradients are averaged: all_reduce the count, and
divide it by the number of ranks (examples/train_fsdp2_tp.py).
"""

import argparse

import torch
from torch import Tensor, nn

import flce_ops
from examples.batches import Batches
from examples.captured_graph import inductor_or_without
from examples.decoder import Decoder
from examples.text import byte_pair_encode, python_reference

# B sequences of T tokens in a micro-batch, D hidden, V vocabulary

IGNORE = -100


class LanguageModel(nn.Module):
    def __init__(self, vocab_size: int, dim: int = 32) -> None:
        super().__init__()
        self.decoder = Decoder(vocab_size, dim)
        self.head = flce_ops.LinearCrossEntropyHead(dim, vocab_size, ignore_index=IGNORE, z_loss=1e-4)
        self.head.weight = self.decoder.token.weight

    def forward(self, tokens: Tensor, target: Tensor, count: Tensor) -> Tensor:  # (B, T), (B, T), () -> ()
        return self.head(self.decoder(tokens), target, normalizer=count)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[tuple[Tensor, Tensor]],  # (tokens, target), (B, T) each
    *,
    bf16: bool = False,
    largest_norm: float = 1.0,
) -> float:
    device = micro_batches[0][0].device
    count = torch.stack([(target != IGNORE).sum() for _, target in micro_batches]).sum()  # stays on the device
    total = torch.zeros((), device=device)
    for tokens, target in micro_batches:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            loss = model(tokens, target, count)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def micro_batches_of(batches: Batches, count: int) -> list[tuple[Tensor, Tensor]]:
    """Every sequence ends at a random place, as documents do. After it there is nothing to predict."""
    made = []
    for _ in range(count):
        tokens, target = batches.next()
        length = torch.randint(1, target.shape[1] + 1, (len(target), 1), generator=batches.generator)
        after = torch.arange(target.shape[1]) >= length
        made.append((tokens, target.masked_fill(after.to(target.device), IGNORE)))
    return made


def main(steps: int = 20, *, bf16: bool = False, backend: str | None = None) -> list[float]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids, pieces = byte_pair_encode(python_reference()[:60_000], 512)
    model = LanguageModel(len(pieces)).to(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend or inductor_or_without(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = Batches(ids, batch=4, context=32, device=device)
    losses = []
    for step in range(1, steps + 1):
        losses.append(training_step(compiled, optimizer, micro_batches_of(batches, 4), bf16=bf16))
        if step % 5 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    options = parser.parse_args()
    main(options.steps, bf16=options.bf16)
