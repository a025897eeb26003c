"""Inputs of the tests: a Zipf prior over the vocabulary and context noise. Targets are drawn from the model; some are
ignored.

The logits are not Gaussian, because all classes would then be about equally likely. That hides both the rounding of
large probabilities and the tail of small ones.
"""

# N tokens, D hidden, V vocabulary

import dataclasses
import math

import torch
from torch import Tensor

from flce_ops.ops.function import NUMBERS

# The default sizes are no multiples of a tile, of a warp or of 16 bytes.
RAGGED = (252, 507, 123)  # N, D, V
SMALL = (13, 11, 31)

SHAPES = [
    RAGGED,
    (17, 33, 509),  # prime V, larger than a tile
    (64, 32, 128),  # multiples of everything: the path without masks
    (1, 5, 7),  # one token
    (5, 1, 11),  # one feature: products are outer products
    (3, 4, 1),  # one class: loss 0
    (3, 4, 2),
    (300, 8, 13),  # many more tokens than classes
]

_seed = 0
_calls = 0


def seed_inputs(seed: int) -> None:
    global _seed, _calls
    _seed, _calls = seed, 0


def current_seed() -> int:
    return _seed


@dataclasses.dataclass
class Inputs:
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (N,)
    linear_bias: Tensor | None = None  # (V,)
    weight: Tensor | None = None  # (V,)
    token_weight: Tensor | None = None  # (N,)
    normalizer: Tensor | None = None  # ()
    ignore_index: int = -100

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        return self.input, self.linear_weight, self.target, self.linear_bias

    @property
    def options(self) -> dict:
        found = {name: getattr(self, name) for name in ("weight", "token_weight", "normalizer")}
        options = {name: tensor for name, tensor in found.items() if tensor is not None}
        if self.ignore_index != -100:
            options["ignore_index"] = self.ignore_index
        return options

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that need a gradient."""
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: t for name, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad}

    def clone(self, dtype: torch.dtype | None = None) -> "Inputs":
        """The same values as new leaves, in another floating dtype if one is given."""
        changes = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                to = dtype if dtype is not None and value.is_floating_point() else value.dtype
                changes[field.name] = value.detach().to(to, copy=True).requires_grad_(value.requires_grad)
        return dataclasses.replace(self, **changes)


def make_inputs(
    shape: tuple[int, int, int] = RAGGED,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    target_dtype: torch.dtype = torch.int64,
    bias: bool = False,
    weight: bool = False,
    token_weight: bool = False,
    normalizer: bool = False,
    ignored: float = 0.15,
    ignore_index: int = -100,
    requires_grad: bool = True,
) -> Inputs:
    """The loss is 2 to 6 at the larger shapes. Every call draws from a new seed (see conftest.fresh_seed)."""
    global _calls
    N, D, V = shape
    generator = torch.Generator(device).manual_seed((_seed + 7919 * _calls) % 2**63)
    _calls += 1

    def randn(*size):
        return torch.randn(*size, generator=generator, device=device)

    # Feature 0 is constant and carries the prior; the others are the context.
    prior = -torch.log1p(torch.arange(V, device=device, dtype=torch.float32))
    prior = prior[torch.randperm(V, generator=generator, device=device)] if V < 2**20 else prior
    input, linear_weight = randn(N, D), randn(V, D) * (1.5 / math.sqrt(max(D, 1)))
    if D > 0:
        input[:, 0] = 1.0
        linear_weight[:, 0] = prior
    input, linear_weight = input.to(dtype), linear_weight.to(dtype)
    linear_bias = (0.5 * randn(V)).to(dtype) if bias else None

    # Targets from softmax(logits) by the Gumbel trick, a few rows at a time.
    target = torch.empty(N, dtype=target_dtype, device=device)
    rows = max(1, 2**27 // max(V, 1))
    for s in range(0, N, rows):
        logits = torch.nn.functional.linear(input[s : s + rows], linear_weight, linear_bias).float()
        uniform = torch.rand(logits.shape, generator=generator, device=device).clamp_(1e-20, 1 - 1e-7)
        target[s : s + rows] = (logits - torch.log(-torch.log(uniform))).argmax(1).to(target_dtype)
    drop = torch.rand(N, generator=generator, device=device) < ignored
    if N > 1:
        drop[0], drop[1:2] = ignored > 0, False  # at least one of each kind
    elif N == 1:
        drop[0] = False
    target[drop] = ignore_index

    class_weight = torch.rand(V, generator=generator, device=device) + 0.25
    # also negative ones, as in a policy gradient
    per_token = torch.rand(N, generator=generator, device=device) * 2 - 0.5
    made = Inputs(
        input.requires_grad_(requires_grad),
        linear_weight.requires_grad_(requires_grad),
        target,
        linear_bias.requires_grad_(requires_grad) if bias else None,
        class_weight.to(dtype) if weight else None,
        per_token.to(_accumulator(dtype)).requires_grad_(requires_grad) if token_weight else None,
        torch.tensor(37.5, device=device, dtype=_accumulator(dtype)).requires_grad_(requires_grad)
        if normalizer
        else None,
        ignore_index,
    )
    return made


def scalars(options: dict, device: str = "cpu") -> dict:
    """`options`, with 0-d tensors for the numbers that inner operators take as such (flce_ops.math.options.py)."""
    return {
        name: torch.tensor(float(value), dtype=torch.float64, device=device)
        if name in NUMBERS and value is not None
        else value
        for name, value in options.items()
    }


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
