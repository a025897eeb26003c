"""Each row of flce_ops/support/refusals.py raises its error for a call that has its features."""

import pytest
import torch

import flce_ops
from flce_ops.entry.loss import GIVEN
from flce_ops.support.refusals import REFUSED

# rows for several processes are tested in test_kl_div_distributed.py, test_sparse_distributed.py and others
ROWS = [(feature, *others) for feature, rows in REFUSED.items() for others in rows]
OF_RANKS = {"DTensors", "sharded vocabulary", "recomputing shards", "recomputing always"}
HERE = [row for row in ROWS if not OF_RANKS & set(row)]
N, D, V = 6, 8, 12
# those that features_of finds, and that of the layout
FEATURES = (
    *GIVEN,
    "DTensors",
    "torch.func",
    "positions",
    "class probabilities",
    "metrics",
    "argmax",
    "sparse gradient",
)
FEATURES += ("sparse gradient", "learnt scale", "batch_invariant", "a CPU", "sharded vocabulary")


def test_every_feature_of_a_row_is_known():
    assert {feature for row in ROWS for feature in row} <= set(FEATURES)


def arguments(features: tuple[str, ...]) -> dict:
    call = {"input": torch.randn(N, D), "linear_weight": torch.randn(V, D), "target": torch.arange(N) % V}
    changes = {
        "positions": {"linear_weight": torch.randn(V, 3, D), "target": torch.zeros(N, 3, dtype=torch.int64)},
        "class probabilities": {"target": torch.full((N, V), 1 / V)},
        "target_weight": {"target": torch.zeros(N, 2, dtype=torch.int64), "target_weight": torch.ones(N, 2)},
        "topk": {"target": torch.zeros(N, 2, dtype=torch.int64), "target_weight": torch.ones(N, 2)},
        "main_grad": {"main_grad": torch.zeros(V, D)},
        "sparse gradient": {"gradient_threshold": 1e-3, "gradient_seed": torch.tensor(5)},
        "batch_invariant": {"batch_invariant": True},
        "argmax": {"return_metrics": True},
        "metrics": {"return_metrics": ["lse"]},
        "z_loss": {"z_loss": 1e-3},
        "learnt scale": {"logit_scale": torch.ones((), requires_grad=True)},
    }
    for feature in features:
        call |= changes.get(feature, {})
    call["linear_weight"].requires_grad_()
    return call


@pytest.mark.parametrize("row", HERE, ids=" and ".join)
def test_a_combination_that_nobody_wrote_is_refused(row):
    call = arguments(row)
    feature, *others = row
    expected = REFUSED[feature][tuple(others)].format(linear_weight=tuple(call["linear_weight"].shape))
    input, function = call.pop("input"), flce_ops.linear_cross_entropy

    def loss(input):
        return function(input, **call)

    with pytest.raises(NotImplementedError) as refused:
        torch.func.grad(loss)(input) if "torch.func" in row else loss(input)
    assert str(refused.value) == f"{function.__name__}: {expected}"
