"""The table of GEMM passes: how many times 2 N D V floating-point operations each call costs."""

# N tokens, D hidden, V vocabulary

import contextlib

import pytest
import torch
from counting_backend import CountingBackend
from inputs import make_inputs
from test_compile import LOSSES_OF_TOKENS, kl_div, tensors_of
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


# forward, and backward by the input alone, by the weight alone, by both: under gradients_in_backward() and where
# backward makes the gradients in any case; the second of two models has one pass more in each
IN_BACKWARD = {False: (1, 1, 1, 2), True: (2, 3, 3, 4)}
NAMES = ("mean", "none", "metrics", "soft targets", "log_probs", "topk", "policy", "policy none", "kl_div", "logits")
FUNCTIONS = {name: LOSSES_OF_TOKENS[name] for name in NAMES} | {
    "kl_div none": lambda *args: kl_div(*args, reduction="none"),
    "token_loss": lambda *args: flce_ops.linear_token_loss(*args, lambda log_prob: log_prob.square())[0],
    "token_loss none": lambda *args: flce_ops.linear_token_loss(*args, torch.neg, reduction="none")[0],
    "sum": lambda *args: flce_ops.linear_cross_entropy(*args, reduction="sum"),
    "token_weight": lambda *args: flce_ops.linear_cross_entropy(*args, token_weight=torch.rand(N)),
}
MADE_IN_FORWARD = (
    "mean",
    "sum",
    "metrics",
    "soft targets",
    "policy",
    "token_loss",
    "kl_div",
    "token_weight",
)


@pytest.mark.parametrize("left_to_backward", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backward_runs_the_passes_of_the_gradients_that_it_is_asked_for(name, left_to_backward):
    """As the two backwards of a zero-bubble pipeline, of a graph that is retained."""
    inputs = make_inputs((N, D, 31))
    leaves, found = (inputs.input, inputs.linear_weight), []
    expected = IN_BACKWARD["kl_div" in name]
    if name in MADE_IN_FORWARD and not left_to_backward:
        expected = (expected[0] + 2, 0, 0, 0)
    with flce_ops.gradients_in_backward() if left_to_backward else contextlib.nullcontext():
        counted = [passes(lambda: found.append(FUNCTIONS[name](*leaves, inputs.target)))]
    loss = sum(value.sum() for value in tensors_of(found) if value.requires_grad)
    for asked in (leaves[:1], leaves[1:], leaves):
        counted.append(passes(torch.autograd.grad, loss, asked, None, True))
    assert [count * V / 31 for count in counted] == [*expected]


def test_without_saved_logits_each_backward_makes_them_again():
    inputs = make_inputs((N, D, V))
    with flce_ops.workspace(retained=0), flce_ops.gradients_in_backward():
        loss = flce_ops.linear_cross_entropy(*inputs.args)
    for leaf in (inputs.input, inputs.linear_weight):
        assert passes(torch.autograd.grad, loss, leaf, None, True) == 2


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
