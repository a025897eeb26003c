"""Exported programs as plain ATen: the operators' numbers, no flce operators, no (N, V) logits, and no need for
flce_ops.
"""

# N tokens, D hidden, V vocabulary

import inspect

import pytest
import torch
from fresh_process import run_script
from inputs import make_inputs, scalars
from reference_loss import error, plain_loss, run, run_reference
from torch import Tensor
from torch.export import Dim, export
from torch.export.experimental import _export_forward_backward

import flce_ops
from flce_ops import decompositions
from flce_ops.entry import ENTRIES
from flce_ops.ops.registration import OPERATORS

N, D, V = 12, 11, 31
LENGTHS = (2, 40, 333)
EVERYTHING = {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1}
TENSORS = {"bias": True, "weight": True, "token_weight": True}

# operators that programs do not contain; flce_ops/decompositions.py gives the reasons
NOT_IN_PROGRAMS = ("backward_", "double_backward", "kl_div", "vocab_parallel")
NOT_DECOMPOSED = {
    name
    for name in (*ENTRIES, *OPERATORS)
    if name.startswith("cross_entropy") or any(part in name for part in NOT_IN_PROGRAMS)
}


@pytest.fixture(autouse=True)
def blocks_of_eight_classes(monkeypatch):
    """Four blocks for a vocabulary of 31; the last one is shorter."""
    monkeypatch.setattr(decompositions, "CLASSES_PER_BLOCK", 8)


class Loss(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, input, linear_weight, target, linear_bias, tensors: dict[str, Tensor]):
        return flce_ops.linear_cross_entropy(input, linear_weight, target, linear_bias, **{**self.options, **tensors})


def exported(inputs, **options):
    n = Dim("n", min=2)
    shapes = {"input": {0: n}, "linear_weight": None, "target": {0: n}, "linear_bias": None}
    shapes["tensors"] = {name: {0: n} if name == "token_weight" else None for name in inputs.options}
    return export(Loss(**options), (*inputs.args, inputs.options), dynamic_shapes=shapes)


def core_table():
    table = torch.export.default_decompositions()
    table.update(flce_ops.export_decompositions())
    return table


TABLES = {"own": flce_ops.export_decompositions, "core": core_table}


def operators_of(program) -> set[str]:
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert not [str(call) for call in calls if isinstance(call, torch._ops.OpOverload) and call._schema.is_mutable]
    return {str(call) for call in calls}


@pytest.mark.parametrize(
    "everything, reduction, table",
    [
        (False, "mean", "own"),
        (True, "none", "own"),
        (True, "mean", "own"),
        (True, "sum", "own"),
        (True, "mean", "core"),
    ],
)
def test_decomposed_program_gives_the_loss_for_any_number_of_tokens(everything, reduction, table):
    tensors = {**TENSORS, "normalizer": reduction != "none"} if everything else {}
    options = {**(EVERYTHING if everything else {}), "reduction": reduction}
    program = exported(make_inputs((N, D, V), requires_grad=False, **tensors), **options)
    program = program.run_decompositions(TABLES[table]())
    assert not [name for name in operators_of(program) if not name.startswith(("aten.", "<built-in"))]
    module = program.module()
    for length in LENGTHS:
        inputs = make_inputs((length, D, V), requires_grad=False, **tensors)
        exact = plain_loss(*inputs.clone(torch.float64).args, **inputs.clone(torch.float64).options, **options)
        found = module(*inputs.args, inputs.options)
        # two tokens may be sure of their classes: a loss near 0
        assert (found - exact).norm() <= 1e-6 * exact.norm() + 3e-7, length


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_decomposed_program_is_as_exact_as_the_operator(dtype):
    inputs = make_inputs((N, D, V), dtype=dtype, requires_grad=False, **TENSORS)
    options = {**EVERYTHING, "reduction": "none"}  # weights have signs: in a mean, losses may cancel
    module = exported(inputs, **options).run_decompositions(flce_ops.export_decompositions()).module()
    found = module(*inputs.args, inputs.options)
    expected = flce_ops.linear_cross_entropy(*inputs.args, **inputs.options, **options)
    assert found.dtype == expected.dtype
    assert error(found, expected) < (1e-14 if dtype == torch.float64 else 1e-6)


