"""LinearCrossEntropyLoss and LinearCrossEntropyHead: parameters, state dicts, hooks, agreement with torch's modules."""

# N tokens, D hidden, V vocabulary

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs
from reference_loss import dense_logits, error, reference_loss
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import flce_ops
from flce_ops import LinearCrossEntropyHead, LinearCrossEntropyLoss

N, D, V = 20, 11, 31
SCORES = {"softcap": 5.0, "logit_scale": 0.7}


def example(device, **made):
    return make_inputs((N, D, V), device=device, dtype=torch.float64, requires_grad=False, **made)


MISTAKES = [
    ("smoothing above 1", {"label_smoothing": 2.0}, ValueError, r"label_smoothing in \[0, 1\], got 2.0"),
    ("threshold of 1", {"gradient_threshold": 1.0}, ValueError, r"gradient_threshold in \[0, 1\), got 1.0"),
    ("sparse weight", {"gradient_sparse": "weight"}, ValueError, "gradient_sparse to be one of both, input,"),
    ("zero softcap", {"softcap": 0.0}, ValueError, "softcap to be positive and finite, or None, got 0.0"),
    ("ignored float", {"ignore_index": -100.0}, TypeError, "ignore_index to be an integer or None, got -100.0"),
    ("reduction", {"reduction": "bogus"}, ValueError, "reduction to be one of none, mean, sum, got 'bogus'"),
    ("weight's length", {"weight": torch.rand(V + 1)}, ValueError, rf"weight of shape \({V},\).*got \({V + 1},\)"),
    ("weight's dtype", {"weight": torch.ones(V, dtype=torch.int64)}, TypeError, "weight in a floating dtype"),
]


@pytest.mark.parametrize("what, arguments, kind, words", MISTAKES, ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_refused_when_the_module_is_made(what, arguments, kind, words):
    with pytest.raises(kind, match=f"LinearCrossEntropyLoss: expected {words}"):
        LinearCrossEntropyLoss(D, V, **arguments)
    if not arguments.keys() & {"reduction", "weight"}:  # its forward takes these
        with pytest.raises(kind, match=f"LinearCrossEntropyHead: expected {words}"):
            LinearCrossEntropyHead(D, V, **arguments)


@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32])
def test_ignore_index_none_is_minus_100(device, target_dtype):
    """torch's default. Holds wherever ignore_index is an argument."""
    inputs = example(device, target_dtype=target_dtype)
    assert (inputs.target == -100).any()
    x, w, target = inputs.input, inputs.linear_weight, inputs.target

    def head(ignore_index):
        torch.manual_seed(0)
        made = LinearCrossEntropyHead(D, V, ignore_index=ignore_index, dtype=torch.float64, device=device)
        return made(x, target, return_metrics=True)

    def owner(ignore_index):
        torch.manual_seed(0)
        return LinearCrossEntropyLoss(D, V, ignore_index=ignore_index, dtype=torch.float64, device=device)(x, target)

    for call in (
        head,
        owner,
        lambda index: flce_ops.linear_cross_entropy(x, w, target, ignore_index=index),
        lambda index: flce_ops.linear_log_probs(x, w, target, ignore_index=index, entropy=True),
        lambda index: flce_ops.linear_kl_div(x, w, x.flip(0), w.flip(0), target=target, ignore_index=index),
    ):
        for found, expected in zip(tree_leaves(call(None)), tree_leaves(call(-100)), strict=True):
            assert found is None or torch.equal(found, expected)
    if hasattr(F, "linear_cross_entropy") and target_dtype == torch.int64:
        ours, theirs = (
            f(x, w, target, ignore_index=None) for f in (flce_ops.linear_cross_entropy, F.linear_cross_entropy)
        )
        assert error(ours, theirs) < 1e-13
    compiled = torch.compile(flce_ops.linear_cross_entropy, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, w, target, ignore_index=None), flce_ops.linear_cross_entropy(x, w, target))


@pytest.mark.parametrize("index", [2**32 - 100, 2**31, -(2**31) - 1])
def test_an_ignore_index_beyond_int32_does_not_wrap_around(device, index):
    """2^32 - 100 compared with int32 targets was -100, so these tokens were silently ignored."""
    inputs = example(device, target_dtype=torch.int32, ignored=0.0)
    for function, arguments in (
        (flce_ops.linear_cross_entropy, inputs.args[:3]),
        (flce_ops.linear_log_probs, inputs.args[:3]),
        (lambda *args, **options: flce_ops.linear_kl_div(*args[:2], *args[:2], target=args[2], **options), inputs.args),
    ):
        with pytest.raises(ValueError, match=rf"expected ignore_index in the range of .*int32, got {index}"):
            function(*arguments, ignore_index=index)
        wide = (*arguments[:2], arguments[2].long(), *arguments[3:])
        function(*wide, ignore_index=index)


