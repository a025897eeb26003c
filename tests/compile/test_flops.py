"""The table of GEMM passes: how many times 2 N D V floating-point operations each call costs."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from counting_backend import CountingBackend
from inputs import make_inputs
from torch.utils.flop_counter import FlopCounterMode

import flce_ops

N, D, V = 32, 16, 61  # 32: the last rows after a multiple of 16 would be multiplied twice on a CPU
PASS = 2 * N * D * V

# reduction, arguments that need a gradient -> passes
TABLE = [
    ("mean", (), 1),
    ("sum", (), 1),
    ("none", (), 1),
    ("mean", ("input", "linear_weight"), 3),
    ("sum", ("input", "linear_weight"), 3),
    ("mean", ("input", "linear_weight", "linear_bias"), 3),
    ("none", ("input", "linear_weight"), 3),  # logits are saved for backward
    ("mean", ("input",), 2),  # a frozen head
    ("mean", ("linear_weight",), 2),
    ("none", ("input",), 2),
    ("none", ("linear_weight",), 2),
    ("mean", ("linear_bias",), 1),
]


def step(reduction, inputs):
    loss = flce_ops.linear_cross_entropy(*inputs.args, **inputs.options, reduction=reduction)
    if loss.requires_grad:
        loss.sum().backward()


def example(device, dtype, wanted):
    inputs = make_inputs((N, D, V), device=device, dtype=dtype, bias="linear_bias" in wanted, requires_grad=False)
    for name in wanted:
        getattr(inputs, name).requires_grad_()
    return inputs


def passes(function, *args):
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops() / PASS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction, wanted, expected", TABLE)
def test_gemm_passes(device, reduction, wanted, expected, dtype):
    assert passes(step, reduction, example(device, dtype, wanted)) == expected


@pytest.mark.parametrize(
    "reduction, wanted, expected", [TABLE[0], TABLE[3], TABLE[6], TABLE[7]], ids=["no_grad", "step", "none", "frozen"]
)
def test_gemm_passes_compiled(device, reduction, wanted, expected):
    inputs = example(device, torch.float32, wanted)
    backend = CountingBackend()
    loss = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, backend=backend)(
        *inputs.args, reduction=reduction
    )
    if wanted:
        loss.sum().backward()
    assert backend.flops == expected * PASS


def test_gemm_passes_with_gradients_disabled(device):
    inputs = example(device, torch.float32, ("input", "linear_weight"))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert passes(step, "mean", inputs) == 1


def test_token_weights_alone_cost_one_pass(device):
    """The gradient of token weights is the loss of each token, so it needs no matrix product."""
    inputs = make_inputs((N, D, V), device=device, token_weight=True)
    inputs.input.requires_grad_(False)
    inputs.linear_weight.requires_grad_(False)
    assert passes(step, "mean", inputs) == 1


def test_double_backward_is_counted(device):
    inputs = example(device, torch.float32, ("input", "linear_weight"))

    def penalised():
        loss = flce_ops.linear_cross_entropy(*inputs.args)
        grads = torch.autograd.grad(loss, (inputs.input, inputs.linear_weight), create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    assert passes(penalised) > passes(step, "mean", inputs)


def test_formulas_agree_with_the_products_that_are_computed():
    """Counts aten::mm and addmm inside the CPU kernels, which FlopCounterMode does not see.

    No token is ignored: the formulas count all N tokens, because the number of ignored ones is data.
    """
    inputs = make_inputs((N, D, V), ignored=0.0)
    for reduction in ("mean", "none"):
        with torch.profiler.profile(record_shapes=True) as profile:
            step(reduction, inputs)
        factors = {"aten::mm": slice(0, 2), "aten::addmm_": slice(1, 3)}  # the arguments that are multiplied
        products = [e.input_shapes[factors[e.name]] for e in profile.events() if e.name in factors]
        done = sum(2 * rows * inner * columns for (rows, inner), (_, columns) in products)
        assert done == PASS * passes(step, reduction, inputs)
