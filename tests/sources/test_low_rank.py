"""A head with a low-rank pair beside its weight (LoRA on the head): the loss and its gradients."""

# N tokens, D hidden, V vocabulary, r rank of the pair

import functools
import re
from contextlib import nullcontext

import pytest
import torch
from flce_ops.aten.low_rank import low_rank_with_grad
from functorch.compile import make_boxed_func
from inputs import make_inputs
from reference_loss import error, reference_loss
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import save_on_cpu
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops import decompositions

flce = torch.ops.flce
entry = flce.linear_cross_entropy_low_rank
RAGGED, RANK = (37, 35, 131), 3
LEAVES = ("input", "pair_input", "pair_weight", "linear_bias")
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "weight": True, "reduction": "sum"},
    {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 1e-2, "normalizer": True},
    {"softcap": 5.0, "logit_scale": 0.7, "label_smoothing": 0.1},
]
ONE_PASS = "linear_cross_entropy_low_rank_with_grad"


class Call:
    """Operands, with a pair as large as the head, and options; an option that is True becomes a tensor."""

    def __init__(self, shape=RAGGED, rank=RANK, dtype=torch.float32, device="cpu", *, bias=True, options=None):
        options = dict(options or {})
        made = {name: options.pop(name, False) for name in ("weight", "normalizer")}
        inputs = make_inputs(shape, dtype=dtype, device=device, bias=bias, **made)
        constants = {name: tensor.detach() for name, tensor in inputs.options.items()}
        self.target, self.options = inputs.target, constants | options
        self.input, self.linear_weight, self.linear_bias = inputs.input, inputs.linear_weight, inputs.linear_bias
        self.linear_weight.requires_grad_(False)
        pair = torch.randn(shape[0], rank), 0.3 * torch.randn(shape[2], rank)
        self.pair_input, self.pair_weight = (part.to(device, dtype).requires_grad_() for part in pair)

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
        return entry(*self.args, **self.options, **options)

    def dense(self, **options):
        input = torch.cat([self.input, self.pair_input], -1)
        weight = torch.cat([self.linear_weight, self.pair_weight], 1)
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
    with torch.no_grad():  # the contents of an ignored token do not matter
        for rows in (call.input, call.pair_input):
            rows[call.target == -100] = torch.nan
    with flce_ops.workspace(1 if chunks > 1 else 512 << 20):
        found = results(call, Call.loss)
    path = flce_ops.last_path()
    assert path.op == ONE_PASS and (path.chunks > 1) == (chunks > 1)
    slack = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 8  # the loss is one number
    for name, ours, theirs, truth in zip(("loss", *call.names), found, plain, exact, strict=True):
        assert error(ours, truth) <= 1.5 * error(theirs, truth) + slack, name


class LargestResult(TorchDispatchMode):
    """Records the largest result of an operator, other than the weight. It does not see what kernels allocate."""

    def __init__(self, call):
        super().__init__()
        self.weight, self.numbers = call.linear_weight.data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != self.weight:
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_nothing_of_the_weights_size_is_made():
    call = Call((16, 64, 600), bias=False)
    operands = [operand if operand is None else operand.detach() for operand in call.args]
    with LargestResult(call) as largest:
        low_rank_with_grad(*operands, None, None, None, output_mask=[True, True, True, False])
    assert 8 * 600 < largest.numbers <= 16 * 600  # the logits of the valid tokens
    with FlopCounterMode(display=False) as counter:
        call.loss().backward()
    assert counter.get_total_flops() == 2 * 16 * 600 * (2 * 64 + 3 * RANK)
    with FlopCounterMode(display=False) as counter:  # computed once for the losses, once for their gradients
        call.loss(reduction="none").sum().backward()
    assert counter.get_total_flops() == 2 * 16 * 600 * (3 * 64 + 4 * RANK)


def test_a_selective_checkpoint_keeps_the_losses():
    call = Call((16, 64, 600), bias=False)
    call.target.fill_(1)
    keep = functools.partial(create_selective_checkpoint_contexts, flce_ops.SAC_SAVE_OPS)
    for context, passes in ({}, 4), ({"context_fn": keep}, 3):
        with FlopCounterMode(display=False) as counter:
            checkpoint(call.loss, use_reentrant=False, **context).backward()
        assert counter.get_total_flops() == 2 * 16 * 600 * (passes * 64 + (passes + 1) * RANK)