@pytest.mark.parametrize("owner", [LinearCrossEntropyLoss, LinearCrossEntropyHead])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_modules_pass_every_option_on(device, reduction, owner):
    inputs = example(device, weight=True, token_weight=True, normalizer=reduction != "none", ignore_index=3)
    options = {"ignore_index": 3, "label_smoothing": 0.1, "z_loss": 0.05, **SCORES}
    of_loss = {"reduction": reduction, "weight": inputs.weight}
    per_call = {"token_weight": inputs.token_weight, "normalizer": inputs.normalizer}
    of_module = owner is LinearCrossEntropyLoss  # the head's forward takes these
    module = owner(D, V, bias=True, dtype=torch.float64, device=device, **options, **(of_loss if of_module else {}))
    found = module(inputs.input, inputs.target, **per_call, **({} if of_module else of_loss))
    weight, bias = module.parameters()
    assert weight.shape == (V, D) and bias.shape == (V,)
    assert (
        error(found, reference_loss(inputs.input, weight, inputs.target, bias, **of_loss, **per_call, **options))
        < 1e-13
    )


def test_class_weight_moves_with_the_module(device):
    module = LinearCrossEntropyLoss(D, V, weight=torch.rand(V)).to(device, torch.float64)
    assert module.weight.dtype == torch.float64 and module.weight.device.type == device
    assert not module.weight.requires_grad


@pytest.mark.parametrize("bias", [False, True])
def test_head_gives_logits_or_loss(device, bias):
    """Accuracy needs logits; the same module gives them, scaled and capped."""
    inputs = example(device)
    head = LinearCrossEntropyHead(D, V, bias, dtype=torch.float64, device=device, **SCORES)
    logits = head(inputs.input)
    assert error(logits, dense_logits(inputs.input, head.weight, head.bias, **SCORES)) < 1e-14
    assert error(head(inputs.input, inputs.target), F.cross_entropy(logits, inputs.target)) < 1e-13
    with pytest.raises(TypeError, match="LinearCrossEntropyHead: return_metrics is of a loss, which needs a target"):
        head(inputs.input, None, return_metrics=True)


@pytest.mark.parametrize("owner", [LinearCrossEntropyLoss, LinearCrossEntropyHead])
def test_a_sparse_gradient_has_its_options_from_the_module_and_its_seed_from_the_call(device, owner):
    inputs = example(device)
    sparse = {"gradient_threshold": 2.0**-4, "gradient_sparse": "linear_weight"}
    module = owner(D, V, dtype=torch.float64, device=device, **sparse)
    assert "gradient_threshold=0.0625, gradient_mode=unbiased, gradient_sparse=linear_weight" in repr(module)
    assert "gradient_" not in repr(owner(D, V))
    (weight,) = module.parameters()
    seed = torch.tensor(7, device=device)
    (found,) = torch.autograd.grad(module(inputs.input, inputs.target, gradient_seed=seed), weight)
    loss = flce_ops.linear_cross_entropy(inputs.input, weight, inputs.target, gradient_seed=seed, **sparse)
    assert torch.equal(found, torch.autograd.grad(loss, weight)[0])
    with pytest.raises(ValueError, match="expects gradient_seed"):
        module(inputs.input, inputs.target)
    options = {"gradient_threshold": 2.0**-4, "gradient_mode": "drop"}
    module = owner(300, V, dtype=torch.float64, device=device, **options)
    input, order = torch.randn(40, 300, dtype=torch.float64, device=device), torch.randperm(V, device=device)
    target = torch.randint(0, V, (40,), device=device)
    (weight,) = module.parameters()
    (found,) = torch.autograd.grad(module(input, target, gradient_class_order=order), weight)
    loss = flce_ops.linear_cross_entropy(input, weight, target, gradient_class_order=order, **options)
    assert torch.equal(found, torch.autograd.grad(loss, weight)[0])
    with pytest.raises(ValueError, match="expected gradient_class_order to be a permutation"):
        module(input, target, gradient_class_order=order[1:])


