"""Options that a sharded vocabulary does not have are refused by name, and no rank waits for another one."""

# B x T tokens, D hidden, V vocabulary

import re
from itertools import product

import pytest
import torch
import torch.distributed as dist
from in_worlds import in_worlds
from process_pool import worlds
from sharded_inputs import B, R, T, V, batch, mesh_of, place
from torch.distributed.tensor import Shard, distribute_tensor

import flce_ops
from flce_ops.support.refusals import REFUSED, refuse

INVARIANT = "batch_invariant over a sharded vocabulary is not implemented; leave it out"
SPARSE = "the sparse gradient over a sharded vocabulary is not implemented; leave gradient_threshold out"
OPTIONS = {
    "batch_invariant": ({"batch_invariant": True}, INVARIANT),
    "sparse": ({"gradient_threshold": 0.1, "gradient_mode": "drop"}, SPARSE),
    "sparse and drawn": ({"gradient_threshold": 0.1, "gradient_seed": torch.tensor(3)}, SPARSE),
    "sparse, dW alone": (
        {"gradient_threshold": 0.1, "gradient_mode": "drop", "gradient_sparse": "linear_weight"},
        SPARSE,
    ),
}
# the sums of a reduction and the losses of tokens take different operators
CALLS = {
    "a mean": ("linear_cross_entropy", {}),
    "losses of tokens": ("linear_cross_entropy", {"reduction": "none"}),
    "metrics": ("linear_cross_entropy", {"return_metrics": ["entropy"]}),
    "log-probabilities": ("linear_log_probs", {}),
    "a policy": ("linear_policy_loss", {}),
    "a divergence": ("linear_kl_div", {}),  # has no sparse gradient
}
CASES = [case for case in product(CALLS, OPTIONS) if case[0] != "a divergence" or case[1] == "batch_invariant"]


@in_worlds(worlds(2, gloo=(2,)))
def test_what_a_sharded_vocabulary_does_not_have_is_refused_by_name(device):
    mesh = mesh_of(device, dist.get_world_size())
    placed = place(batch(device), mesh, [R], [Shard(0)])
    head = (placed.input, placed.linear_weight)
    operands = {
        "linear_cross_entropy": (*head, placed.target),
        "linear_log_probs": (*head, placed.target),
        "linear_policy_loss": (*head, placed.target, distribute_tensor(torch.ones(B, T, device=device), mesh, [R])),
        "linear_kl_div": (*head, *(operand.detach() for operand in head)),
    }
    for call, option in CASES:
        (function, more), (options, text) = CALLS[call], OPTIONS[option]
        options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        if option == "batch_invariant" and device.type == "cpu":
            text = "batch_invariant on a CPU is not implemented"
        with pytest.raises(NotImplementedError, match=f"^{function}: {re.escape(text)}"):
            getattr(flce_ops, function)(*operands[function], **more, **options)
    order = torch.arange(V, device=device)
    with pytest.raises(NotImplementedError, match="the sparse gradient of DTensors with gradient_class_order"):
        flce_ops.linear_cross_entropy(*placed.args, gradient_class_order=order, **OPTIONS["sparse"][0])


def test_the_table_of_refusals_has_the_texts_of_a_sharded_vocabulary():
    """On a GPU, whose batch_invariant no other row of the table refuses first."""
    for feature, text in (("batch_invariant", INVARIANT), ("sparse gradient", SPARSE)):
        assert REFUSED[feature][("sharded vocabulary",)] == text
        call = batch(torch.device("cpu"))
        with pytest.raises(NotImplementedError, match=f"^linear_log_probs: {re.escape(text)}$"):
            refuse("linear_log_probs", call, {feature, "sharded vocabulary"})