SITUATIONS = {  # how forward is called, and the options
    "no gradient": (torch.no_grad, {}),
    "none": (nullcontext, {"reduction": "none"}),
    "weighted none": (nullcontext, {"reduction": "none", "token_weight": True}),
    "token_weight": (nullcontext, {"token_weight": True}),
    "sum of weighted": (nullcontext, {"token_weight": True, "reduction": "sum"}),
    "normalizer": (nullcontext, {"normalizer": True}),
    "saved-tensor hooks": (save_on_cpu, {}),
    "checkpoint": (nullcontext, {}),
    "float16": (nullcontext, {}),
}


@pytest.mark.parametrize("how", SITUATIONS)
def test_a_frozen_head_is_not_copied(how):
    """Whether forward makes the gradients, or backward calls the operator again."""
    half = how == "float16"
    call = Call(dtype=torch.float16 if half else torch.float32, options={"label_smoothing": 0.1})
    context, options = SITUATIONS[how]
    options = dict(options)
    weights = [name for name in ("token_weight", "normalizer") if name in options]
    for name in weights:
        options[name] = torch.rand(RAGGED[0] if name == "token_weight" else ()).add_(0.1).requires_grad_()
    run = checkpointed if how == "checkpoint" else Call.loss
    slopes = torch.randn(RAGGED[0]) if options.get("reduction") == "none" else torch.tensor(1.7)
    with LargestResult(call) as largest:
        with context():
            loss = run(call, **options)
        assert flce_ops.last_path().op == ONE_PASS
        if how != "no gradient":
            leaves = [*call.leaves, *(options[name] for name in weights)]
            gradients = torch.autograd.grad((loss * slopes).sum(), leaves)
            assert flce_ops.last_path().op == ONE_PASS
    assert largest.numbers < call.linear_weight.numel()
    doubled = call.in_dtype(torch.float64)
    exact = doubled.dense(**options)
    assert error(loss, exact) <= (2e-3 if half else 2e-6)
    if how == "no gradient":
        return
    truths = torch.autograd.grad((exact * slopes).sum(), [*doubled.leaves, *(options[name] for name in weights)])
    for ours, truth in zip(gradients, truths, strict=True):
        assert error(ours, truth) <= (4e-3 if half else 5e-6)


def checkpointed(call, **options):
    return checkpoint(lambda: call.loss(**options), use_reentrant=False)


def test_float16_keeps_gradients_that_a_loss_scale_keeps():
    """Gradients of a mean over many tokens would be 0 in float16 before backward's loss scale."""
    call = Call(dtype=torch.float16, options={"normalizer": True})
    call.options["normalizer"] = torch.tensor(1e7)
    scale = 2.0**20
    found = torch.autograd.grad(call.loss() * scale, call.leaves)
    doubled = call.in_dtype(torch.float64)
    truths = torch.autograd.grad(doubled.dense() * scale, doubled.leaves)
    for ours, truth in zip(found, truths, strict=True):
        assert error(ours, truth) <= 4e-3


def test_a_head_that_is_trained_takes_the_pair_as_features():
    call = Call()
    call.linear_weight.requires_grad_()
    loss = call.loss()
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    doubled = call.in_dtype(torch.float64)
    doubled.linear_weight.requires_grad_()
    gradients = torch.autograd.grad(loss, [*call.leaves, call.linear_weight])
    truths = torch.autograd.grad(doubled.dense(), [*doubled.leaves, doubled.linear_weight])
    for ours, truth in zip(gradients, truths, strict=True):
        assert error(ours, truth) <= 5e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives(reduction):
    call = Call(dtype=torch.float64, options={"label_smoothing": 0.1, "softcap": 5.0})
    call.options["reduction"] = reduction
    directions = [torch.randn_like(leaf) for leaf in call.leaves]

    def second(loss):
        gradients = torch.autograd.grad(loss.square().sum(), call.leaves, create_graph=True)
        return torch.autograd.grad(sum((g * d).sum() for g, d in zip(gradients, directions)), call.leaves)

    for ours, truth in zip(second(call.loss()), second(call.dense()), strict=True):
        assert error(ours, truth) <= 1e-12


