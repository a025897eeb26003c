"""torch.compile(fullgraph=True): one graph for any number of tokens, no warnings, the numbers of eager mode."""

# B batch, T sequence, N tokens, D hidden, V vocabulary

import contextlib
import warnings

import pytest
import torch
from counting_backend import CountingBackend
from inputs import make_inputs
from reference_loss import error, plain_loss, run, run_reference
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

import flce_ops
from flce_ops.entry.bodies import NAMES

LENGTHS = (7, 8, 31, 64, 100, 129, 333)  # odd and even; with the workspace below, one chunk and several
WORKSPACE = 2**15
OPTIONS = {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1}


@contextlib.contextmanager
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # these warnings of torch concern the settings of this test suite, and Python 3.13.0
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        warnings.filterwarnings("ignore", message="Guards may run slower")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


class GraphCounter(CompileCounterWithBackend):
    @property
    def count(self) -> int:
        """The number of graphs that compute something. Dynamo may compile an empty one before it restarts."""
        return sum(any(node.op == "call_function" for node in graph.graph.nodes) for graph in self.graphs)


def compiled(function, backend="aot_eager", **options):
    counter = GraphCounter(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
def test_compiled_is_eager(device, everything, reduction, dtype):
    made = {"bias": True, "weight": True, "token_weight": True, "normalizer": reduction != "none"} if everything else {}
    options = OPTIONS if everything else {}
    inputs = make_inputs((50, 11, 31), device=device, dtype=dtype, **made)
    cotangent = torch.randn(50, device=device) if reduction == "none" else torch.tensor(-3.0, device=device)
    loss, counter = compiled(flce_ops.linear_cross_entropy)
    with warnings_are_errors():
        found = run(loss, inputs, cotangent, reduction=reduction, **options)
    expected = run(flce_ops.linear_cross_entropy, inputs, cotangent, reduction=reduction, **options)
    assert counter.count == 1
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert error(found[name], expected[name]) < {8: 1e-14, 4: 1e-6, 2: 8e-3}[found[name].itemsize], name


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_one_graph_for_any_number_of_tokens_through_inductor(device, reduction):
    """For comparison, torch 2.13's own chunked loss makes 7 graphs for 7 lengths."""
    backend = CountingBackend()
    loss = torch.compile(flce_ops.linear_cross_entropy, backend=backend, fullgraph=True)
    with warnings_are_errors(), flce_ops.workspace(WORKSPACE):
        chunks = set()
        for length in LENGTHS:
            inputs = make_inputs((length, 11, 61), device=device, dtype=torch.float64, bias=True)
            expected = run_reference(inputs, reduction=reduction)
            torch._dynamo.mark_dynamic(inputs.input, 0)
            torch._dynamo.mark_dynamic(inputs.target, 0)
            value = loss(*inputs.args, reduction=reduction)
            value.sum().backward()
            chunks.add(flce_ops.last_path().chunks)
            assert error(value, expected["loss"]) < 1e-14
            for name, leaf in inputs.leaves.items():
                assert error(leaf.grad, expected[name]) < 1e-14, (name, length)
    assert backend.graphs == 1
    assert 1 in chunks and len(chunks) > 2, f"the lengths do not differ in chunks: {chunks}"


@pytest.mark.parametrize("how, graphs", [("dynamic", 1), ("automatic", 2)])
def test_graphs_without_marks(device, how, graphs):
    """Automatic dynamic shapes: the first length is static, the second makes it dynamic, and the others reuse that
    graph.
    """
    loss, counter = compiled(flce_ops.linear_cross_entropy, dynamic=True if how == "dynamic" else None)
    for length in LENGTHS:
        inputs = make_inputs((length, 11, 31), device=device)
        expected = run_reference(inputs)
        found = run(loss, inputs)
        for name in expected:
            assert error(found[name], expected[name]) < 2e-6, (name, length)
    assert counter.count == graphs


def test_one_graph_for_any_batch_and_sequence_length(device):
    loss, counter = compiled(flce_ops.linear_cross_entropy)
    for B, T in ((2, 5), (3, 7), (4, 16), (7, 3)):
        inputs = make_inputs((B * T, 11, 31), device=device)
        input = inputs.input.detach().view(B, T, 11).requires_grad_()
        target = inputs.target.view(B, T)
        for tensor in (input, target):
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
        loss(input, *[inputs.linear_weight, target]).backward()
        exact = run_reference(inputs)["input"]
        assert error(input.grad.view(-1, 11), exact) < 2e-6
    assert counter.count == 1


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_degenerate_lengths_compile(device, reduction, length):
    """Dynamo always specialises on 0 and 1. Their graphs must be right, too."""
    inputs = make_inputs((length, 11, 31), device=device)
    expected = run_reference(inputs, reduction=reduction)
    plain = run(plain_loss, inputs, reduction=reduction)
    found = run(compiled(flce_ops.linear_cross_entropy)[0], inputs, reduction=reduction)
    for name, exact in expected.items():
        rounding = (plain[name] - exact).norm()
        # 0.3: if the model is sure of its only token, the loss and the gradients are near 0, their errors are not
        assert (found[name] - exact).norm() <= 3 * rounding + 1e-6 * (exact.norm() + 0.3), name


def test_one_compiled_function_serves_training_and_evaluation(device):
    inputs = make_inputs(device=device)
    loss, _ = compiled(flce_ops.linear_cross_entropy)
    with torch.no_grad():
        evaluation = loss(*inputs.args)
    training = loss(*inputs.args)
    assert training.requires_grad and not evaluation.requires_grad
    training.backward()
    assert error(inputs.input.grad, run_reference(inputs)["input"]) < 1e-6
    assert error(training, evaluation.double()) < 1e-6


class TinyModel(nn.Module):
    def __init__(self, V=61, D=16, **options):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.mix = nn.Linear(D, D)
        self.head = flce_ops.LinearCrossEntropyHead(D, V, bias=True, **options)

    def forward(self, tokens, target):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))), target)


