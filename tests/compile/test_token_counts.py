"""Numbers of tokens that only the run of a graph knows, however a function came by them. No guard is on them."""

# N tokens, T of a sequence, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from test_compile import LOSSES_OF_TOKENS, compiled, tensors_of

import flce_ops
import flce_ops.ops.paths
from flce_ops import linear_cross_entropy, linear_kl_div, linear_policy_loss, linear_token_loss

N, T, D, V = 50, 5, 11, 31


@flce_ops.token_loss(name="test_token_counts.weighted_loss")
def weighted_loss(log_prob, advantage, numbers, gamma, *, lse):
    return -advantage * log_prob + numbers.sum() * log_prob.exp() ** gamma + 0.01 * lse**2


def two_classes(target):
    return torch.stack([target, torch.where(target < 0, target, (target + 1) % V)], -1)


def weights_of(target, a):
    return torch.stack([a, a], -1).abs().expand(*target.shape, 2)


def probabilities_of(y, w):
    return torch.softmax(y @ w.detach().T, -1)


def weighted_positions(x, w, t, a, y):
    heads, target = w[:, None].expand(-1, 2, -1), torch.stack([t, t], -1)
    return linear_cross_entropy(x, heads, target, token_weight=torch.stack([a, a], -1))


def policy(x, w, t, a, y, **options):
    y = y.detach()
    old, ref = y[..., 0], y[..., 1]
    return linear_policy_loss(x, w, t, a, old_log_probs=old, ref_log_probs=ref, beta=0.1, **options).loss


# of input, linear_weight, target, a number for each token, and the teacher's hidden states
OF_SEVERAL = {
    "token_weight": lambda x, w, t, a, y: linear_cross_entropy(x, w, t, token_weight=a),
    "learnt token_weight": lambda x, w, t, a, y: linear_cross_entropy(x, w, t, token_weight=y[..., 0], reduction="sum"),
    "target_weight": lambda x, w, t, a, y: linear_cross_entropy(x, w, two_classes(t), target_weight=weights_of(t, a)),
    "target_weight none": lambda x, w, t, a, y: linear_cross_entropy(
        x, w, two_classes(t), target_weight=weights_of(t, a), reduction="none"
    ),
    "class probabilities": lambda x, w, t, a, y: linear_cross_entropy(
        x, w, probabilities_of(y.detach(), w), token_weight=a
    ),
    "weighted positions": weighted_positions,
    "normalizer": lambda x, w, t, a, y: linear_cross_entropy(x, w, t, normalizer=x.shape[0] + a.shape[0]),
    "sparse": lambda x, w, t, a, y: linear_cross_entropy(x, w, t, gradient_threshold=0.01, gradient_mode="drop"),
    "head": lambda x, w, t, a, y: torch.func.functional_call(HEAD, {"weight": w}, (x, t), {"token_weight": a}),
    "token function": lambda x, w, t, a, y: linear_token_loss(x, w, t, weighted_loss, a, y.detach(), 2.0),
    "token function none": lambda x, w, t, a, y: linear_token_loss(
        x, w, t, weighted_loss, a, y.detach(), 2.0, reduction="none", token_weight=a
    ),
    "policy": policy,
    "policy none": lambda *args: policy(*args, reduction="none"),
    "teacher": lambda x, w, t, a, y: linear_kl_div(x, w, y.detach(), w.detach(), target=t, token_weight=a),
    "teacher_probs": lambda x, w, t, a, y: linear_kl_div(
        x, w, teacher_probs=probabilities_of(y.detach(), w), kind="nla", reduction="none", vocab_size=V - 2
    ),
    "columns of logits": lambda x, w, t, a, y: flce_ops.cross_entropy((x @ w.T)[..., :-1], t.clamp(max=V - 2)),
    "columns in place": lambda x, w, t, a, y: flce_ops.cross_entropy(
        (x @ w.T)[..., :-1], t.clamp(max=V - 2), inplace_backward=True, token_weight=a
    ),
}
SHIFTED = {
    "shift": lambda x, w, t, a, y: linear_cross_entropy(x, w, t, shift=True),
    "shift log_probs": lambda x, w, t, a, y: flce_ops.linear_log_probs(x, w, t, shift=True),
    "shift teacher": lambda x, w, t, a, y: linear_kl_div(x, w, y.detach(), w.detach(), target=t, shift=True),
    "shift logits": lambda x, w, t, a, y: flce_ops.cross_entropy(x @ w.T, t, shift=True, inplace_backward=True),
    "sliced logits": lambda x, w, t, a, y: flce_ops.cross_entropy((x @ w.T)[:, :-1], t[:, 1:]),
    "transposed": lambda x, w, t, a, y: linear_cross_entropy(x.transpose(0, 1), w, t.T, token_weight=a.T),
}
HEAD = flce_ops.LinearCrossEntropyHead(D, V)