def test_ignore_index_and_int32_targets(device):
    inputs = make_inputs((N, D, V), device=device, target_dtype=torch.int32, ignore_index=7, requires_grad=False)
    # ignore_index is an option of the program, not one of its inputs
    inputs.ignore_index, ignored = -100, {"ignore_index": 7}
    program = exported(inputs, **ignored).run_decompositions(flce_ops.export_decompositions())
    expected = flce_ops.linear_cross_entropy(*inputs.args, **ignored)
    assert error(program.module()(*inputs.args, {}), expected) < 1e-6


def test_all_tokens_ignored():
    inputs = make_inputs((N, D, V), requires_grad=False)
    inputs.target.fill_(-100)
    for reduction in ("mean", "sum"):
        program = exported(inputs, reduction=reduction).run_decompositions(flce_ops.export_decompositions())
        found = program.module()(*inputs.args, {})
        assert torch.equal(found.isnan(), torch.tensor(reduction == "mean")) and found.nan_to_num(0.0) == 0.0


def test_target_out_of_range_fails_by_name():
    inputs = make_inputs((N, D, V), requires_grad=False)
    module = exported(inputs).run_decompositions(flce_ops.export_decompositions()).module()
    for outside in (V, -1):
        inputs.target[3] = outside
        with pytest.raises(RuntimeError, match=r"target in \[0, 31\)"):
            module(*inputs.args, {})


@pytest.mark.parametrize("table", TABLES)
def test_no_node_is_wider_than_a_block(table):
    inputs = make_inputs((N, D, V), requires_grad=False, **TENSORS)
    program = exported(inputs, **EVERYTHING).run_decompositions(TABLES[table]())
    values = [node.meta.get("val") for node in program.graph.nodes]
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.dim() == 2]
    assert [shape for shape in shapes if shape[1] == 8]
    assert not [shape for shape in shapes if shape[1] == V and isinstance(shape[0], torch.SymInt)]


def test_log_probs_and_metrics_decompose():
    class Everything(torch.nn.Module):
        def forward(self, *args):
            loss, metrics = flce_ops.linear_cross_entropy(*args, return_metrics=True)
            rows = flce_ops.linear_log_probs(*args, softcap=5.0, entropy=True, argmax=True, tail=True)
            return loss, *metrics, *rows

    n = Dim("n", min=2)
    example = make_inputs((N, D, V), bias=True, requires_grad=False)
    program = export(Everything(), example.args, dynamic_shapes=(({0: n}, None, {0: n}, None),))
    program = program.run_decompositions(flce_ops.export_decompositions())
    assert not [name for name in operators_of(program) if name.startswith("flce")]
    other = make_inputs((77, D, V), bias=True, requires_grad=False)
    for found, expected in zip(program.module()(*other.args), Everything()(*other.args), strict=True):
        assert found.dtype == expected.dtype and error(found, expected) < 1e-6


@pytest.mark.parametrize("owner", ["loss", "head"])
def test_modules_decompose(owner):
    kind = {"loss": flce_ops.LinearCrossEntropyLoss, "head": flce_ops.LinearCrossEntropyHead}[owner]
    module = kind(D, V, bias=True)
    inputs = make_inputs((N, D, V), requires_grad=False)
    n = Dim("n", min=2)
    program = export(module, (inputs.input, inputs.target), dynamic_shapes=({0: n}, {0: n}))
    program = program.run_decompositions(flce_ops.export_decompositions())
    other = make_inputs((77, D, V), requires_grad=False)
    assert not [name for name in operators_of(program) if name.startswith("flce")]
    assert error(program.module()(other.input, other.target), module(other.input, other.target).detach()) < 1e-6


