"""linear_policy_loss: its path and cost, derivatives, torch.func, compile, autocast, opcheck, export."""

# N tokens, D hidden, V vocabulary; B sequences of T tokens

import pytest
import torch
from reference_loss import error
from reference_policy import cancellation, function_of_policy, make_policy, plain_policy_loss, run_policy
from test_policy import RAGGED, UNIT
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import flce_ops


def test_compiled_in_one_graph_for_any_numbers(device):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(clip_high, beta, **fresh):
        return flce_ops.linear_policy_loss(**fresh, clip_high=clip_high, beta=beta)

    for clip_high, beta in ((0.28, 0.04), (0.3, 0.05), (0.35, 0.06), (0.4, 0.07)):
        call = make_policy(RAGGED, device=device)
        expected = run_policy(flce_ops.linear_policy_loss, call, clip_high=clip_high, beta=beta)
        found = run_policy(step, call, clip_high=clip_high, beta=beta)
        for name, result in found.items():
            torch.testing.assert_close(result, expected[name])
    assert counter.frame_count <= 2  # the second graph takes the changed numbers as inputs


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_dynamic_compilation_knows_whether_there_is_a_kl_term(device, beta):
    """dynamic=True makes numbers symbolic, default values included."""
    call = make_policy(RAGGED, device=device) | {"ref_log_probs": None}
    step = torch.compile(flce_ops.linear_policy_loss, fullgraph=True, dynamic=True, backend="eager")
    if beta:
        with pytest.raises(Exception, match="beta weighs the KL term, which needs ref_log_probs"):
            step(**call, beta=beta)
    else:
        found, expected = (f(**call, beta=beta).loss for f in (step, flce_ops.linear_policy_loss))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_the_plain_formula(device, half):
    call = make_policy(RAGGED, device=device)

    def under(function):
        def run(**fresh):
            with torch.autocast(device, half):
                return function(**fresh)

        return run

    exact = run_policy(plain_policy_loss, call, dtype=torch.float64)
    plain, ours = (run_policy(under(f), call) for f in (plain_policy_loss, flce_ops.linear_policy_loss))
    for name, found in ours.items():
        assert found.dtype == torch.float32
        unit = 0.5 * UNIT[half] * (cancellation(call) if name == "loss" else 1.0)
        assert error(found, exact[name]) <= 1.25 * error(plain[name], exact[name]) + unit, name


@pytest.mark.parametrize("options", [{}, {"objective": "cispo", "beta": 0.1, "softcap": 5.0}], ids=["plain", "options"])
def test_opcheck(device, options):
    call = make_policy((12, 11, 31), device=device, bias=bool(options), token_weight=bool(options))
    # The loss must be positive: opcheck's grad_output is the sign of a result, and it multiplies the gradients among
    # the results.
    call["advantages"] = -call["advantages"].abs()
    leaves = {n: t if t is None else t.requires_grad_(n in ("input", "linear_weight")) for n, t in call.items()}
    names = ("input", "linear_weight", "target", "advantages", "old_log_probs", "ref_log_probs", "linear_bias")
    args = [leaves[name] for name in names]
    opcheck(torch.ops.flce.linear_policy_loss.default, args, options | {"token_weight": leaves.get("token_weight")})
    function, tensors = function_of_policy(leaves, beta=0.1, kl_estimator="k1")
    row_scale = torch.rand(12, device=device) if options else None
    args = [*args[:3], None, None, row_scale]
    asked = {"output_mask": [True, True, False], "function": function, "tensors": tensors}
    opcheck(torch.ops.flce.linear_cross_entropy_with_grad.default, args, asked)
