"""Distillation: a student learns the teacher's distribution over the vocabulary. The logits of neither model are held.

    python -m examples.distill [--steps 30] [--kind forward|reverse|jsd] [--temperature 2]

    loss = share * temperature^2 * KL(teacher || student at the temperature) + (1 - share) * cross-entropy of the text

The teacher is three times as wide as the student, and is first trained on the text for a moment.
"""

import argparse

import torch
from torch import Tensor, nn

import flce_ops
from examples.batches import Batches
from examples.decoder import Decoder
from examples.text import byte_pair_encode, python_reference

# B batch, T tokens of one sequence, D hidden of the student, E of the teacher, V vocabulary


def distillation_loss(
    hidden: Tensor,  # (B, T, D)
    linear_weight: Tensor,  # (V, D)
    teacher_hidden: Tensor,  # (B, T, E)
    teacher_weight: Tensor,  # (V, E)
    target: Tensor,  # (B, T)
    *,
    kind: str = "forward",
    temperature: float = 2.0,
    share: float = 0.8,
) -> Tensor:  # ()
    divergence = flce_ops.linear_kl_div(
        hidden,
        linear_weight,
        teacher_hidden.detach(),
        teacher_weight.detach(),
        kind=kind,
        target=target,  # tokens ignored in one loss are ignored in the other
        temperature=temperature,
    )
    text = flce_ops.linear_cross_entropy(hidden, linear_weight, target)
    # the divergence's gradient shrinks with the square of the temperature
    return share * temperature**2 * divergence + (1 - share) * text


def train_teacher(teacher: nn.Module, batches: Batches, steps: int) -> None:
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens, target = batches.next()
        flce_ops.linear_cross_entropy(teacher(tokens), teacher.token.weight, target).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(steps: int = 30, *, kind: str = "forward", temperature: float = 2.0) -> list[float]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids, pieces = byte_pair_encode(python_reference()[:60_000], 512)
    batches = Batches(ids, batch=8, context=32, device=device)
    teacher = Decoder(len(pieces), dim=96).to(device)
    train_teacher(teacher, batches, steps)
    student = Decoder(len(pieces), dim=32).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        tokens, target = batches.next()
        with torch.no_grad():
            teacher_hidden = teacher(tokens)
        loss = distillation_loss(
            student(tokens),
            student.token.weight,
            teacher_hidden,
            teacher.token.weight,
            target,
            kind=kind,
            temperature=temperature,
        )
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
    parser.add_argument("--kind", choices=("forward", "reverse", "jsd"), default="forward")
    parser.add_argument("--temperature", type=float, default=2.0)
    options = parser.parse_args()
    main(options.steps, kind=options.kind, temperature=options.temperature)
