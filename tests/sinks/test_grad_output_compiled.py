"""Inductor multiplies the gradients that forward made in place, unless something may read them again."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_loss import error
from torch._inductor.utils import run_and_get_code

import flce_ops
from flce_ops.support import torch_private

OP = "torch.ops.flce.linear_cross_entropy_upstream_.default("


def tied_loss(weight, target):
    """The head's first rows are also the features. Their gradients are added after the multiplication."""
    return flce_ops.linear_cross_entropy(weight[: target.shape[0]], weight, target)


def gradients_of(function, weight, target, factors, retain_graph=False):
    loss = function(weight, target)
    return [
        torch.autograd.grad(loss, weight, torch.full_like(loss, factor), retain_graph=retain_graph)[0]
        for factor in factors
    ]


@pytest.mark.parametrize(("retain_graph", "large"), [(False, True), (False, False), (True, True)])
def test_gradients_are_multiplied_in_place_where_nobody_reads_them_again(device, retain_graph, large, monkeypatch):
    """AOTAutograd donates buffers to the compiled backward, unless the first backward retains its graph."""
    monkeypatch.setattr(torch_private, "WRITTEN_OVER_FROM", 12 * 8 * 4 + 1 if large else 31 * 8 * 4 + 1)
    inputs = make_inputs((12, 8, 31), device=device)
    arguments = (inputs.linear_weight, inputs.target)
    torch._dynamo.reset()
    compiler = torch._inductor.config.patch(fx_graph_cache=False)
    with compiler, torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(tied_loss, fullgraph=True)
        factors = [3.0, 1.0, 3.0] if retain_graph else [3.0]
        found, codes = run_and_get_code(gradients_of, compiled, *arguments, factors, retain_graph)
        again = gradients_of(compiled, *arguments, [-0.7])
        assert any(OP in code for code in codes) == (large and not retain_graph)
        for factor, grad in zip([*factors, -0.7], [*found, *again], strict=True):
            (expected,) = gradients_of(tied_loss, *arguments, [factor])
            assert error(grad, expected) < 1e-6
        if not retain_graph:
            with pytest.raises(RuntimeError, match="donated buffer"):
                gradients_of(compiled, *arguments, [1.0], retain_graph=True)
            with pytest.raises(RuntimeError, match="second time"):
                gradients_of(compiled, *arguments, [1.0, 1.0])
