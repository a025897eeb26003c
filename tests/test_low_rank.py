"""The loss of a head with a low-rank pair beside its weight, and its gradients: LoRA on the head."""

# N tokens, D hidden, V vocabulary, r rank of the pair

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, reference_loss
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops import decompositions
from flce_ops.aten.low_rank import low_rank_with_grad

flce = torch.ops.flce
entry = flce.linear_cross_entropy_low_rank
RAGGED, RANK = (37, 35, 131), 3
LEAVES = ("input", "pair_input", "pair_weight", "linear_bias", "class_scale")
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "weight": True, "reduction": "sum"},
    {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 1e-2, "normalizer": True},
    {"class_scale": True},
    {"class_scale": True, "softcap": 5.0, "logit_scale": 0.7, "label_smoothing": 0.1},
]
ONE_PASS, FORWARD, WITH_GRAD = (
    f"linear_cross_entropy_{name}" for name in ("low_rank_with_grad", "forward", "with_grad")
)


def max_dtype(dtype):
    return torch.promote_types(dtype, torch.float32)


class Call:
    """Operands, the pair's magnitude that of the head's, and options, whose tensors stand as True."""

    def __init__(self, shape=RAGGED, rank=RANK, dtype=torch.float32, device="cpu", *, bias=True, options=None):
        options = dict(options or {})
        scaled = options.pop("class_scale", False)
        made = {name: options.pop(name, False) for name in ("weight", "normalizer")}
        inputs = make_inputs(shape, dtype=dtype, device=device, bias=bias, **made)
        constants = {name: tensor.detach() for name, tensor in inputs.options.items()}
        self.target, self.options = inputs.target, constants | options
        self.input, self.linear_weight, self.linear_bias = inputs.input, inputs.linear_weight, inputs.linear_bias
        self.linear_weight.requires_grad_(False)
        pair = torch.randn(shape[0], rank), 0.3 * torch.randn(shape[2], rank)
        self.pair_input, self.pair_weight = (part.to(device, dtype).requires_grad_() for part in pair)
        self.class_scale = None  # of both signs, in float32 beside half operands too
        if scaled:
            self.class_scale = (torch.rand(shape[2], device=device, dtype=max_dtype(dtype)) - 0.3).requires_grad_()

    @property
    def names(self):
        return [name for name in LEAVES if getattr(self, name) is not None]

    @property
    def leaves(self):
        return [getattr(self, name) for name in self.names]

    def in_dtype(self, dtype):
        copy = Call.__new__(Call)
        copy.__dict__ = dict(self.__dict__)
        for name in (*LEAVES, "linear_weight"):
            if getattr(self, name) is not None:
                value = getattr(self, name).detach().to(dtype)
                setattr(copy, name, value.requires_grad_(name != "linear_weight"))
        return copy

    @property
    def args(self):
        return self.input, self.linear_weight, self.pair_input, self.pair_weight, self.target, self.linear_bias

    def loss(self, **options):
        return entry(*self.args, **self.options, **options, class_scale=self.class_scale)

    def dense(self, **options):
        input = torch.cat([self.input, self.pair_input], -1)
        weight = torch.cat([self.linear_weight, self.pair_weight], 1)
        if self.class_scale is not None:
            weight = weight * self.class_scale.to(weight.dtype)[:, None]
        return reference_loss(input, weight, self.target, self.linear_bias, **self.options, **options)


def results(call, loss, **options):
    value = loss(call, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), call.leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunks", [1, 2])
def test_loss_and_gradients_are_no_worse_than_plain_torch(chunks, options, dtype, device, poisoned_memory):
    call = Call((300, 20, 131) if chunks > 1 else RAGGED, dtype=dtype, device=device, options=options)
    exact = results(call.in_dtype(torch.float64), Call.dense)
    plain = results(call, Call.dense)
    with torch.no_grad():  # what an ignored token holds does not matter
        for rows in (call.input, call.pair_input):
            rows[call.target == -100] = torch.nan
    with flce_ops.workspace(1 if chunks > 1 else 512 << 20):
        found = results(call, Call.loss)
    path = flce_ops.last_path()
    assert path.op == ONE_PASS and (path.chunks > 1) == (chunks > 1)
    slack = 1e-6 if dtype == torch.float32 else 5e-4  # of one number, the loss
    for name, ours, theirs, truth in zip(("loss", *call.names), found, plain, exact, strict=True):
        assert error(ours, truth) <= 1.5 * error(theirs, truth) + slack, name