@pytest.mark.parametrize("table", TABLES)
def test_under_autocast(table):
    class UnderAutocast(Loss):
        def forward(self, *args):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(*args, {})

    inputs = make_inputs((N, D, V), requires_grad=False)
    program = export(UnderAutocast(reduction="none"), inputs.args).run_decompositions(TABLES[table]())
    found = program.module()(*inputs.args)
    with torch.autocast("cpu", torch.bfloat16):
        expected = flce_ops.linear_cross_entropy(*inputs.args, reduction="none")
    assert found.dtype == expected.dtype == torch.float32
    assert error(found, expected) < 1e-6
    assert error(found, flce_ops.linear_cross_entropy(*inputs.args, reduction="none")) > 1e-6, "nothing was cast"


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
def test_training_program_gives_the_gradients(everything):
    """The joint graph of forward and backward, for training on a device."""
    options = EVERYTHING if everything else {}
    inputs = make_inputs((N, D, V), requires_grad=False, weight=everything)
    trunk, head = torch.nn.Linear(D, D), flce_ops.LinearCrossEntropyHead(D, V, bias=True, **options)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = trunk, head

        def forward(self, input, target):
            return self.head(torch.tanh(self.trunk(input)), target, weight=inputs.weight)

    model = Model()
    n = Dim("n", min=2)
    program = export(model, (inputs.input, inputs.target), dynamic_shapes=({0: n}, {0: n}))
    program = _export_forward_backward(program)
    assert [name for name in operators_of(program) if name.startswith("flce")]
    program = program.run_decompositions(flce_ops.export_decompositions())
    assert not [name for name in operators_of(program) if name.startswith("flce")]

    other = make_inputs((77, D, V), requires_grad=False)
    constants = [*dict(model.named_parameters()).values(), *program.constants.values()]
    loss, *results = program.graph_module(*constants, other.input, other.target)
    names = program.graph_signature.backward_signature.gradients_to_parameters
    outputs = [spec.arg.name for spec in program.graph_signature.output_specs][1:]
    expected = model(other.input, other.target)
    expected.backward()
    assert error(loss, expected) < 1e-6
    grads = {names[output]: grad for output, grad in zip(outputs, results) if output in names}
    assert set(grads) == {"trunk.weight", "trunk.bias", "head.weight", "head.bias"}
    for name, grad in grads.items():
        assert error(grad, model.get_parameter(name).grad) < 1e-6, name


SHARD = {"vocab_start": 100, "vocab_size": 150}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shard", [{}, SHARD], ids=["whole", "shard"])
def test_forward_is_the_operators(shard, dtype):
    inputs = make_inputs((50, D, V), dtype=dtype, bias=True, weight=True, requires_grad=False)
    inputs.target[inputs.target >= 0] += 5 * len(shard) * 11  # some targets are after the shard
    inputs.target[inputs.target >= 150] = 0  # some are before it
    args = (*inputs.args, inputs.weight)
    everything = {"logit_sum": True, "expected_log_prob": True, "argmax": True}
    options = scalars({**everything, "softcap": 5.0, "logit_scale": 0.7, **shard})
    expected = torch.ops.flce.linear_cross_entropy_forward(*args, **options)
    *found, rest, retained = decompositions.forward(*args, **options)
    for ours, exact in zip(found, expected):
        assert ours.dtype == exact.dtype
        assert error(ours, exact) < (1e-14 if dtype == torch.float64 else 1e-6)
    assert retained.shape == expected[-1].shape and retained.dtype == expected[-1].dtype
    assert rest.dtype == expected[-2].dtype and rest.abs().max() < 1e-6  # the rounding error of lse
    hit = (inputs.target >= shard.get("vocab_start", 0)) & (inputs.target < shard.get("vocab_start", 0) + V)
    assert hit.any() and (not shard or not hit.all())


def test_a_block_of_classes_that_are_switched_off():
    inputs = make_inputs((50, D, V), dtype=torch.float64, bias=True, requires_grad=False)
    inputs.linear_bias[8:20] = -torch.inf
    inputs.target.fill_(3)
    expected = torch.ops.flce.linear_cross_entropy_forward(*inputs.args, expected_log_prob=True, argmax=True)
    *found, _, _ = decompositions.forward(*inputs.args, expected_log_prob=True, argmax=True)
    for ours, exact in zip(found, expected):
        assert exact.isfinite().all() and error(ours, exact) < 1e-14