@pytest.mark.parametrize("tied", [False, True])
def test_compiled_model_trains_as_in_eager(device, tied):
    """Three steps of a whole model through Inductor have the loss curve of eager mode."""
    tokens = torch.randint(61, (4, 9), device=device)
    curves = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = TinyModel(softcap=5.0).to(device)
        if tied:
            model.head.weight = model.embedding.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of = torch.compile(model, fullgraph=True) if compile else model
        curve = []
        with warnings_are_errors():
            for _ in range(3):
                loss = loss_of(tokens, tokens.roll(-1, 1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
        curves.append(curve)
    assert curves[0][0] > curves[0][-1] + 0.1
    assert error(torch.tensor(curves[1]), torch.tensor(curves[0])) < 1e-6


def test_out_of_range_target_is_noticed_in_compiled_code():
    """On CUDA this is a device-side assert: tests/kernels/test_cuda_contract.py tests that."""
    inputs = make_inputs()
    inputs.target[5] = 10**6
    with pytest.raises(IndexError, match="target"):
        compiled(flce_ops.linear_cross_entropy)[0](*inputs.args)


def test_bad_shapes_are_refused_while_tracing(device):
    inputs = make_inputs(device=device)
    with pytest.raises(Exception, match="linear_weight.*507|507.*linear_weight"):
        compiled(flce_ops.linear_cross_entropy)[0](inputs.input, inputs.linear_weight[:, :-1], inputs.target)


def test_workspace_set_after_compilation_is_obeyed(device):
    """The kernel decides on chunks when it runs; the graph does not fix them."""
    inputs = make_inputs((700, 11, 61), device=device)  # a chunk has at least 64 rows, 128 on CUDA
    loss, counter = compiled(flce_ops.linear_cross_entropy)
    run(loss, inputs)
    assert flce_ops.last_path().chunks == 1
    with flce_ops.workspace(2**12):
        run(loss, inputs)
        assert flce_ops.last_path().chunks > 4
    assert counter.count == 1


def test_normalizer_as_a_tensor_does_not_recompile(device):
    """The number of target tokens changes in every step. As a 0-d tensor it is data, not a constant of the graph."""
    loss, counter = compiled(flce_ops.linear_cross_entropy)
    inputs = make_inputs(device=device)
    total = run_reference(inputs, reduction="sum")["loss"]
    for count in (10, 20, 30):
        found = loss(*inputs.args, normalizer=torch.tensor(count, device=device))
        assert error(found, total / count) < 1e-6
    assert counter.count == 1


@pytest.mark.parametrize("name", ["normalizer", "softcap", "logit_scale", "temperature", "z_loss"])
def test_a_number_that_changes_compiles_twice_and_one_beyond_float32_is_refused(device, name):
    """The second value makes the number an input of the graph, of which the range is a guard."""
    inputs = make_inputs(device=device)
    torch.compiler.reset()
    loss, counter = compiled(lambda number: flce_ops.linear_cross_entropy(*inputs.args, **{name: number}))
    for number in (2.0, 3.0, 5.0, 1e6):
        torch.testing.assert_close(loss(number), flce_ops.linear_cross_entropy(*inputs.args, **{name: number}))
    assert counter.count == 2
    with pytest.raises(Exception, match=f"expected {name} (in the range of torch.float32|to be)|BUILD_STRING"):
        loss(1e39)
    assert counter.count == 2
    loss(7.0)
    assert counter.count == 2


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_compiled_double_backward_is_refused(device, reduction):
    """AOTAutograd has no second derivatives. It refuses them if the backward graph saved an input that needs a
    gradient, as for F.cross_entropy(F.linear(...)). If only gradients were saved, a term would be missing silently.
    """
    inputs = make_inputs((6, 5, 7), device=device, dtype=torch.float64)
    leaves = (inputs.input, inputs.linear_weight)
    loss = compiled(flce_ops.linear_cross_entropy)[0](*inputs.args, reduction=reduction).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss + sum(g.square().sum() for g in first), leaves)


def compacted(loss):
    """`loss` of the tokens that a mask leaves. How many there are depends on data."""

    def of_masked(input, linear_weight, target):
        valid = target != -100
        return loss(input[valid], linear_weight, target[valid])

    return of_masked


def kl_div(input, linear_weight, target, /, **options):
    teacher = input.detach().flip(0), linear_weight.detach().flip(0)
    return flce_ops.linear_kl_div(input, linear_weight, *teacher, **options)


def policy(input, linear_weight, target, **options):
    tokens = {name: input.detach()[:, 0] for name in ("advantages", "old_log_probs", "ref_log_probs")}
    return flce_ops.linear_policy_loss(input, linear_weight, target, beta=0.1, **tokens, **options).loss


def topk(function):
    def of_two_classes(input, linear_weight, target, **options):
        return function(input, linear_weight, torch.stack([target, (target + 1) % 31], -1), **options)

    return of_two_classes


@topk
def soft_targets(input, linear_weight, target, **options):
    target_weight = torch.full_like(target, 0.25, dtype=torch.float32)
    return flce_ops.linear_cross_entropy(input, linear_weight, target, target_weight=target_weight, **options)


def class_probabilities(input, linear_weight, target):
    probabilities = torch.eye(31, device=target.device)[target.clamp(min=0)] / 2
    return flce_ops.linear_cross_entropy(input, linear_weight, probabilities, label_smoothing=0.25)


def positions(input, linear_weight, target):
    heads = linear_weight[:, None].expand(-1, 2, -1)
    return flce_ops.linear_cross_entropy(input, heads, torch.stack([target, target], -1), reduction="none")


LOSSES_OF_TOKENS = {
    "mean": flce_ops.linear_cross_entropy,
    "none": lambda *args: flce_ops.linear_cross_entropy(*args, reduction="none"),
    "options": lambda *args: flce_ops.linear_cross_entropy(*args, **OPTIONS, reduction="none"),
    "weighted": lambda input, *args: flce_ops.linear_cross_entropy(input, *args, token_weight=input[:, 0]),
    "batched": lambda x, w, t: flce_ops.linear_cross_entropy(x[None], w, t[None], reduction="none"),
    "positions": positions,
    "class probabilities": class_probabilities,
    "soft targets": soft_targets,
    "soft targets none": lambda *args: soft_targets(*args, reduction="none"),
    "accuracy": lambda *args: flce_ops.linear_cross_entropy(*args, return_metrics=True),
    "metrics": lambda *args: flce_ops.linear_cross_entropy(*args, z_loss=0.1, return_metrics=NAMES),
    "metrics none": lambda *args: flce_ops.linear_cross_entropy(*args, return_metrics=NAMES, reduction="none"),
    "log_probs": lambda *args: flce_ops.linear_log_probs(*args, entropy=True, argmax=True, tail=True),
    "topk": lambda *args: topk(flce_ops.linear_log_probs)(*args, tail=True),
    "policy": policy,
    "policy none": lambda *args: policy(*args, reduction="none"),
    "kl_div": kl_div,
    "kl_div none": lambda *args: kl_div(*args, target=args[2], kind="jsd", reduction="none"),
    "logits": lambda x, w, t: flce_ops.cross_entropy(x @ w.T, t),
    "logits none": lambda x, w, t: flce_ops.cross_entropy(x @ w.T, t, reduction="none"),
    "logits in place": lambda x, w, t: flce_ops.cross_entropy(x @ w.T, t, inplace_backward=True),
}


def ignored_inputs(dtype=torch.float32, every=3):
    inputs = make_inputs((50, 11, 31), dtype=dtype)
    inputs.target[::every] = -100
    return inputs.input, inputs.linear_weight, inputs.target


def tensors_of(found):
    return [value for value in tree_leaves(found) if value is not None]


def value_and_gradients(function, input, linear_weight, target):
    """All that `function` returns, and the gradients of the sum of what has some."""
    found = tensors_of(function(input, linear_weight, target))
    input.grad = linear_weight.grad = None
    sum(value.sum() for value in found if value.requires_grad).backward()
    return *(value.detach() for value in found), input.grad, linear_weight.grad


@pytest.fixture
def sizes_and_numbers_of_data():
    config = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**config):
        yield


