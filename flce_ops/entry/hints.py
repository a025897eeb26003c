"""The likely mistake behind a target whose shape does not fit. Only errors read this file."""

from torch import Tensor

# D hidden, V vocabulary, L positions


def hint_of_target(
    target: Tensor,
    rows: Tensor,  # (..., D) hidden states, or (..., V) logits
    of: str,  # the name of `rows`
    num_classes: int,
    *,
    probabilities: bool = False,  # whether the function takes class probabilities
) -> str:
    shape, tokens = tuple(target.shape), tuple(rows.shape[:-1])
    if shape == (*tokens, num_classes):
        also = ", or target.float() for class probabilities" if probabilities else ""
        return f"; if it is one-hot, pass target.argmax(-1){also}"
    if of == "logits" and rows.dim() > 2 and shape == (rows.shape[0], *rows.shape[2:]):
        return "; the classes come last here, not second: pass logits.movedim(1, -1)"
    if target.numel() == rows.shape[:-1].numel() and shape != tokens:
        return "; pass target.flatten()" if len(tokens) == 1 else f"; pass target.view({', '.join(map(str, tokens))})"
    if shape and len(shape) == len(tokens) and shape == (*tokens[:-1], tokens[-1] - 1):
        return f"; if the labels are shifted and {of} is not, pass all labels with shift=True"
    return ""
