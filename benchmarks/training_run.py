"""One training run of `python -m benchmarks.training`: a setting of the head's gradient and a seed.

The same seed gives the same initial weights and batches in every setting. The loss is exact in all settings, so only
the gradients of the head's input and weight differ.

    exact                                   linear_cross_entropy
    unbiased_12, unbiased_10, unbiased_8    with gradient_threshold 2^-12, 2^-10, 2^-8, and a new seed in each step
    cce                                     Apple's cut cross-entropy with its default filter
    drop_12                                 linear_cross_entropy with entries below 2^-12 dropped

Rare classes are those that hold the rarest tenth of the training tokens, rarest classes those that hold the rarest
hundredth. Their losses are means over the held-out tokens of these classes.

B sequences of T tokens, N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import flce_ops

from .llama import Llama, LlamaSize
from .sparse import entries_kept
from .trained import operands, train, windows, write

SETTINGS: dict[str, dict[str, object]] = {  # options of linear_cross_entropy
    "exact": {},
    "unbiased_12": {"gradient_threshold": 2.0**-12},
    "unbiased_10": {"gradient_threshold": 2.0**-10},
    "unbiased_8": {"gradient_threshold": 2.0**-8},
    "cce": {},
    "drop_12": {"gradient_threshold": 2.0**-12, "gradient_mode": "drop"},
}
RARE, RAREST = 0.1, 0.01  # shares of the training tokens
THRESHOLDS = (-8, -10, -12)
COUNTED_ROWS = 1024  # held-out tokens whose kept entries are counted


class Trainee(nn.Module):
    """forward(tokens, target) -> mean loss. The head's gradient follows the setting."""

    def __init__(self, model: Llama, setting: str, draws: Tensor) -> None:
        super().__init__()
        self.model, self.setting = model, setting
        self.draws = draws  # () int64: another number in each step

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        # rounded here, so that all settings start from the same operands
        input = self.model.hidden_states(tokens).flatten(0, 1).bfloat16()
        linear_weight, target = self.model.head.weight.bfloat16(), target.flatten()
        if self.setting == "cce":
            from cut_cross_entropy import linear_cross_entropy

            return linear_cross_entropy(input, linear_weight, target)
        options = dict(SETTINGS[self.setting])
        if self.setting.startswith("unbiased"):
            options["gradient_seed"] = self.draws.add_(1)
        return flce_ops.linear_cross_entropy(input, linear_weight, target, **options)


def rarity_of(tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:  # (V,) bool, twice
    """Rare and rarest classes, by how often they occur in the training text."""
    counts = torch.bincount(tokens, minlength=vocabulary)
    ordered, classes = counts.sort(stable=True)
    # share of the tokens up to and including the class
    share = (ordered.cumsum(0) / tokens.shape[0])[classes.argsort()]
    return share <= RARE, share <= RAREST


@torch.no_grad()
def held_out_losses(model: Llama, tokens: Tensor, size: LlamaSize, most: int) -> tuple[Tensor, Tensor]:
    """The loss and target of each token, (N,) each, in consecutive sequences, up to `most` tokens."""
    sequences = max(1, min(tokens.shape[0] - 1, most) // size.context)
    losses, targets = [], []
    for starts in (torch.arange(sequences) * size.context).split(size.sequences):
        read, target = windows(tokens, starts, size.context)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden = model.hidden_states(read).bfloat16()
        loss = flce_ops.linear_cross_entropy(hidden, model.head.weight.bfloat16(), target, reduction="none")
        losses.append(loss.flatten())
        targets.append(target.flatten())
    return torch.cat(losses), torch.cat(targets)


def mean_of(losses: Tensor, chosen: Tensor) -> float | None:
    return losses[chosen].mean().item() if chosen.any() else None


class Run(NamedTuple):
    setting: str
    seed: int
    tokens: Path  # *.safetensors: training and held_out, int32
    size: LlamaSize
    steps: int
    rate: float  # the highest learning rate
    evaluate: int  # steps between measurements of the held-out losses
    held_out: int  # the most held-out tokens
    compile: bool
    operands: Path | None  # folder for the head's operands before and after training
    operand_rows: int


def run(chosen: Run, device: torch.device, seconds: float) -> tuple[list[dict], dict]:
    """Returns a point of the curve for every LOGGED steps, and the results of the run."""
    from safetensors.torch import load_file

    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = chosen.size
    tokens = load_file(chosen.tokens, device=str(device))
    rare, rarest = rarity_of(tokens["training"], size.vocab)
    torch.manual_seed(chosen.seed)
    model = Llama(size, fused_head=True).to(device)
    if chosen.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)

    def losses_by_rarity() -> dict[str, float | None]:
        losses, targets = held_out_losses(model, tokens["held_out"], size, chosen.held_out)
        return {
            "held_out_loss": losses.mean().item(),
            "rare_loss": mean_of(losses, rare[targets]),
            "rarest_loss": mean_of(losses, rarest[targets]),
        }

    def entries() -> dict[str, float]:
        some = operands(model, tokens["held_out"], size, COUNTED_ROWS)
        return {f"entries_{-log}": entries_kept(**some, threshold=2.0**log) for log in THRESHOLDS}

    def keep_operands(name: str, **facts: object) -> None:
        if chosen.operands:
            found = operands(model, tokens["held_out"], size, chosen.operand_rows)
            path = chosen.operands / f"{name}.safetensors"
            write(path, found, setting=chosen.setting, seed=chosen.seed, **facts)

    keep_operands("initial")
    points = [{"step": 0} | losses_by_rarity() | entries()]
    times: list[float] = []  # seconds of each step
    at, since = 0, time.perf_counter()

    def log(step: int, loss: float) -> None:
        nonlocal at, since
        times.append((time.perf_counter() - since) / (step - at))
        evaluated = losses_by_rarity() | entries() if step % chosen.evaluate == 0 or step == chosen.steps else {}
        points.append({"step": step, "loss": loss} | evaluated)
        at, since = step, time.perf_counter()

    draws = torch.tensor(chosen.seed << 32, device=device)
    trainee = Trainee(model, chosen.setting, draws)
    steps, loss = train(
        trainee,
        tokens["training"],
        size,
        seconds=seconds,
        steps=chosen.steps,
        highest=chosen.rate,
        seed=chosen.seed,
        log=log,
    )
    keep_operands("trained", steps=steps)
    end = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "steps": steps, "loss": loss}
    end |= {"step_ms": 1e3 * statistics.median(times)}
    return points, end | losses_by_rarity()
