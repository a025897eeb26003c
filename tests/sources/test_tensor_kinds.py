"""Tensors that are not plain: accepted subclasses; quantized, sparse and nested ones that are refused by name."""

# N tokens, D hidden, V vocabulary

import re

import pytest
import torch
import torch.nn.functional as F
from reference_loss import error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import flce_ops

N, D, V = 6, 8, 16


class Quantized(torch.Tensor):
    """Like torchao's weights: packed integers with a floating-point dtype, whose dispatch supports F.linear and little
    else.
    """

    @staticmethod
    def __new__(cls, weight: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.packed = (weight / self.scale).round().to(torch.int8)

    def dequantize(self) -> torch.Tensor:
        return self.packed * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return F.linear(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # called by nn.Parameter and DTensor.from_local
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].dequantize())
        raise NotImplementedError(f"{cls.__name__} dispatch: {func}")


class OtherWayBack(Quantized):
    """Like torchao's NF4Tensor, whose `dequantize` belongs to something else."""

    def get_original_weight(self) -> torch.Tensor:
        return self.packed * self.scale


class Wrapper(torch.Tensor):
    """A subclass that passes every operator on to the tensor it wraps."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class Plain(torch.Tensor):
    pass


def plain():
    return torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,))


def divergence(input, linear_weight, target, linear_bias=None, **options):
    teacher = torch.randn(N, D), torch.randn(V, D)
    return flce_ops.linear_kl_div(input, linear_weight, *teacher, target=target, linear_bias=linear_bias, **options)


def of_teacher(input, linear_weight, target):
    student = torch.randn(N, D), torch.randn(V, D)
    return flce_ops.linear_kl_div(*student, input, linear_weight, target=target)


FUNCTIONS = {
    "linear_cross_entropy": flce_ops.linear_cross_entropy,
    "metrics": lambda *args: flce_ops.linear_cross_entropy(*args, return_metrics=True),
    "linear_log_probs": flce_ops.linear_log_probs,
    "linear_kl_div": divergence,
    "teacher of linear_kl_div": of_teacher,
}

SCALES = torch.full((V,), 0.1), torch.zeros(V, dtype=torch.int64)
# the kind of tensor, how to make it from a plain one, how the message describes it, and the method it advises
REFUSED = [
    ("quantized subclass", Quantized, "quantized one of type Quantized", "dequantize"),
    ("quantized parameter", lambda w: nn.Parameter(Quantized(w), requires_grad=False), "Quantized", "dequantize"),
    ("another way back", OtherWayBack, "OtherWayBack", "get_original_weight"),
    ("qint8", lambda w: torch.quantize_per_channel(w, *SCALES, 0, torch.qint8), "quantized", "dequantize"),
    ("COO", lambda w: w.to_sparse(), "torch.sparse_coo", "to_dense"),
    ("CSR", lambda w: w.to_sparse_csr(), "torch.sparse_csr", "to_dense"),
    ("CSC", lambda w: w.to_sparse_csc(), "torch.sparse_csc", "to_dense"),
    ("BSR", lambda w: w.to_sparse_bsr((2, 2)), "torch.sparse_bsr", "to_dense"),
    ("MKLDNN", lambda w: w.to_mkldnn(), "torch._mkldnn", "to_dense"),
]


@pytest.mark.filterwarnings("ignore:.*(quantize_per_channel|torch.ao|Sparse|quantized).*")
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("what, make, kind, way", REFUSED, ids=[case[0] for case in REFUSED])
def test_a_weight_that_is_not_dense_is_refused_with_the_way_back(what, make, kind, way, function, autocast):
    input, weight, target = plain()
    made = make(weight)
    before = flce_ops.last_path()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(
            TypeError, match=f"expected (linear|teacher)_weight to be a dense tensor, got .*{kind}"
        ) as caught,
    ):
        FUNCTIONS[function](input.requires_grad_("teacher" not in function), made, target)
    assert re.search(rf"pass (linear|teacher)_weight\.{way}\(\)$", str(caught.value))
    assert flce_ops.last_path() is before, "a kernel ran before the refusal"
    FUNCTIONS[function](input.detach(), getattr(made, way)(), target)  # the message's advice works


@pytest.mark.parametrize("module", ["head", "loss"])
def test_a_module_whose_weight_was_quantized_is_refused(module):
    input, weight, target = plain()
    owner = flce_ops.LinearCrossEntropyHead(D, V) if module == "head" else flce_ops.LinearCrossEntropyLoss(D, V)
    linear = owner if module == "head" else owner.linear
    linear.weight = nn.Parameter(Quantized(weight), requires_grad=False)
    with pytest.raises(TypeError, match=r"pass linear_weight\.dequantize\(\)"):
        owner(input, target)
    if module == "head":
        assert error(owner(input), F.linear(input, linear.weight.dequantize())) == 0.0  # logits, as before


OTHERS = {
    "linear_cross_entropy": ["input", "target", "linear_bias", "weight", "token_weight", "normalizer"],
    "linear_log_probs": ["input", "target", "linear_bias"],
    "linear_kl_div": ["input", "target", "linear_bias", "token_weight", "normalizer"],
}


@pytest.mark.parametrize("function, argument", [(name, other) for name, others in OTHERS.items() for other in others])
def test_any_other_argument_that_is_sparse_is_refused_by_name(function, argument):
    arguments = dict(zip(("input", "linear_weight", "target"), plain()))
    shapes = {"linear_bias": (V,), "weight": (V,), "token_weight": (N,), "normalizer": ()}
    if argument in shapes:
        arguments[argument] = torch.rand(shapes[argument]) + 1
    arguments[argument] = arguments[argument].to_sparse()
    with pytest.raises(TypeError, match=f"{function}: expected {argument} to be a dense tensor, got torch.sparse_coo"):
        FUNCTIONS[function](**arguments)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nested_tokens_are_refused_by_name(function, layout):
    input, weight, target = plain()
    nested = torch.nested.nested_tensor([input[:2], input[2:]], layout=layout)
    with pytest.raises(TypeError, match=r"expected (teacher_)?input to be a dense .* got a nested one; .*values\(\)"):
        FUNCTIONS[function](nested, weight, target)


@pytest.mark.parametrize("dtype, shape", [(torch.uint8, (V * D // 2, 1)), (torch.int8, (V, D))], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_packed_integers_are_called_the_storage_of_a_quantized_weight(function, dtype, shape):
    """bitsandbytes keeps 4-bit weights as uint8 of another shape. A message about that shape would mislead."""
    input, _, target = plain()
    with pytest.raises(
        TypeError, match=rf"_weight in a floating dtype, got {dtype}, the storage of a quantized weight"
    ):
        FUNCTIONS[function](input, torch.zeros(shape, dtype=dtype), target)


@pytest.mark.parametrize("argument", ["token_weight", "normalizer"])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_kl_div"])
def test_complex_factors_are_refused_rather_than_cut_to_their_real_part(function, argument):
    shape = (N,) if argument == "token_weight" else ()
    with pytest.raises(TypeError, match=f"{function}: expected {argument} to be real, got torch.complex64"):
        FUNCTIONS[function](*plain(), **{argument: torch.ones(shape, dtype=torch.complex64)})


MAKERS = {"Parameter": nn.Parameter, "Buffer": nn.Buffer, "Plain": lambda w: w.as_subclass(Plain), "Wrapper": Wrapper}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_subclasses_are_taken(function, make):
    input, weight, target = plain()

    def results(weight):
        torch.manual_seed(0)
        with torch.no_grad():
            found = FUNCTIONS[function](input, weight, target)
        return found if isinstance(found, torch.Tensor) else found[0]

    found, expected = results(make(weight)), results(weight)
    assert torch.equal(found.inner if isinstance(found, Wrapper) else found, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fake_tensors_are_taken(function):
    with FakeTensorMode():
        FUNCTIONS[function](*plain())
