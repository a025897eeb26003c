"""linear_policy_loss in Triton on a GPU: the interpreter's cases in bfloat16, repeated launches, CUDA graphs."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from reference_loss import error
from reference_policy import cancellation, make_policy, plain_policy_loss, run_policy
from test_policy import CAPPED, KL, OBJECTIVES, SAMPLED

import flce_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = (700, 256, 5003)
SMALL = 3 << 20  # several chunks
CASES = {
    **{name: ({}, options | kl) for (name, options), kl in zip(OBJECTIVES.items(), KL * 2)},
    "on policy": ({"on_policy": True, "bias": True}, {"beta": 0.04}),
    "sampling": ({"token_weight": True, "logits": SAMPLED}, {**SAMPLED, "dual_clip": 3.0}),
    "capped": ({"bias": True, "logits": CAPPED}, {**CAPPED, "beta": 0.1}),
}


def call_of(made, shape=SHAPE):
    return make_policy(shape, dtype=torch.bfloat16, device="cuda", **made)


@pytest.mark.parametrize("workspace", [512 << 20, SMALL])
@pytest.mark.parametrize("name", CASES)
def test_triton_is_no_worse_than_plain_torch_and_gives_the_same_bits_again(name, workspace, poisoned_memory):
    made, options = CASES[name]
    call = call_of(made)
    exact = run_policy(plain_policy_loss, call, dtype=torch.float64, **options)
    plain = run_policy(plain_policy_loss, call, **options)
    with flce_ops.workspace(workspace):
        first, *others = [run_policy(flce_ops.linear_policy_loss, call, **options) for _ in range(4)]
        path = flce_ops.last_path()
    assert (path.op, path.implementation) == ("linear_cross_entropy_with_grad", "triton")
    assert (path.chunks > 1) == (workspace == SMALL)
    for key, found in first.items():
        unit = 0.5 * 2.0**-8 * (cancellation(call, **options) if key == "loss" else 1.0)
        assert error(found, exact[key]) <= 1.25 * error(plain[key], exact[key]) + unit, key
        assert all(torch.equal(found, other[key]) for other in others), key
    # float32 products of the unrounded operands: log-probabilities do not come from rounded logits
    assert error(first["log_probs"], exact["log_probs"]) < 1e-5