@pytest.mark.parametrize("name", LOSSES_OF_TOKENS)
def test_tokens_that_a_mask_leaves_compile_whatever_their_number_is(sizes_and_numbers_of_data, name):
    """No token among them. Guards on the number raise an error."""
    function = compacted(LOSSES_OF_TOKENS[name])
    loss, counter = compiled(function)
    for every in (3, 2, 1):
        args = ignored_inputs(every=every)
        for found, expected in zip(value_and_gradients(loss, *args), value_and_gradients(function, *args)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert counter.count == 1


@pytest.mark.parametrize("name", ["mean", "none", "log_probs", "policy", "kl_div", "logits"])
def test_tokens_that_a_mask_leaves_compile_in_float16(sizes_and_numbers_of_data, name):
    """float16 makes no gradients in forward, and saves logits."""
    function, args = compacted(LOSSES_OF_TOKENS[name]), ignored_inputs(torch.float16)
    loss, _ = compiled(function)
    for found, expected in zip(value_and_gradients(loss, *args), value_and_gradients(function, *args)):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["mean", "none", "topk", "policy", "kl_div", "logits in place"])
def test_input_and_target_may_come_from_equal_masks(sizes_and_numbers_of_data, name):
    """The graph does not know that two masks are equal. It asserts when it runs that they leave as many tokens."""

    def of_masks(input, linear_weight, target):
        return LOSSES_OF_TOKENS[name](input[target != -100], linear_weight, target[target != -100])

    args = ignored_inputs()
    loss, _ = compiled(of_masks)
    for found, expected in zip(value_and_gradients(loss, *args), value_and_gradients(of_masks, *args)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_graph_whose_masks_leave_different_numbers_of_tokens_raises(sizes_and_numbers_of_data):
    loss, _ = compiled(lambda x, w, t: flce_ops.linear_cross_entropy(x[t > 3], w, t[t > 10]))
    with pytest.raises(RuntimeError, match="expected target for as many tokens"):
        loss(*ignored_inputs())


@pytest.mark.parametrize("name", ["mean", "none", "log_probs", "policy", "kl_div none", "logits in place"])
def test_tokens_marked_unbacked_compile(name):
    input, linear_weight, target = ignored_inputs()
    args = input.detach().requires_grad_(), linear_weight, target.clamp(min=0)
    for tensor in (args[0], args[2]):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    function = LOSSES_OF_TOKENS[name]
    loss, _ = compiled(function)
    for found, expected in zip(value_and_gradients(loss, *args), value_and_gradients(function, *args)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def count_of(target):
    return (target != -100).sum().item()


def mean_of(input):
    return input.detach().abs().mean().item()


def of_logits_with_numbers(x, w, t):
    return flce_ops.cross_entropy(x @ w.T, t, normalizer=count_of(t), temperature=mean_of(x), z_loss=mean_of(x))


NUMBERS_OF_DATA = {
    "normalizer": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, normalizer=count_of(t)),
    "float normalizer": lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, normalizer=mean_of(x)),
    "integers": lambda x, w, t: flce_ops.linear_cross_entropy(
        x, w, t, temperature=count_of(t), logit_scale=count_of(t)
    ),
    "all": lambda x, w, t: flce_ops.linear_cross_entropy(
        x, w, t, temperature=mean_of(x), logit_scale=mean_of(x), softcap=5 * mean_of(x), z_loss=mean_of(x)
    ),
    "logits": of_logits_with_numbers,
    "policy": lambda x, w, t: policy(
        x, w, t, normalizer=count_of(t), temperature=mean_of(x), clip_low=mean_of(x), dual_clip=1 + mean_of(x)
    ),
    "kl_div": lambda x, w, t: kl_div(x, w, t, normalizer=count_of(t), temperature=mean_of(x), logit_scale=mean_of(x)),
}


