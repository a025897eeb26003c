"""Logits saved by the forward operator for backward: the same bits, within a budget, wherever it is allowed."""

# N tokens, D hidden, V vocabulary

import functools

import pytest
import torch
from counting_backend import CountingBackend
from inputs import make_inputs
from reference_loss import error, run, run_reference
from test_memory import MiB, peak_of, results
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.math.options import saved_columns
from flce_ops.support.workspace import get_retained

flce = torch.ops.flce
N, D, V = 300, 12, 211


def bytes_of(rows, dtype=torch.float32, vocab=V):
    return rows * 2 * saved_columns(vocab, dtype)


def losses(*args, **options):
    return flce_ops.linear_cross_entropy(*args, reduction="none", **options)


def log_probs_and_entropy(*args):
    found = flce_ops.linear_log_probs(*args, entropy=True)
    return found.log_probs - 0.1 * found.entropy


FUNCTIONS = {
    "none": losses,
    "everything": functools.partial(losses, label_smoothing=0.1, softcap=5.0, logit_scale=0.7, z_loss=0.01),
    "entropy": log_probs_and_entropy,
}


def gradients(function, inputs, retained, **options):
    """Returns also the number of rows for which backward got saved logits."""
    with flce_ops.workspace(1, retained=retained):
        found = function(*inputs.args)
        grads = torch.autograd.grad(found.sum(), list(inputs.leaves.values()), **options)
    return grads, int(flce_ops.last_path().reason.split("logits of ")[1].split()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_saved_logits_give_the_bits_of_those_made_again(name, dtype, poisoned_memory):
    """For all logits and for some: chunks of 64 rows; the 30 % of ignored tokens need no saved rows."""
    inputs = make_inputs((N, D, V), dtype=dtype, bias=True, ignored=0.3)
    expected, rows = gradients(FUNCTIONS[name], inputs, 0)
    assert rows == 0
    for fitting, expected_rows in ((384, N), (N, 256), (200, 128), (127, 0)):
        found, rows = gradients(FUNCTIONS[name], inputs, bytes_of(fitting, dtype))
        assert rows == expected_rows
        assert all(torch.equal(ours, again) for ours, again in zip(found, expected, strict=True))


def passes(step):
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / (2 * N * D * V)


def test_passes_follow_the_rows_that_are_saved():
    inputs = make_inputs((N, D, V))
    step = functools.partial(run, losses, inputs)
    assert passes(step) == 3
    with flce_ops.workspace(retained=bytes_of(128)):
        assert passes(step) == pytest.approx(4 - 128 / N)
    with flce_ops.workspace(retained=0):
        assert passes(step) == 4
    half = make_inputs((N, D, V), dtype=torch.float16)  # a scalar loss whose gradients are made in backward
    assert passes(functools.partial(run, flce_ops.linear_cross_entropy, half)) == 3


def test_nothing_is_saved_where_nothing_is_differentiated_or_backward_is_far():
    inputs = make_inputs((N, D, V))

    def rows_of(*args):
        return flce.linear_cross_entropy_forward(*args)[-1].shape[0]

    assert rows_of(*inputs.args) == N
    with torch.no_grad():
        assert rows_of(*inputs.args) == 0
    assert rows_of(*(None if t is None else t.detach() for t in inputs.args)) == 0
    with torch.autograd.graph.save_on_cpu():
        assert rows_of(*inputs.args) == 0
    seen = []
    torch.func.grad(lambda x: (seen.append(rows_of(x, *inputs.args[1:])), losses(x, *inputs.args[1:]).sum())[1])(
        inputs.input.detach()
    )
    assert seen == [0]


def test_freed_after_backward_and_kept_by_retain_graph():
    inputs = make_inputs((N, D, V), bias=True)
    rows = flce.linear_cross_entropy_forward(*inputs.args)
    leaves = list(inputs.leaves.values())
    first = torch.autograd.grad(rows[1].sum(), leaves, retain_graph=True)
    assert any(t is not None and t.dtype == torch.int16 for t in rows[1].grad_fn.saved_tensors)
    second = torch.autograd.grad(rows[1].sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="freed"):
        _ = rows[1].grad_fn.saved_tensors


def test_a_compiled_graph_has_the_rows_as_an_expression_of_n():
    backend = CountingBackend()
    compiled = torch.compile(losses, fullgraph=True, backend=backend)
    with flce_ops.workspace(retained=bytes_of(128, torch.float64)):
        for tokens, rows in ((N, 128), (90, 90), (500, 128)):
            inputs = make_inputs((tokens, D, V), dtype=torch.float64)
            torch._dynamo.mark_dynamic(inputs.input, 0)
            torch._dynamo.mark_dynamic(inputs.target, 0)
            value = compiled(*inputs.args)
            value.sum().backward()
            found = {name: leaf.grad for name, leaf in inputs.leaves.items()}
            assert f"logits of {rows} of {tokens} tokens saved" in flce_ops.last_path().reason
            expected = run_reference(inputs, reduction="none")
            assert error(value, expected["loss"]) < 1e-13
            for name in found:
                assert error(found[name], expected[name]) < 1e-13, name
    assert backend.graphs == 1


@pytest.mark.parametrize("retained", [0, 16 * MiB], ids="{} bytes".format)
def test_the_peak_of_forward_and_backward_is_the_two_budgets(retained):
    inputs = make_inputs((4096, 16, 2003))
    with flce_ops.workspace(4 * MiB, retained=retained):
        temporary = peak_of(losses, inputs) - results(inputs)
        assert get_retained() == retained
    assert temporary <= 4 * MiB + retained + MiB, f"{temporary / MiB:.1f} MiB"
    assert temporary > 0.8 * retained