@pytest.mark.parametrize("bias", [False, True])
def test_head_exchanges_state_dicts_with_linear(device, bias):
    linear = nn.Linear(D, V, bias, device=device)
    head = LinearCrossEntropyHead(D, V, bias, device=device)
    assert isinstance(head, nn.Linear)
    assert list(head.state_dict()) == list(linear.state_dict())
    head.load_state_dict(linear.state_dict())
    hidden = torch.randn(3, D, device=device)
    assert torch.equal(head(hidden), linear(hidden))
    linear.load_state_dict(head.state_dict())


@pytest.mark.parametrize("module", [LinearCrossEntropyLoss(4, 5, bias=True), LinearCrossEntropyHead(4, 5, softcap=3.0)])
def test_modules_are_copied_pickled_and_printed(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    hidden, target = torch.randn(6, 4), torch.randint(5, (6,))
    expected = module(hidden, target)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(hidden, target), expected)
    assert type(module).__name__ in repr(module)


def test_repr_names_what_differs_from_a_plain_linear():
    """If a softcap was forgotten, printing the model should show it."""
    text = repr(LinearCrossEntropyHead(4, 5, softcap=30.0, logit_scale=0.25))
    assert "in_features=4" in text and "softcap=30.0" in text and "logit_scale=0.25" in text
    text = repr(LinearCrossEntropyLoss(4, 5, softcap=30.0, logit_scale=0.25))
    assert "softcap=30.0" in text and "logit_scale=0.25" in text


def test_loss_runs_inside_the_forward_of_the_module_that_owns_the_weight(device):
    """ZeRO-3 and FSDP gather the weight in hooks around that forward."""
    inputs = example(device)
    for module, owner in (
        (head := LinearCrossEntropyHead(D, V, dtype=torch.float64, device=device), head),
        (loss := LinearCrossEntropyLoss(D, V, dtype=torch.float64, device=device), loss),
    ):
        seen = []
        full = next(owner.parameters()).detach().clone()
        weight = next(owner.parameters())
        weight.data.zero_()  # "sharded away" outside forward

        def gather(*_, weight=weight, full=full, seen=seen):
            weight.data.copy_(full)
            seen.append("gathered")

        def scatter(*_, weight=weight, seen=seen):
            seen.append("freed")

        owner.register_forward_pre_hook(gather)
        owner.register_forward_hook(scatter)
        assert error(module(inputs.input, inputs.target), reference_loss(inputs.input, full, inputs.target)) < 1e-13
        assert seen == ["gathered", "freed"]


class LowRank(nn.Module):
    def __init__(self, V, D, rank, **kwargs):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, D, **kwargs))
        self.up = nn.Parameter(torch.randn(V, rank, **kwargs))

    def forward(self, weight):
        return weight + self.up @ self.down


@pytest.mark.parametrize("owner", ["head", "loss"])
def test_adapter_on_the_head_is_not_ignored(device, owner):
    """LoRA as a parametrization of the frozen weight: the adapters get their gradient."""
    inputs = example(device)
    kwargs = {"dtype": torch.float64, "device": device}
    module = LinearCrossEntropyHead(D, V, **kwargs) if owner == "head" else LinearCrossEntropyLoss(D, V, **kwargs)
    linear = module if owner == "head" else module.linear
    base = linear.weight.detach().clone()
    linear.weight.requires_grad_(False)
    adapter = LowRank(V, D, 2, **kwargs)
    parametrize.register_parametrization(linear, "weight", adapter)
    found = module(inputs.input, inputs.target)
    expected = reference_loss(inputs.input, base + adapter.up @ adapter.down, inputs.target)
    assert error(found, expected) < 1e-13
    exact = torch.autograd.grad(expected, (adapter.up, adapter.down))
    found.backward()
    assert error(adapter.up.grad, exact[0]) < 1e-12
    assert error(adapter.down.grad, exact[1]) < 1e-12
    assert linear.parametrizations.weight.original.grad is None


def test_modules_can_be_made_on_the_meta_device():
    head = LinearCrossEntropyHead(D, V, device="meta")
    loss = head(torch.empty(N, D, device="meta"), torch.empty(N, dtype=torch.int64, device="meta"))
    assert loss.device.type == "meta" and loss.shape == ()
    loss.backward()
    assert head.weight.grad.shape == (V, D)