@pytest.mark.parametrize("wanted", [LEAVES, ("pair_weight",), ("input", "pair_input")], ids=str)
def test_opcheck(device, wanted):
    call = Call((12, 11, 31), device=device, options={"weight": True, "softcap": 5.0})
    for name in LEAVES:
        getattr(call, name).requires_grad_(name in wanted)
    opcheck(entry.default, call.args, call.options)
    mask = [name in wanted for name in LEAVES]
    numbers = {"softcap": torch.tensor(5.0, device=device), "label_smoothing": 0.1, "output_mask": mask}
    values = (*call.args, call.options["weight"], None)
    opcheck(flce.linear_cross_entropy_low_rank_with_grad.default, values, numbers)


def test_one_graph_autocast_and_a_transform():
    call = Call()
    for reduction in ("none", "mean"):  # gradients are made in backward, or in forward
        compiled = torch.compile(functools.partial(entry, reduction=reduction), fullgraph=True, backend="aot_eager")
        loss = compiled(*call.args)
        gradients = torch.autograd.grad(loss.sum(), call.leaves)
        for ours, eager in zip([loss.detach(), *gradients], results(call, Call.loss, reduction=reduction), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        ours = call.loss()
    assert flce_ops.last_path().op == ONE_PASS
    assert torch.equal(ours, call.in_dtype(torch.bfloat16).loss())
    input, weight, pair_input, *rest = (x.detach() for x in call.args)
    found = torch.func.grad(lambda pair_input: entry(input, weight, pair_input, *rest))(pair_input)
    torch.testing.assert_close(found, gradients[1], rtol=1e-5, atol=1e-7)


def test_a_compiled_checkpoint_calls_the_operator_once_in_backward():
    calls = []

    def compiler(graph, inputs):
        calls.append(
            sum(node.target is flce.linear_cross_entropy_low_rank_with_grad.default for node in graph.graph.nodes)
        )
        return make_boxed_func(graph.forward)

    def run(*args):
        return checkpoint(entry, *args, use_reentrant=False)

    call = Call()
    loss = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(*call.args)
    gradients = torch.autograd.grad(loss, call.leaves)
    assert calls == [1, 1]
    for ours, eager in zip(gradients, results(call, Call.loss)[1:], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mask", [[True] * 4, [False, True, True, False], [True, False, False, False]], ids=str)
def test_the_decomposition_is_the_operator(mask):
    call = Call(dtype=torch.float64)
    values = [value if value is None else value.detach() for value in (*call.args, None, None, None)]
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


def test_tokens_may_have_any_shape():
    call = Call((24, *RAGGED[1:]))
    flat = call.loss(reduction="none")
    for shape in ((2, 12), (2, 3, 4)):
        for name in ("input", "pair_input"):
            setattr(call, name, getattr(call, name).reshape(*shape, -1))
        call.target = call.target.reshape(shape)
        assert torch.equal(call.loss(reduction="none"), flat.view(shape))
    call.pair_input = call.pair_input[:1]
    with pytest.raises(ValueError, match=r"expected low_rank_input of shape \(2, 3, 4, r\), got \(1, 3, 4, 3\)"):
        call.loss()


def test_refusals_of_the_operator():
    call = Call()
    values, numbers = (*call.args, None, None, None), {"output_mask": [True] * 4}
    with pytest.raises(ValueError, match=r"low_rank_weight has shape \(131, 4\)"):
        flce.linear_cross_entropy_low_rank_with_grad(*values[:3], torch.zeros(131, 4), *values[4:], **numbers)
    for shape in ((3,), (37,), (36, 3), (37, 3, 1)):
        got = re.escape(str(shape))
        with pytest.raises(ValueError, match=rf"expected low_rank_input of shape \(37, r\), got {got}"):
            flce.linear_cross_entropy_low_rank_with_grad(*values[:2], torch.zeros(shape), *values[3:], **numbers)
    with pytest.raises(TypeError, match="expected low_rank_weight in input's dtype"):
        flce.linear_cross_entropy_low_rank_with_grad(*values[:3], values[3].double(), *values[4:], **numbers)
    call.linear_weight.requires_grad_()
    with pytest.raises(NotImplementedError, match="linear_weight gets no gradient here; pass it detached"):
        flce.linear_cross_entropy_low_rank_with_grad(*values, **numbers)
