"""A small Llama for the weak-scaling run and trained.py: RMSNorm, rotary positions, causal attention, SwiGLU, own head.

B sequences of T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import flce_ops


class LlamaSize(NamedTuple):
    dim: int
    depth: int
    heads: int
    hidden: int  # hidden size of the MLP
    vocab: int
    context: int  # T
    sequences: int  # B, per rank


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(size.dim)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(size.dim)
        self.gate_up = nn.Linear(size.dim, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # (B, T, D)
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # (B, heads, T, D / heads); angles (T, D / heads / 2)
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Llama(nn.Module):
    """forward(tokens, target) -> mean loss. The head is flce_ops, or F.cross_entropy on float32 logits."""

    def __init__(self, size: LlamaSize, *, fused_head: bool) -> None:
        super().__init__()
        self.fused_head = fused_head
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.dim)
        self.head = flce_ops.LinearCrossEntropyHead(size.dim, size.vocab)
        frequency = 10000.0 ** (-torch.arange(0, 1, 2 * size.heads / size.dim))
        angle = torch.arange(size.context)[:, None] * frequency
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def hidden_states(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.norm(x)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:  # (B, T), (B, T) -> ()
        return self.loss(self.hidden_states(tokens), target)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:  # (B, T, D), (B, T) -> ()
        if self.fused_head:
            return self.head(x, target)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), target.flatten())


def fully_sharded(model: Llama, mesh: DeviceMesh, *, compiled: bool) -> None:
    """FSDP2 in bfloat16 with float32 master weights. Each block is a unit; embedding and head belong to the root."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
