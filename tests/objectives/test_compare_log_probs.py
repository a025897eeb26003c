"""examples/compare_log_probs.py names the reason why two sets of log-probabilities differ."""

# B sequences, T tokens of each, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F

import flce_ops
from examples import compare_log_probs as example

B, T, D, V = 3, 40, 64, 500


@pytest.fixture
def head():
    hidden, weight = torch.randn(B, T, D), 0.4 * torch.randn(V, D)
    tokens = torch.distributions.Categorical(logits=hidden @ weight.T).sample()
    return hidden, weight, tokens


def log_probs(hidden, weight, tokens, **options):
    return flce_ops.linear_log_probs(hidden, weight, tokens, **options).log_probs


def renormalised(hidden, weight, tokens):
    logits = hidden @ weight.T
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(50).indices, True)
    kept.scatter_(-1, tokens.unsqueeze(-1), True)
    return F.log_softmax(logits.masked_fill(~kept, -torch.inf), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def test_reasons_are_told_apart(head):
    hidden, weight, tokens = head
    ours = log_probs(*head)
    drift = torch.linspace(0.0, 0.2, T) * torch.randn(B, T)
    rounded = log_probs(hidden.bfloat16(), weight.bfloat16(), tokens)
    exact = log_probs(hidden.bfloat16().float(), weight.bfloat16().float(), tokens)
    engines = {
        "float32 logits": (ours, ours + 1e-5 * torch.randn(B, T)),
        "temperature": (ours, 0.7 * ours),
        "top-k or top-p": (ours, renormalised(*head)),
        "along the sequence": (ours, ours + drift),
        "rounding": (exact, rounded),
        "other weights": (ours, log_probs(hidden, torch.randn(V, D), tokens)),
    }
    for reason, (trainer, engine) in engines.items():
        assert reason in example.reading(example.compare(trainer, engine)), reason


def test_tokens_that_one_of_them_lacks_are_left_out(head):
    ours = log_probs(*head)
    engine = ours.clone()
    engine[0, :5], engine[1, 7] = torch.nan, engine[1, 7] + 0.5
    found = example.compare(ours, engine)
    assert (found.tokens, found.first, found.outside) == (B * T - 5, (1, 7), 1 / (B * T - 5))


def test_files_are_read_and_shapes_must_agree(tmp_path, head, capsys):
    ours = log_probs(*head)
    files = [tmp_path / name for name in ("trainer.pt", "engine.pt")]
    for file in files:
        torch.save(ours, file)
    assert example.main([str(file) for file in files]).largest == 0.0
    assert example.main([]).mean > 1e-4
    assert "the same bits" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected two tensors of one shape"):
        example.compare(ours, ours[0])
