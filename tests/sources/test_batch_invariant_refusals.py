"""batch_invariant=True on a CPU is refused by name: MKL's bits depend on the alignment of a row."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from test_compile import compiled

import flce_ops

N, D, V = 7, 5, 11
INVARIANT = {"batch_invariant": True}
CALLS = {
    "linear_cross_entropy": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, **INVARIANT),
    "none": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, reduction="none", **INVARIANT),
    "metrics": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, return_metrics=True, **INVARIANT),
    "two heads": lambda x, w, t: flce_ops.linear_cross_entropy(
        x, torch.stack([w, w], 1), torch.stack([t, t], 1), **INVARIANT
    ),
    "probabilities": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, torch.rand(N, V), **INVARIANT),
    "linear_log_probs": lambda x, w, t: flce_ops.linear_log_probs(x, w, t, **INVARIANT),
    "linear_policy_loss": lambda x, w, t: flce_ops.linear_policy_loss(x, w, t, torch.rand(N), **INVARIANT),
    "linear_kl_div": lambda x, w, t: flce_ops.linear_kl_div(x, w, x.detach(), w.detach(), **INVARIANT),
    "teacher_probs": lambda x, w, t: flce_ops.linear_kl_div(x, w, teacher_probs=torch.rand(N, V), **INVARIANT),
    "operator": lambda x, w, t: torch.ops.flce.linear_cross_entropy(x, w, t, **INVARIANT),
}


def example():
    return torch.randn(N, D).requires_grad_(), torch.randn(V, D).requires_grad_(), torch.randint(V, (N,))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_batch_invariance_on_a_cpu_is_refused(name, grad):
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(NotImplementedError, match="batch_invariant on a CPU.*leave it out"),
    ):
        CALLS[name](*example())


def test_a_compiled_call_is_refused_too():
    function, _ = compiled(flce_ops.linear_cross_entropy)
    with pytest.raises(Exception, match="batch_invariant on a CPU"):
        function(*example(), **INVARIANT)


def test_without_it_nothing_is_refused():
    flce_ops.linear_cross_entropy(*example(), batch_invariant=False).backward()
