"""Trains a small GPT with FSDP2 x tensor parallelism. The vocabulary of its head and loss is sharded.

    torchrun --standalone --nproc-per-node 4 -m examples.train_fsdp2_tp          # 2 x 2: gloo on a CPU, NCCL on GPUs
    torchrun --standalone --nproc-per-node 8 -m examples.train_fsdp2_tp --tp 4   # 2 x 4

                    tp: vocabulary, heads and MLP features; tokens between blocks (sequence parallelism)
              ┌───────────┬───────────┐
    dp:       │ process 0 │ process 1 │   sequences 0 .. B/2      each process stores 1/2 of its tp shard (FSDP2)
    sequences ├───────────┼───────────┤
              │ process 2 │ process 3 │   sequences B/2 .. B
              └───────────┴───────────┘

The text is Python's own language reference, byte by byte. The exit code is 1 unless the loss falls below that of
guessing bytes by their frequency.
"""

# B sequences of T tokens a step, D hidden, V vocabulary

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flce_ops
from examples.text import python_reference

V = 256  # bytes


class Block(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D), under tensor parallelism this rank's (B, T / tp, D)
        x = x + self.out(self.attention(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        # under tensor parallelism q, k and v hold this rank's heads, for all tokens
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(V, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = flce_ops.LinearCrossEntropyHead(dim, V)

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor | None = None) -> Tensor:  # (B, T) -> ()
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), target, normalizer=normalizer)


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism first, then FSDP2."""
    tp, dp = mesh["tp"], mesh["dp"]
    sequence = Shard(1)
    plan = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "norm": SequenceParallel(use_local_output=True),
        "head": flce_ops.VocabParallel(input_layouts=sequence),  # every rank of tp passes the targets of all tokens
    }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        # the norms work on this rank's tokens, and the layers after them gather all tokens
        plan = {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "q": ColwiseParallel(input_layouts=sequence),
            "k": ColwiseParallel(input_layouts=sequence),
            "v": ColwiseParallel(input_layouts=sequence),
            "out": RowwiseParallel(output_layouts=sequence),
            "up": ColwiseParallel(input_layouts=sequence),
            "down": RowwiseParallel(output_layouts=sequence),
        }
        parallelize_module(block, tp, plan)
        fully_shard(block, mesh=dp, **precision(mesh))
    fully_shard(model, mesh=dp, **precision(mesh))


def precision(mesh: DeviceMesh) -> dict[str, MixedPrecisionPolicy]:
    if mesh.device_type == "cpu":
        return {}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the loss of every step, over the tokens of all processes."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # every process starts with the same weights
    model = GPT(options.dim, options.depth, options.heads, options.context).to(device)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    data = mesh["dp"]
    losses = []
    for step, (tokens, target) in enumerate(batches(options, device)):
        count = (target != -100).sum()  # an integer: FSDP's mixed precision rounds floating arguments
        share = options.batch // data.size()
        mine = slice(data.get_local_rank() * share, (data.get_local_rank() + 1) * share)
        # FSDP averages gradients over dp: times its size they are those of the mean over the tokens of all processes
        loss = data.size() * model(tokens[mine], target[mine], count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=data.get_group())
        losses.append(loss.item() / data.size())
        if dist.get_rank() == 0 and (step % options.every == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {losses[-1]:.4f}", flush=True)
    return losses


def batches(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tokens and target of a whole batch, (B, T) each, the same in every process."""
    text = torch.frombuffer(bytearray(python_reference().encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=generator)
        windows = torch.stack([text[start : start + options.context + 1] for start in starts.tolist()]).long()
        tokens, target = windows[:, :-1].contiguous().to(device), windows[:, 1:].contiguous().to(device)
        # tokens after a space are not trained on, so that the counts of processes differ
        target[tokens == ord(" ")] = -100
        yield tokens, target


def frequency_loss() -> float:
    """The entropy of a byte in nats: the loss of a model that ignores the context."""
    text = torch.frombuffer(bytearray(python_reference().encode()), dtype=torch.uint8)
    share = text.bincount(minlength=V).double() / len(text)
    return -torch.special.xlogy(share, share).sum().item()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tp", type=int, default=2, help="processes that share a copy of the model's features")
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--batch", type=int, default=16, help="sequences of all processes")
    made.add_argument("--context", type=int, default=64)
    made.add_argument("--dim", type=int, default=64)
    made.add_argument("--depth", type=int, default=2)
    made.add_argument("--heads", type=int, default=4)
    made.add_argument("--learning-rate", type=float, default=3e-3)
    made.add_argument("--every", type=int, default=10, help="steps between two printed losses")
    return made


def main() -> None:
    options = parser().parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 4 -m examples.train_fsdp2_tp")
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks % options.tp or options.heads % options.tp or options.context % options.tp:
        sys.exit(f"--tp {options.tp} must divide the {ranks} processes, the heads and the context")
    if options.batch % (ranks // options.tp):
        sys.exit(f"--batch {options.batch} must be a multiple of the {ranks // options.tp} data-parallel groups")
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if enough else torch.device("cpu")
    if enough:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if enough else "gloo", device_id=device if enough else None)
    try:
        losses, bound = train(options, device), frequency_loss()
        if dist.get_rank() == 0:
            print(f"{device.type} x {ranks}, tp {options.tp}: loss {losses[-1]:.3f}, bytes by frequency {bound:.3f}")
    finally:
        dist.destroy_process_group()
    sys.exit(losses[-1] >= bound)


if __name__ == "__main__":
    main()