def of_three(function):
    return lambda x, w, t, a, y: function(x, w, t)


FUNCTIONS = {name: of_three(function) for name, function in LOSSES_OF_TOKENS.items()} | OF_SEVERAL


def of_masks(x, t, a, y):
    """Five numbers that the graph does not know to be equal."""
    return x[t != -100], t[t != -100], a[t != -100], y[t != -100]


def of_nonzero(x, t, a, y):
    places = torch.nonzero(t != -100).squeeze(1)
    return x.index_select(0, places), t[places], a.gather(0, places), y[torch.nonzero(t != -100)[:, 0]]


def of_packing(x, t, a, y):
    """As many as the last entry of cu_seqlens says."""
    lengths = (t.unflatten(0, (-1, T)) != -100).sum(1)
    one, other = (torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[-1].item() for _ in range(2))
    return x[:one], t[:other], a.narrow(0, 0, one), y[:one]


def of_parts(x, t, a, y):
    """Sums of two unknown numbers."""
    valid, positive = t != -100, a > 0

    def parts(tensor):
        return torch.cat([tensor[valid & positive], tensor[valid & ~positive]])

    return parts(x), parts(t), parts(a), parts(y)


def of_repeats(x, t, a, y):
    times = (t != -100).long() * 2
    return tuple(torch.repeat_interleave(tensor, times, dim=0) for tensor in (x, t, a, y))


def of_sequences(x, t, a, y):
    """Several sequences, of which some are kept: (n, T)."""
    x, t, a, y = (tensor.unflatten(0, (-1, T)) for tensor in (x, t, a, y))
    return x[t[:, 0] != -100], t[t[:, 0] != -100], a[t[:, 0] != -100], y[t[:, 0] != -100]


def of_longest(x, t, a, y):
    """Sequences that are cut to the longest, whose tokens are not side by side: (N / T, n)."""
    x, t, a, y = (tensor.unflatten(0, (-1, T)) for tensor in (x, t, a, y))
    one, other = ((t != -100).sum(1).amax().item() for _ in range(2))
    torch._check(one <= T)
    torch._check(other <= T)
    return x[:, :one], t[:, :other], a[:, :one], y[:, :other]


def of_both(x, t, a, y):
    first = t.unflatten(0, (-1, T))[:, 0] != -100
    return tuple(tensor[first] for tensor in of_longest(x, t, a, y))


WAYS = (of_nonzero, of_packing, of_parts, of_repeats, of_sequences, of_longest, of_both)
OF_EACH_WAY = ("target_weight", "token function", "policy", "teacher", "columns of logits", "metrics")


def inputs_of(every, dtype=torch.float32):
    made = make_inputs((N, D, V), dtype=dtype)
    made.target[:: every or N + 1] = -100
    a, y = torch.randn(N, dtype=torch.float32), torch.randn(N, D, dtype=dtype, requires_grad=True)
    return made.input, made.linear_weight, made.target, a, y


def selected(way, function):
    def of_selected(x, w, t, a, y):
        x, t, a, y = way(x, t, a, y)
        return function(x, w, t, a, y)

    return of_selected


def all_of(function, *args):
    """All that `function` returns, and the gradients of the sum of what has some."""
    leaves = [arg for arg in args if arg.requires_grad]
    found = tensors_of(function(*args))
    total = sum(value.sum() for value in found if value.requires_grad)
    return *(value.detach() for value in found), *torch.autograd.grad(total, leaves, allow_unused=True)


def check(function, cases, **options):
    graph, counter = compiled(function, **options)
    for args in cases:
        for found, expected in zip(all_of(graph, *args), all_of(function, *args), strict=True):
            if expected is not None:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert counter.count == 1


@pytest.fixture(autouse=True)
def sizes_and_numbers_of_data():
    config = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**config):
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_takes_the_tokens_of_several_equal_masks(name):
    """No token among them."""
    check(selected(of_masks, FUNCTIONS[name]), [inputs_of(every) for every in (3, 1)], dynamic=True)