def test_nothing_of_the_weights_size_is_made():
    call = Call((16, 64, 600), bias=False)

    class LargestResult(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != call.linear_weight.data_ptr():
                    self.numbers = max(self.numbers, tensor.numel())
            return result

    operands = [operand if operand is None else operand.detach() for operand in call.args]
    with LargestResult() as largest:
        low_rank_with_grad(*operands, None, None, None, output_mask=[True, True, True, False, False])
    assert 8 * 600 < largest.numbers <= 16 * 600  # the logits of the kept tokens
    with FlopCounterMode(display=False) as counter:
        call.loss().backward()
    assert counter.get_total_flops() == 2 * 16 * 600 * (2 * 64 + 3 * RANK)


def checkpointed(call, **options):
    return checkpoint(lambda: call.loss(**options), use_reentrant=False)


@pytest.mark.parametrize(
    ("how", "op"),
    [
        ("no gradient", FORWARD),
        ("float16", FORWARD),
        ("none", FORWARD),
        ("token_weight", WITH_GRAD),
        ("checkpoint", FORWARD),
        ("trained head", WITH_GRAD),
    ],
)
def test_other_situations_take_the_pair_as_features(how, op):
    call = Call(dtype=torch.float16 if how == "float16" else torch.float32)
    call.linear_weight.requires_grad_(how == "trained head")
    options = {"reduction": "none"} if how == "none" else {}
    if how == "token_weight":
        options["token_weight"] = torch.rand(RAGGED[0])
    with torch.set_grad_enabled(how != "no gradient"):
        loss = checkpointed(call) if how == "checkpoint" else call.loss(**options)
    assert flce_ops.last_path().op == op
    exact = call.in_dtype(torch.float64).dense(**options)
    assert error(loss, exact) <= (2e-3 if how == "float16" else 2e-6)
    if how == "no gradient":
        return
    leaves = [*call.leaves, *([call.linear_weight] if how == "trained head" else [])]
    doubled = call.in_dtype(torch.float64)
    doubled.linear_weight.requires_grad_(how == "trained head")
    others = [*doubled.leaves, *([doubled.linear_weight] if how == "trained head" else [])]
    gradients = torch.autograd.grad(loss.sum(), leaves)
    truths = torch.autograd.grad(doubled.dense(**options).sum(), others)
    for ours, truth in zip(gradients, truths, strict=True):
        assert error(ours, truth) <= (4e-3 if how == "float16" else 5e-6)


def test_second_derivatives():
    call = Call(dtype=torch.float64, options={"label_smoothing": 0.1, "softcap": 5.0, "class_scale": True})
    directions = [torch.randn_like(leaf) for leaf in call.leaves]

    def second(loss):
        gradients = torch.autograd.grad(loss, call.leaves, create_graph=True)
        return torch.autograd.grad(sum((g * d).sum() for g, d in zip(gradients, directions)), call.leaves)

    for ours, truth in zip(second(call.loss()), second(call.dense()), strict=True):
        assert error(ours, truth) <= 1e-12


@pytest.mark.parametrize("wanted", [LEAVES, ("pair_weight",), ("input", "pair_input")], ids=str)
def test_opcheck(device, wanted):
    call = Call((12, 11, 31), device=device, options={"weight": True, "softcap": 5.0, "class_scale": True})
    for name in LEAVES:
        getattr(call, name).requires_grad_(name in wanted)
    opcheck(entry.default, call.args, call.options | {"class_scale": call.class_scale})
    mask = [name in wanted for name in LEAVES]
    numbers = {"softcap": torch.tensor(5.0, device=device), "label_smoothing": 0.1, "output_mask": mask}
    values = (*call.args, call.options["weight"], call.class_scale, None)
    opcheck(flce.linear_cross_entropy_low_rank_with_grad.default, values, numbers)


def test_one_graph_autocast_and_a_transform():
    call = Call()
    loss = torch.compile(lambda *args: entry(*args), fullgraph=True, backend="aot_eager")(*call.args)
    gradients = torch.autograd.grad(loss, call.leaves)
    for ours, eager in zip([loss.detach(), *gradients], results(call, Call.loss), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        ours = call.loss()
    assert flce_ops.last_path().op == ONE_PASS
    assert torch.equal(ours, call.in_dtype(torch.bfloat16).loss())
    input, weight, pair_input, *rest = (x.detach() for x in call.args)
    found = torch.func.grad(lambda pair_input: entry(input, weight, pair_input, *rest))(pair_input)
    torch.testing.assert_close(found, gradients[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "mask", [[True] * 5, [False, True, True, False, False], [True, False, False, False, True]], ids=str
)
def test_the_decomposition_is_the_operator(mask):
    call = Call(dtype=torch.float64, options={"class_scale": True})
    values = [value if value is None else value.detach() for value in (*call.args, None, call.class_scale, None, None)]
    found = decompositions.low_rank_with_grad(*values, output_mask=mask, label_smoothing=0.1)
    expected = low_rank_with_grad(*values, output_mask=mask, label_smoothing=0.1)
    for ours, truth in zip(found, expected, strict=True):
        assert ours.shape == truth.shape and error(ours, truth) <= 1e-13


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"pair_input": torch.zeros(36, 3)},
            ValueError,
            r"expected low_rank_input of shape \(37, r\), got \(36",
        ),
        ({"pair_weight": torch.zeros(0)}, ValueError, r"expected low_rank_weight of shape \(131, r\), got \(0,\)"),
        ({"pair_weight": torch.zeros(131, 4)}, ValueError, "low_rank_input has 3 features, but low_rank_weight has 4"),
        ({"pair_input": torch.zeros(37, 3).double()}, TypeError, "expected low_rank_input in input's dtype"),
        ({"target": torch.rand(37, 131)}, TypeError, "expected target of class indices"),
        (
            {"pair_weight": torch.zeros(131, 3, device="meta")},
            ValueError,
            "expected low_rank_weight on the device of input",
        ),
        ({"class_scale": torch.zeros(130)}, ValueError, r"expected class_scale of shape \(131,\)"),
        ({"class_scale": torch.zeros(131).long()}, TypeError, "expected class_scale in a floating dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_by_name(change, kind, message):
    call = Call()
    call.__dict__ |= change
    for trained in (False, True):  # the operator of a frozen head, and the copy that joins the pair to it
        call.linear_weight.requires_grad_(trained)
        with pytest.raises(kind, match=f"linear_cross_entropy: {message}"):
            call.loss()


def test_refusals_of_the_operator():
    call = Call()
    values, numbers = (*call.args, None, None, None, None), {"output_mask": [True] * 4 + [False]}
    with pytest.raises(ValueError, match=r"low_rank_weight has shape \(131, 4\)"):
        flce.linear_cross_entropy_low_rank_with_grad(*values[:3], torch.zeros(131, 4), *values[4:], **numbers)
    with pytest.raises(ValueError, match=r"expected low_rank_input of shape \(37, r\), got \(3,\)"):
        flce.linear_cross_entropy_low_rank_with_grad(*values[:2], torch.zeros(3), *values[3:], **numbers)
    with pytest.raises(TypeError, match="expected low_rank_weight in input's dtype"):
        flce.linear_cross_entropy_low_rank_with_grad(*values[:3], values[3].double(), *values[4:], **numbers)
    call.linear_weight.requires_grad_()
    with pytest.raises(NotImplementedError, match="linear_weight gets no gradient here; pass it detached"):
        flce.linear_cross_entropy_low_rank_with_grad(*values, **numbers)
