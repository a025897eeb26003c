"""Targets in uint8, which torch's cross-entropies take: of bytes, whose vocabulary has few classes more than 256."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import torch.nn.functional as F
from test_compile import compiled

import flce_ops

N, D, V = 13, 11, 261
CALLS = {
    "linear_cross_entropy": lambda x, w, t, i: flce_ops.linear_cross_entropy(x, w, t, ignore_index=i),
    "none": lambda x, w, t, i: flce_ops.linear_cross_entropy(x, w, t, ignore_index=i, reduction="none"),
    "metrics": lambda x, w, t, i: sum(flce_ops.linear_cross_entropy(x, w, t, ignore_index=i, return_metrics=True)[0:1]),
    "shift": lambda x, w, t, i: flce_ops.linear_cross_entropy(x, w, t, ignore_index=i, shift=True),
    "K classes": lambda x, w, t, i: flce_ops.linear_cross_entropy(
        x, w, torch.stack([t, t // 2], 1), ignore_index=i, target_weight=torch.rand(N, 2, generator=generator())
    ),
    "linear_log_probs": lambda x, w, t, i: flce_ops.linear_log_probs(x, w, t, ignore_index=i).log_probs,
    "linear_policy_loss": lambda x, w, t, i: (
        flce_ops.linear_policy_loss(x, w, t, x[:, 0].detach(), ignore_index=i).loss
    ),
    "linear_kl_div": lambda x, w, t, i: flce_ops.linear_kl_div(
        x, w, x.detach().sin(), w.detach(), target=t, ignore_index=i
    ),
    "cross_entropy": lambda x, w, t, i: flce_ops.cross_entropy(x @ w.T, t, ignore_index=i),
    "LinearCrossEntropyLoss": lambda x, w, t, i: module(w, i)(x, t),
}


def generator():
    return torch.Generator().manual_seed(5)


def module(w, ignore_index):
    made = flce_ops.LinearCrossEntropyLoss(D, V, bias=False, ignore_index=ignore_index, dtype=torch.float64)
    del made.linear.weight
    made.linear.weight = w
    return made


def example():
    x, w = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    target = torch.randint(256, (N,))
    target[2], target[5] = 156, 255  # 156 is -100 in uint8
    return x.requires_grad_(), w.requires_grad_(), target


@pytest.mark.parametrize("ignore_index", [-100, 255, 156, 300, None])
@pytest.mark.parametrize("name", CALLS)
def test_targets_in_uint8_are_those_in_int64(name, ignore_index):
    """An ignore_index outside of uint8 is no token's, as in torch."""
    x, w, target = example()
    found = []
    for of_tokens in (target.to(torch.uint8), target):
        loss = CALLS[name](x, w, of_tokens, ignore_index)
        found.append((loss, *torch.autograd.grad(loss.sum(), (x, w))))
    for ours, right in zip(*found, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("ignore_index", [-100, 255, 156, 300])
def test_ignore_index_beside_uint8_is_torchs(ignore_index):
    x, w, target = example()
    loss = flce_ops.linear_cross_entropy(x, w, target.to(torch.uint8), ignore_index=ignore_index)
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.T, target.to(torch.uint8), ignore_index=ignore_index))


def test_uint8_targets_compile_into_one_graph():
    x, w, target = example()
    loss, counter = compiled(flce_ops.linear_cross_entropy)
    torch.testing.assert_close(loss(x, w, target.to(torch.uint8)), flce_ops.linear_cross_entropy(x, w, target))
    assert counter.count == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.bool], ids=str)
def test_other_dtypes_are_refused(dtype):
    x, w, target = example()
    with pytest.raises(TypeError, match="target of class indices in int64 or int32, got"):
        flce_ops.linear_cross_entropy(x, w, (target % 2).to(dtype))