# cotangents (of target_logit, lse, logit_sum, expected_log_prob), output_mask
MASKS = [
    ((True, True, True, True), (True, True, True)),
    ((True, True, False, False), (True, False, False)),
    ((False, True, False, False), (False, True, True)),
    ((True, False, True, False), (True, True, True)),
    ((False, False, False, True), (True, True, False)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("given, mask", MASKS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_backward_is_the_operators(given, mask, dtype, softcap):
    inputs = make_inputs((50, D, V), dtype=dtype, bias=True, weight=True, requires_grad=False)
    args = (*inputs.args, inputs.weight)
    options = scalars({"softcap": softcap, "logit_scale": 0.7})
    _, lse, _, mean, *_ = torch.ops.flce.linear_cross_entropy_forward(*args, **options, expected_log_prob=True)
    cotangents = [torch.randn_like(lse).masked_fill(inputs.target < 0, float("nan")) if g else None for g in given]
    options["grad_expected_log_prob"], options["expected_log_prob"] = cotangents.pop(), mean if given[3] else None
    found = decompositions.backward(*cotangents, *args, lse, **options, output_mask=list(mask))
    expected = torch.ops.flce.linear_cross_entropy_backward(*cotangents, *args, lse, **options, output_mask=list(mask))
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype and one.isfinite().all()
        # bfloat16: the operator adds once in that dtype, the decomposition sums over blocks in float32
        assert error(one, other) < (1e-13 if dtype == torch.float64 else 8e-3)


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
def test_with_grad_is_the_operators(everything):
    inputs = make_inputs((50, D, V), dtype=torch.float64, bias=True, weight=everything, requires_grad=False)
    args = (*inputs.args, inputs.weight, torch.rand(50, dtype=torch.float64))
    options = scalars({**EVERYTHING, "argmax": True}) if everything else {}
    found = decompositions.with_grad(*args, **options, output_mask=[True, True, True])
    expected = torch.ops.flce.linear_cross_entropy_with_grad(*args, **options, output_mask=[True, True, True])
    for one, other in zip(found, expected):
        assert error(one, other) < 1e-13


def test_bfloat16_gradients_are_no_worse_than_the_operators():
    inputs = make_inputs((50, D, V), dtype=torch.bfloat16, bias=True)
    exact = run_reference(inputs, reduction="sum")
    ones = torch.ones(50)
    _, _, grad_input, grad_weight, grad_bias, *_ = decompositions.with_grad(
        *inputs.clone().args, None, ones, output_mask=[True, True, True]
    )
    ours = run(flce_ops.linear_cross_entropy, inputs, reduction="sum")
    found = {"input": grad_input, "linear_weight": grad_weight, "linear_bias": grad_bias}
    for name, grad in found.items():
        assert error(grad, exact[name]) <= 1.5 * error(ours[name], exact[name]) + 1e-3, name


@pytest.mark.parametrize("name", sorted({*ENTRIES, *OPERATORS} - NOT_DECOMPOSED))
def test_every_operator_of_a_program_has_a_decomposition_of_its_signature(name):
    op = getattr(torch.ops.flce, name).default
    function = flce_ops.export_decompositions()[op]
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return  # the decomposition is the operator's own body, whatever its signature is
    (call,) = inspect.signature(function).parameters.values()
    assert issubclass(OPERATORS[name].arguments, call.annotation)


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_aten_can_be_exported_to_onnx():
    """Follows the advice of the operators' error message for ONNX."""
    pytest.importorskip("onnxscript")
    program = exported(make_inputs((N, D, V), requires_grad=False, **TENSORS), **EVERYTHING)
    torch.onnx.export(program.run_decompositions(flce_ops.export_decompositions()), verbose=False)
    with pytest.raises(torch.onnx.OnnxExporterError, match="linear_cross_entropy: ONNX has no such operator; export"):
        torch.onnx.export(program, verbose=False)


def test_saved_program_runs_where_flce_ops_is_not_installed(tmp_path):
    inputs = make_inputs((N, D, V), requires_grad=False, **TENSORS)
    program = exported(inputs, **EVERYTHING).run_decompositions(flce_ops.export_decompositions())
    torch.export.save(program, tmp_path / "loss.pt2")
    other = make_inputs((77, D, V), requires_grad=False, **TENSORS)
    expected = flce_ops.linear_cross_entropy(*other.args, **other.options, **EVERYTHING)
    torch.save(((*other.args, other.options), expected), tmp_path / "expected.pt")
    script = (
        "import sys; sys.modules['flce_ops'] = None\n"
        "import torch\n"
        "args, expected = torch.load(sys.argv[2])\n"
        "found = torch.export.load(sys.argv[1]).module()(*args)\n"
        "assert torch.allclose(found, expected, rtol=1e-6), (found, expected)\n"
        "assert not hasattr(torch.ops.flce, 'linear_cross_entropy')\n"
    )
    done = run_script(script, str(tmp_path / "loss.pt2"), str(tmp_path / "expected.pt"))
    assert done.returncode == 0, done.stderr
