"""A temperature of each token. tests/objectives/test_product.py has every cell of it in float64, sharded ones included.

Here: numbers that are all equal, what composes, what is refused; Triton's kernels are in
tests/kernels/test_triton_token_temperature.py.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_divergence import make_pair
from reference_loss import dense_logits, error
from reference_policy import make_policy
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import flce_ops

SHAPE = (13, 11, 31)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CAPS = [{}, {"softcap": 4.0, "logit_scale": 0.7}]


def temperatures(count: int = SHAPE[0]) -> torch.Tensor:
    return 0.3 + 2.0 * torch.rand(count)


def calls(dtype) -> dict:
    """A function of a temperature and options, and its leaves, by name."""
    made, policy = make_inputs(SHAPE, dtype=dtype), make_policy(SHAPE, dtype=dtype)
    pair = make_pair((*SHAPE[:2], 7, SHAPE[2]), dtype=dtype)
    x, w, y = made.input, made.linear_weight, made.target
    logits = torch.randn(SHAPE[0], SHAPE[2], dtype=dtype).requires_grad_()
    topk = torch.stack([y, y.clamp(min=0).flip(0)], 1)
    q = torch.rand(SHAPE[0], SHAPE[2]).softmax(1)
    of_policy = [policy[operand].requires_grad_() for operand in ("input", "linear_weight")]

    def log_probs(**options):
        found = flce_ops.linear_log_probs(x, w, y, entropy=True, **options)
        return found.log_probs.sum() + found.lse.sum() + found.entropy.sum()

    of_head = [x, w]
    return {
        "mean": (lambda **o: flce_ops.linear_cross_entropy(x, w, y, z_loss=0.01, label_smoothing=0.1, **o), of_head),
        "none": (lambda **o: flce_ops.linear_cross_entropy(x, w, y, reduction="none", **o).sum(), of_head),
        "soft": (lambda **o: flce_ops.linear_cross_entropy(x, w, topk, target_weight=topk.abs() / 99, **o), of_head),
        "probabilities": (lambda **o: flce_ops.linear_cross_entropy(x, w, q, **o), of_head),
        "log_probs": (log_probs, of_head),
        "policy": (lambda **o: flce_ops.linear_policy_loss(**policy, **o).loss, of_policy),
        "kl": (lambda **o: flce_ops.linear_kl_div(**pair, kind="reverse", **o), [pair["input"], pair["linear_weight"]]),
        "logits": (lambda **o: flce_ops.cross_entropy(logits, y, **o), [logits]),
    }  # fmt: skip


NAMES = ["mean", "none", "soft", "probabilities", "log_probs", "policy", "kl", "logits"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CAPS, ids=["plain", "capped"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_temperatures_have_the_bits_of_one_number(name, options, dtype):
    function, leaves = calls(dtype)[name]
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    found = []
    for temperature in (
        0.7,
        torch.full(SHAPE[:1], 0.7, dtype=accumulate),
        torch.full(SHAPE[:1], 0.7, dtype=torch.float64),
    ):
        loss = function(temperature=temperature, **options)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for others in found[1:]:
        assert all(torch.equal(ours, expected) for ours, expected in zip(others, found[0], strict=True))


def test_hidden_states_are_not_rounded():
    """Divided by the temperature in bfloat16, as x / T, they would be off by 2^-9."""
    made = make_inputs((257, 64, 509), dtype=torch.bfloat16, requires_grad=False)
    x, w, T = made.input, made.linear_weight, temperatures(257)
    ours = flce_ops.linear_log_probs(x.float(), w.float(), made.target, temperature=T)
    exact = dense_logits(x.double(), w.double(), temperature=T.double()).log_softmax(-1)
    valid = made.target >= 0
    exact = exact.gather(1, made.target.clamp(min=0)[:, None]).squeeze(1)[valid]
    assert error(ours.log_probs[valid], exact) < 1e-6
    half = flce_ops.linear_log_probs(x, w, made.target, temperature=T).log_probs[valid]
    plain = dense_logits(x, w, temperature=T).float().log_softmax(-1)
    plain = plain.gather(1, made.target.clamp(min=0)[:, None]).squeeze(1)[valid]
    assert error(half, exact) <= 1.05 * error(plain, exact) + 1e-6


@pytest.mark.parametrize("name", ["mean", "none", "soft", "log_probs", "policy", "kl", "logits"])
@pytest.mark.parametrize("held", [torch.nan, 0.0, -1.0, torch.inf])
def test_temperatures_of_ignored_tokens_may_be_anything(name, held):
    function, leaves = calls(torch.float32)[name]
    ignored = 0  # by make_inputs
    T = temperatures()
    found = []
    for value in (1.0, held):
        T[ignored] = value
        if name == "soft":  # whose other class counts there
            T[ignored] = 1.0
        loss = function(temperature=T)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert all(torch.equal(ours, expected) for ours, expected in zip(*found, strict=True))
    assert all(result.isfinite().all() for result in found[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, -0.5, torch.inf, torch.nan])
def test_other_numbers_are_refused(name, value):
    function, _ = calls(torch.float32)[name]
    T = temperatures()
    T[1] = value  # a token that counts
    with pytest.raises(ValueError, match="expected temperature to be positive and finite"):
        function(temperature=T)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_gradients_are_refused_by_name(name):
    function, _ = calls(torch.float32)[name]
    with pytest.raises(ValueError, match=r"expected temperature of shape \(13,\), a number, or one number per token"):
        function(temperature=torch.ones(3))
    with pytest.raises(
        NotImplementedError, match="temperature of each token gets no gradient; pass temperature.detach"
    ):
        function(temperature=temperatures().requires_grad_())
    with pytest.raises(TypeError, match="expected temperature to be real"):
        function(temperature=torch.ones(13, dtype=torch.complex64))
    with torch.no_grad():
        function(temperature=temperatures().requires_grad_())


def test_a_tensor_of_no_dimension_stays_a_number_that_may_be_learnt():
    calls_of = calls(torch.float64)
    learnt = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    function, leaves = calls_of["mean"]
    loss, usual = function(temperature=learnt), function(temperature=0.7)
    torch.testing.assert_close(loss, usual)
    assert torch.autograd.grad(loss, learnt)[0] != 0
    for name in ("kl", "logits"):
        with pytest.raises(TypeError, match="expected temperature to be a number, got a tensor"):
            calls_of[name][0](temperature=learnt.detach())


def test_a_learnt_scale_beside_temperatures():
    made, T = make_inputs(SHAPE, dtype=torch.float64), temperatures().double()
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    ours = flce_ops.linear_cross_entropy(*made.args, logit_scale=scale, temperature=T)
    z = dense_logits(*made.args[:2], logit_scale=scale, temperature=T)
    exact = torch.nn.functional.cross_entropy(z, made.target)
    leaves = [*made.args[:2], scale]
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(exact, leaves))


def test_position_t_keeps_its_temperature_under_shift():
    made, T = make_inputs((12, 11, 31), dtype=torch.float64), temperatures(12).double().view(3, 4)
    x, labels = made.input.view(3, 4, 11), made.target.view(3, 4)
    ours = flce_ops.linear_cross_entropy(x, made.linear_weight, labels, temperature=T, shift=True)
    cut = flce_ops.linear_cross_entropy(x[:, :-1], made.linear_weight, labels[:, 1:], temperature=T[:, :-1])
    torch.testing.assert_close(ours, cut)


@pytest.mark.parametrize("floating", [False, True], ids=["indices", "probabilities"])
def test_heads_of_several_positions_share_a_tokens_temperature(floating):
    x, w = torch.randn(5, 7).double(), torch.randn(11, 3, 7).double()
    target = torch.rand(5, 11, 3).softmax(1).double() if floating else torch.randint(11, (5, 3))
    T = temperatures(5).double()
    ours = flce_ops.linear_cross_entropy(x, w, target, temperature=T)
    z = torch.einsum("nd,vkd->nvk", x, w) / T[:, None, None]
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(z, target))


@pytest.mark.parametrize("options", CAPS, ids=["plain", "capped"])
def test_second_derivatives(options):
    made, T = make_inputs((5, 4, 7), dtype=torch.float64, ignored=0.0), temperatures(5).double()

    def loss(x, w):
        return flce_ops.linear_cross_entropy(x, w, made.target, temperature=T, reduction="none", **options)

    assert torch.autograd.gradcheck(loss, made.args[:2])
    assert torch.autograd.gradgradcheck(loss, made.args[:2])
    u = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    given = lambda u: flce_ops.cross_entropy(u, made.target, temperature=T, reduction="none", **options)  # noqa: E731
    assert torch.autograd.gradgradcheck(given, u)


@pytest.mark.parametrize("of", ["all", "input", "temperature"])
@pytest.mark.parametrize("name", ["loss", "kl"])
def test_vmap_and_grad_of_torch_func(name, of):
    B, (N, D, V) = 3, (6, 5, 11)
    x, w = torch.randn(B, N, D).double(), torch.randn(V, D).double()
    y, T, cap = torch.randint(V, (N,)), temperatures(B * N).double().view(B, N), 4.0
    teacher = torch.rand(N, V).softmax(1).double()

    def loss(x, T):
        if name == "kl":
            return flce_ops.linear_kl_div(
                x, w, teacher_probs=teacher, temperature=T, softcap=cap, reduction="none"
            ).sum()
        return flce_ops.linear_cross_entropy(x, w, y, temperature=T, softcap=cap, reduction="none").sum()

    dims = {"all": (0, 0), "input": (0, None), "temperature": (None, 0)}[of]
    args = tuple(t if dim == 0 else t[1] for t, dim in zip((x, T), dims))
    each = [tuple(a[i] if dim == 0 else a for a, dim in zip(args, dims)) for i in range(B)]
    torch.testing.assert_close(torch.vmap(loss, dims)(*args), torch.stack([loss(*one) for one in each]))
    grads = torch.vmap(torch.func.grad(loss), dims)(*args)
    torch.testing.assert_close(grads, torch.stack([torch.func.grad(loss)(*one) for one in each]))
    last = torch.vmap(loss, tuple(dim if dim is None else -1 for dim in dims))(
        *(a.movedim(0, -1) if dim == 0 else a for a, dim in zip(args, dims))
    )
    torch.testing.assert_close(last, torch.stack([loss(*one) for one in each]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_graph_for_all_temperatures(reduction):
    made = make_inputs(SHAPE)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(T):
        return flce_ops.linear_cross_entropy(*made.args, temperature=T, reduction=reduction, softcap=4.0).sum()

    for T in (temperatures(), temperatures(), torch.full(SHAPE[:1], 0.7)):
        eager = flce_ops.linear_cross_entropy(*made.args, temperature=T, reduction=reduction, softcap=4.0).sum()
        torch.testing.assert_close(loss(T), eager)
        leaves = made.args[:2]
        torch.testing.assert_close(torch.autograd.grad(loss(T), leaves), torch.autograd.grad(eager, leaves))
    assert counter.frame_count == 1


def test_operators_pass_opcheck():
    made, T = make_inputs(SHAPE), temperatures()
    flce, pair = torch.ops.flce, make_pair((*SHAPE[:2], 7, SHAPE[2]))
    for reduction in ("mean", "none"):
        options = {"reduction": reduction, "token_temperature": T, "softcap": 5.0}
        opcheck(flce.linear_cross_entropy.default, made.args, options)
    opcheck(flce.linear_log_probs.default, made.args, {"token_temperature": T, "entropy": True})
    names = ("input", "linear_weight", "teacher_input", "teacher_weight")
    args = tuple(pair[name] for name in names)
    opcheck(flce.linear_kl_div.default, args, {"target": pair["target"], "token_temperature": T, "softcap": 5.0})
    scales = {"logit_scale": T, "softcap": 4.0 * T}
    *args, bias = made.args
    opcheck(flce.linear_cross_entropy_forward.default, (*args, bias), scales)
    opcheck(
        flce.linear_cross_entropy_with_grad.default,
        (*args, bias, None, None),
        {**scales, "output_mask": [True, True, False]},
    )
    opcheck(flce.cross_entropy_forward.default, (torch.randn(SHAPE[0], SHAPE[2]), made.target), scales)


def test_an_operator_refuses_numbers_that_are_not_of_its_tokens():
    made = make_inputs(SHAPE, requires_grad=False)
    forward = torch.ops.flce.linear_cross_entropy_forward
    with pytest.raises(ValueError, match=r"expected logit_scale of shape \(13,\), got \(3,\)"):
        forward(*made.args, logit_scale=torch.ones(3))
    with pytest.raises(ValueError, match="expected softcap to be a 0-d tensor"):
        forward(*made.args, softcap=torch.ones(13, 1))
    one, each = torch.ones(()), torch.ones(13)
    with pytest.raises(
        ValueError, match=r"expected logit_scale of shape \(13,\) as softcap is, or both as 0-d tensors"
    ):
        forward(*made.args, softcap=each, logit_scale=one)
    with pytest.raises(ValueError, match=r"expected softcap of shape \(13,\) as logit_scale is"):
        torch.ops.flce.cross_entropy_forward(torch.randn(13, 5), made.target, softcap=one, logit_scale=each)
    assert torch.equal(forward(*made.args, softcap=each)[0], forward(*made.args, softcap=one)[0])


def test_exported_programs_have_it():
    made, T = make_inputs(SHAPE, requires_grad=False), temperatures()

    class Head(torch.nn.Module):
        def forward(self, x, w, y, T):
            return flce_ops.linear_log_probs(x, w, y, temperature=T, softcap=4.0).log_probs

    args = (*made.args[:3], T)
    program = torch.export.export(Head(), args).run_decompositions(flce_ops.export_decompositions())
    assert not any("flce" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*args), Head()(*args))


def test_metrics_are_those_at_the_temperature():
    made, T = make_inputs(SHAPE, dtype=torch.float64, requires_grad=False), temperatures().double()
    _, found = flce_ops.linear_cross_entropy(*made.args, temperature=T, return_metrics=("entropy", "lse", "mean_logit"))
    z = dense_logits(*made.args[:2], temperature=T)
    valid = made.target >= 0
    exact = {
        "entropy": torch.distributions.Categorical(logits=z).entropy(),
        "lse": z.logsumexp(1),
        "mean_logit": z.mean(1),
    }
    for name, rows in exact.items():
        torch.testing.assert_close(found[name], rows.where(valid, 0.0))
