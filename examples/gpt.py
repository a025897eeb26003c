"""A small GPT whose forward ends in the loss.

# B batch, T tokens of one sequence, D hidden, V vocabulary
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce_ops

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (B, T, D), linear_weight (V, D), target (B, T) -> ()


def operator_head(hidden: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    return flce_ops.linear_cross_entropy(hidden, linear_weight, target)


def plain_head(hidden: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, linear_weight)  # (B, T, V): the operator never holds these
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, heads, T, D / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, vocab_size: int, dim: int, depth: int, heads: int, context: int, head_loss: HeadLoss) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)  # also the head's weight
        self.position = nn.Parameter(torch.zeros(context, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head_loss = head_loss
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:  # (B, T), (B, T) -> ()
        # Scaled to the magnitude of the blocks. Otherwise the model first stays at the unigram loss, and leaving that
        # saddle point amplifies rounding differences a thousandfold.
        x = self.token(tokens) * self.token.embedding_dim**0.5 + self.position[: tokens.shape[1]]
        return self.head_loss(self.norm(self.blocks(x)), self.token.weight, target)
