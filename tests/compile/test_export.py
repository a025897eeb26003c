"""torch.export: the operator is one node, for any number of tokens. The program survives a file."""

# N tokens, D hidden, V vocabulary

import io

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, reference_loss, run
from test_compile import LOSSES_OF_TOKENS, tensors_of
from torch.export import Dim, export

import flce_ops

LENGTHS = (2, 5, 40, 333)


class Loss(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, input, linear_weight, target, linear_bias):
        return flce_ops.linear_cross_entropy(input, linear_weight, target, linear_bias, **self.options)


def exported(inputs, **options):
    n = Dim("n", min=2)
    shapes = {"input": {0: n}, "linear_weight": None, "target": {0: n}, "linear_bias": None}
    return export(Loss(**options), inputs.args, dynamic_shapes=shapes)


def operators_of(program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_round_trip_with_any_number_of_tokens(device, reduction):
    options = {"reduction": reduction, "softcap": 5.0, "label_smoothing": 0.1}
    program = exported(make_inputs((12, 11, 31), device=device, bias=True), **options)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    for length in LENGTHS:
        inputs = make_inputs((length, 11, 31), device=device, bias=True)
        found = module(*inputs.args)
        assert error(found, reference_loss(*inputs.clone(torch.float64).args, **options)) < 1e-6


def test_program_keeps_one_node(device):
    assert operators_of(exported(make_inputs((12, 11, 31), device=device, bias=True))) == [
        "flce.linear_cross_entropy.default"
    ]


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_exported_program_trains(device, reduction):
    inputs = make_inputs((12, 11, 31), device=device, bias=True)
    module = exported(inputs, reduction=reduction).module()
    found = run(lambda *args: module(*args), inputs)
    expected = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    for name in expected:
        assert error(found[name], expected[name]) < 1e-6, name


def test_decomposed_program_holds_the_inner_operator_and_no_logits(device):
    inputs = make_inputs((12, 11, 31), device=device, bias=True)
    program = exported(inputs).run_decompositions()
    operators = operators_of(program)
    assert any(name.startswith("flce.linear_cross_entropy_") for name in operators), operators
    assert "flce.linear_cross_entropy.default" not in operators
    assert not [name for name in operators if name.startswith(("aten.mm", "aten.addmm", "aten.linear"))]
    assert error(program.module()(*inputs.args), flce_ops.linear_cross_entropy(*inputs.args)) < 1e-6


@pytest.mark.parametrize("module", ["loss", "head"])
def test_modules_export(device, module):
    inputs = make_inputs((12, 11, 31), device=device, requires_grad=False)
    if module == "loss":
        owner = flce_ops.LinearCrossEntropyLoss(11, 31, bias=True, device=device)
    else:
        owner = flce_ops.LinearCrossEntropyHead(11, 31, bias=True, device=device)
    n = Dim("n", min=2)
    program = export(owner, (inputs.input, inputs.target), dynamic_shapes=({0: n}, {0: n}))
    other = make_inputs((77, 11, 31), device=device, requires_grad=False)
    expected = owner(other.input, other.target).detach()
    assert error(program.module()(other.input, other.target), expected) < 1e-6
    assert set(program.state_dict) == set(owner.state_dict())


class LossOfMasked(torch.nn.Module):
    def __init__(self, linear_weight, loss):
        super().__init__()
        self.linear_weight, self.loss = torch.nn.Parameter(linear_weight.detach().clone()), loss

    def forward(self, input, target):
        valid = target != -100
        return tensors_of(self.loss(input[valid], self.linear_weight, target[valid]))


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", ["mean", "none", "metrics", "log_probs", "logits"])
def test_tokens_that_a_mask_leaves_export(name, decomposed):
    """Their number depends on data, and may be another one when the program runs."""
    inputs = make_inputs((20, 8, 31))
    module = LossOfMasked(inputs.linear_weight, LOSSES_OF_TOKENS[name])
    program = torch.export.export(module, (inputs.input.detach(), inputs.target))
    program = program.run_decompositions() if decomposed else program
    for every in (2, 3):
        target = inputs.target.clone()
        target[::every] = -100
        args = inputs.input.detach(), target
        torch.testing.assert_close(program.module()(*args), module(*args), rtol=1e-5, atol=1e-6)
