"""Multi-token prediction (Medusa heads): k heads predict the next k tokens. The logits of none of them are held.

    python -m examples.multi_token_prediction [--steps 30] [--heads 3] [--own-weights]

                 ┌ branch 0 ─ (B, T, D) ┐
    decoder ─────┼ branch 1 ─ (B, T, D) ┼─── linear_cross_entropy against the tokens 1, 2, ... k places on
                 └ branch 2 ─ (B, T, D) ┘

If all heads share one weight, their hidden states are one input of k B T tokens, and the loss is one call. If each has
its own weight, there are k calls. Each makes its gradients at once and leaves no logits for backward.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce_ops
from examples.batches import Batches
from examples.decoder import Decoder
from examples.text import byte_pair_encode, python_reference

# K heads, B batch, T tokens of one sequence, D hidden, V vocabulary

IGNORE = -100


class Branch(nn.Module):
    """Medusa's residual block, which starts as the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MultiTokenModel(nn.Module):
    def __init__(self, vocab_size: int, heads: int, dim: int = 32, *, own_weights: bool = False) -> None:
        super().__init__()
        self.decoder = Decoder(vocab_size, dim)
        self.branches = nn.ModuleList(Branch(dim) for _ in range(heads))
        self.weights = None
        if own_weights:
            self.weights = nn.ParameterList(0.02 * torch.randn(vocab_size, dim) for _ in range(heads))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> ()
        hidden = self.decoder(tokens)
        hiddens = torch.stack([branch(hidden) for branch in self.branches])  # (K, B, T, D)
        targets = shifted_targets(tokens, len(self.branches))  # (K, B, T)
        if self.weights is None:
            return one_weight(hiddens, self.decoder.token.weight, targets)
        return weight_each(hiddens, self.weights, targets)


def shifted_targets(tokens: Tensor, heads: int) -> Tensor:  # (B, T) -> (K, B, T)
    """Head i predicts token t + 1 + i. The last positions of a sequence have nothing to predict."""
    shifted = [F.pad(tokens[:, 1 + i :], (0, 1 + i), value=IGNORE) for i in range(heads)]
    return torch.stack(shifted)


def head_share(head: int) -> float:
    """The weight of a head's loss: Medusa's 0.8 ** i, so later tokens count less."""
    return 0.8**head


def one_weight(hiddens: Tensor, linear_weight: Tensor, targets: Tensor) -> Tensor:  # ()
    """One call: the weight is read once, and its gradient made once, for all heads."""
    counts = (targets != IGNORE).sum(dim=(1, 2))  # (K,)
    shares = torch.tensor([head_share(i) for i in range(len(targets))], device=targets.device)
    token_weight = (shares / counts)[:, None, None].expand(targets.shape)  # (K, B, T)
    return flce_ops.linear_cross_entropy(hiddens, linear_weight, targets, token_weight=token_weight, reduction="sum")


def weight_each(hiddens: Tensor, weights: nn.ParameterList, targets: Tensor) -> Tensor:  # ()
    """K calls. The gradients of each are made before the next begins."""
    loss = hiddens.new_zeros(())
    for head, (hidden, weight, target) in enumerate(zip(hiddens, weights, targets, strict=True)):
        loss = loss + head_share(head) * flce_ops.linear_cross_entropy(hidden, weight, target)
    return loss


def main(steps: int = 30, heads: int = 3, *, own_weights: bool = False) -> list[float]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids, pieces = byte_pair_encode(python_reference()[:60_000], 512)
    batches = Batches(ids, batch=8, context=32, device=device)
    model = MultiTokenModel(len(pieces), heads, own_weights=own_weights).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        tokens, _ = batches.next()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--own-weights", action="store_true", help="a linear_weight for each head")
    options = parser.parse_args()
    main(options.steps, options.heads, own_weights=options.own_weights)