@pytest.mark.parametrize(
    ("name", "way"),
    [("policy", way) for way in WAYS] + [(name, WAYS[0]) for name in OF_EACH_WAY if name != "policy"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_number_of_tokens_may_come_from_anywhere(name, way):
    check(selected(way, FUNCTIONS[name]), [inputs_of(every) for every in (3, 1)])


@pytest.mark.parametrize("way", [of_sequences, of_longest, of_both], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", SHIFTED)
def test_sequences_of_unknown_number_and_length_are_shifted_and_sliced(name, way):
    check(selected(way, SHIFTED[name]), [inputs_of(every) for every in (3, 4)])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["none", "topk", "policy none", "target_weight", "columns of logits"])
def test_marked_tensors_compile_for_any_number_of_tokens(name, backend):
    """Inductor folds constants, and asks whether a constant of as many entries as there are tokens is contiguous."""
    marked, other = inputs_of(0), [tensor.detach() for tensor in inputs_of(0)]
    for place in (0, 2, 3, 4):
        torch._dynamo.decorators.mark_unbacked(marked[place], 0)
        other[place] = other[place][:7]
    other = [tensor.requires_grad_(of.requires_grad) for tensor, of in zip(other, marked)]
    check(FUNCTIONS[name], [marked, other], backend=backend)


@pytest.mark.parametrize("name", ["mean", "token_weight", "target_weight", "policy", "token function", "teacher"])
def test_numbers_of_tokens_that_differ_are_refused_when_the_graph_runs(name):
    """Each argument of tokens in turn comes from another mask."""
    arguments = (0, 1) if name == "mean" else (1, 3) if name == "teacher" else (0, 1, 2)
    for place in arguments:

        def of_other_mask(x, t, a, y, place=place):
            return [tensor[t > 3] if here == place else tensor[t > 10] for here, tensor in enumerate((x, t, a, y))]

        graph, _ = compiled(selected(of_other_mask, FUNCTIONS[name]))
        with pytest.raises(RuntimeError, match="expected .* for as many tokens as the input has|Eq.u"):
            graph(*inputs_of(0))


def test_the_argument_whose_number_of_tokens_differs_is_named():
    def of_other_mask(x, w, t, a, y):
        return policy(x[t > 3], w, t[t > 3], a[t > 10], y[t > 3])

    with pytest.raises(RuntimeError, match="linear_policy_loss: expected advantages for as many tokens as the input"):
        compiled(of_other_mask)[0](*inputs_of(0))


def test_shapes_that_never_fit_are_refused_by_name_beside_an_unknown_number_of_tokens():
    def of_indices(x, w, t, a, y):
        return linear_cross_entropy(x[t > 3], w, two_classes(t[t > 10]))

    def of_logits(x, w, t, a, y):
        return flce_ops.cross_entropy(x[t > 3] @ w.T, two_classes(t[t > 10]))

    for function in (of_indices, of_logits):
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="expected target of shape"):
            compiled(function)[0](*inputs_of(0))


@pytest.mark.parametrize("name", ["mean", "none", "target_weight", "token function none", "policy", "teacher"])
def test_the_paths_of_a_gpu_have_no_guard_either(name, monkeypatch):
    """Which path a loss takes, and how many logits it saves, is decided while a graph is made."""
    facts = flce_ops.ops.paths.loss_facts

    def of_gpu(*args, **known):
        return facts(*args, **known)._replace(device="cuda")

    monkeypatch.setattr("flce_ops.ops.paths.loss_facts", of_gpu)
    for dtype in (torch.float16, torch.bfloat16):
        graph, _ = compiled(selected(of_masks, FUNCTIONS[name]))
        assert all(value is None or value.isfinite().all() for value in all_of(graph, *inputs_of(3, dtype)))


def test_nested_tensors_are_refused_by_name_and_their_values_are_taken():
    offsets = torch.tensor([0, 4, 9])
    x, target = (
        torch.nested.nested_tensor_from_jagged(values, offsets)
        for values in (torch.randn(9, D), torch.randint(V, (9,)))
    )
    w = torch.randn(V, D)
    graph, _ = compiled(linear_cross_entropy)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="expected input to be a dense tensor, got a nested"):
        graph(x, w, target)
    loss, _ = compiled(lambda x, w, target: linear_cross_entropy(x.values(), w, target.values()))
    torch.testing.assert_close(loss(x, w, target), linear_cross_entropy(x.values(), w, target.values()))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["mean", "target_weight", "token function", "policy none", "log_probs", "logits"])
def test_programs_take_the_tokens_of_several_equal_masks(name, strict):
    class Loss(torch.nn.Module):
        def forward(self, *args):
            return tensors_of(selected(of_masks, FUNCTIONS[name])(*args))

    args = [tensor.detach() for tensor in inputs_of(3)]
    program = torch.export.export(Loss(), tuple(args), strict=strict).module()
    for every in (3, 2, 1):
        args = [tensor.detach() for tensor in inputs_of(every)]
        torch.testing.assert_close(program(*args), Loss()(*args), rtol=1e-4, atol=1e-5, equal_nan=True)
