"""Which entries of a row a sparse gradient keeps: their mean, variance and sums, and what decides the draws."""

# N tokens, n rows, D hidden, V vocabulary

import torch
from test_sparse_gradient import seed_of

from flce_ops.math import sparse_gradient
from flce_ops.math.sparse_gradient import SparseGradient, keep_entries, room_of_row


def probabilities(n=1, num_classes=2500):
    """Rows of G with one target, (n, V) float64; all n rows are equal."""
    logits = -torch.log1p(torch.arange(num_classes, dtype=torch.float64))[torch.randperm(num_classes)]
    logits += 1.5 * torch.randn(num_classes, dtype=torch.float64)
    p = logits.softmax(0)
    p[17] -= 1.0
    return p.expand(n, -1).clone()


def kept(g, mode="unbiased", seed=1, tokens=None, threshold=2.0**-7, slope=1.0):
    tokens = torch.arange(g.shape[0]) if tokens is None else tokens
    out = g.clone()
    keep_entries(
        out, torch.full((g.shape[0],), slope, dtype=g.dtype), SparseGradient(threshold, mode, seed_of(seed)), tokens
    )
    return out


def test_entries_from_the_threshold_on_stay_and_smaller_ones_are_zero_or_the_threshold():
    g = probabilities(50)
    found, threshold = kept(g), 2.0**-7
    large = g.abs() >= threshold
    assert large.any() and torch.equal(found[large], g[large])
    small = found[~large]
    raised = small != 0.0
    assert 0 < raised.sum() < raised.numel()
    assert torch.equal(small[raised], torch.sign(g[~large][raised]) * threshold)


def test_the_mean_of_an_entry_is_the_entry_and_its_variance_as_predicted():
    n, threshold = 4000, 2.0**-7
    g = probabilities(n)
    found, one = kept(g), g[0]
    variance = torch.where(one.abs() < threshold, one.abs() * (threshold - one.abs()), 0.0)
    drawn = variance * n > 10 * threshold**2  # often enough for a normal distribution
    z = (found.mean(0) - one)[drawn] / (variance[drawn] / n).sqrt()
    assert drawn.sum() > 50
    assert z.abs().max() < 6.5  # of 1650 entries, drawn ten times or more
    assert 0.8 < z.square().mean() < 1.25
    rare = ~drawn & (one.abs() < threshold)  # tested together, because each is far below one unit of q
    total, expected = (found[:, rare] != 0.0).sum(), n * one[rare].abs().sum() / threshold
    assert abs(total - expected) < 5.5 * expected.sqrt()
    ratio = found[:, drawn].var(0) / variance[drawn]
    assert 0.9 < ratio.mean() < 1.1


def test_a_tile_keeps_the_sum_of_its_probabilities_rounded_up_or_down():
    g, threshold = probabilities(200), 2.0**-7
    expected = (g.abs() / threshold).clamp(max=1.0)
    for start in range(0, g.shape[1], sparse_gradient.TILE):
        tile = slice(start, start + sparse_gradient.TILE)
        count, total = (kept(g)[:, tile] != 0.0).sum(1), expected[:, tile].sum(1)
        assert ((count - total).abs() < 1.0 + 1e-3).all()
    assert ((kept(g) != 0.0).sum(1) <= room_of_row(threshold, g.shape[1])).all()


def test_draws_depend_on_seed_and_token_alone():
    g = probabilities(64)
    first = kept(g)
    assert torch.equal(first, kept(g))
    order = torch.randperm(64)
    assert torch.equal(first[order], kept(g[order], tokens=order))
    assert torch.equal(first, kept(g * -4.0, slope=-4.0) / -4.0)
    for other in (2, 1 + 2**32, -1):
        assert not torch.equal(first, kept(g, seed=other))
    assert not torch.equal(first[0], first[1])


def test_nan_stays_nan_and_a_token_without_a_slope_has_no_entry():
    g = probabilities(2)
    g[0, 5] = torch.nan
    found = kept(g)
    assert found[0, 5].isnan() and not found[1].isnan().any()
    assert not kept(torch.zeros(1, 100), slope=0.0).any()
