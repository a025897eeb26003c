"""The small GPT of examples/gpt.py without its head: from tokens to hidden states, and the weight that the head shares.
# B batch, T tokens of one sequence, D hidden, V vocabulary

# B batch, T tokens of one sequence, D hidden, V vocabulary
"""

import torch
from torch import Tensor, nn

from examples.gpt import Block


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, dim: int = 32, depth: int = 2, heads: int = 2, context: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Parameter(torch.zeros(context, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        # scaled to the magnitude of the blocks, as in examples/gpt.py
        x = self.token(tokens) * self.token.embedding_dim**0.5 + self.position[: tokens.shape[1]]
        return self.norm(self.blocks(x))