@pytest.mark.parametrize("name", NUMBERS_OF_DATA)
def test_a_number_may_come_from_item_in_the_graph(sizes_and_numbers_of_data, name):
    function = NUMBERS_OF_DATA[name]
    loss, counter = compiled(function)
    for every in (3, 2):
        args = ignored_inputs(every=every)
        for found, expected in zip(value_and_gradients(loss, *args), value_and_gradients(function, *args)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert counter.count == 1


def test_a_number_of_data_outside_its_range_is_refused_when_the_graph_runs(sizes_and_numbers_of_data):
    loss, _ = compiled(lambda x, w, t, number: flce_ops.linear_cross_entropy(x, w, t, temperature=number.item()))
    loss(*ignored_inputs(), torch.tensor(2.0))
    with pytest.raises(RuntimeError, match="expected temperature to be positive and finite"):
        loss(*ignored_inputs(), torch.tensor(-1.0))


def test_a_number_that_chooses_a_formula_is_not_taken_from_data(sizes_and_numbers_of_data):
    smoothed, _ = compiled(lambda x, w, t: flce_ops.linear_cross_entropy(x, w, t, label_smoothing=mean_of(x)))
    mixed, _ = compiled(lambda x, w, t: kl_div(x, w, t, kind="jsd", beta=mean_of(x)))
    for loss, name in ((smoothed, "label_smoothing"), (mixed, "beta")):
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"{name} chooses a formula.*from .item"):
            loss(*ignored_inputs())
