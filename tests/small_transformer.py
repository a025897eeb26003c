"""The model of the training tests, which ends in LinearCrossEntropyHead; and the same model with dense logits."""

# B batch, T tokens of one sequence, D hidden, V vocabulary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce_ops

VOCAB = 53  # prime: uneven shards
DIM = 16
TOKENS = 8


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallTransformer(nn.Module):
    def __init__(self, *, tied: bool = False, checkpointed: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = flce_ops.LinearCrossEntropyHead(DIM, VOCAB)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(tokens), target, normalizer=normalizer)

    def dense_loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        """The mean over the tokens that are not ignored, from logits."""
        logits = F.linear(self.hidden(tokens), self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_batches(steps: int, sequences: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(tokens, target) for each step, each (B, T). Later sequences have fewer targets, so ranks and micro-batches
    differ.
    """
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (sequences, TOKENS), generator=generator)
        target = (3 * tokens + 1) % VOCAB
        for sequence in range(sequences):
            target[sequence, : sequence * TOKENS // sequences] = -100
        batches.append((tokens.to(device), target.to(device)))
    return batches
