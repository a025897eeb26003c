"""linear_token_loss: its cost, derivatives, torch.func, compile, autocast, opcheck, export, inference mode."""

# N tokens, D hidden, V vocabulary

import subprocess
import sys

import pytest
import torch
from fresh_process import ROOT
from reference_loss import error
from reference_token_loss import dense_token_loss, make_call, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.objectives.token_function import token_loss_named, token_loss_of

RAGGED = (61, 33, 97)


@flce_ops.token_loss
def focal(log_prob, gamma):
    return -((1 - log_prob.exp()) ** gamma) * log_prob


@flce_ops.token_loss
def weighted(log_prob, advantage):
    return -advantage * log_prob.exp()


@flce_ops.token_loss
def with_rows(log_prob, *, lse, entropy):
    return 1e-2 * lse**2 - log_prob - 0.1 * entropy


@flce_ops.token_loss
def with_lse(log_prob, *, lse):
    return -1e-2 * lse**2 * log_prob


@flce_ops.token_loss
def several(log_prob, q):
    return -(q * log_prob).sum()


fused = flce_ops.token_loss(focal.function, name="tests.fused", compile=True)
FUNCTIONS = {  # and K
    "focal": (focal, lambda: [2.0], 0),
    "weighted": (weighted, lambda: [torch.rand(RAGGED[0]).double() - 0.5], 0),
    "with_rows": (with_rows, list, 0),
    "with_lse": (with_lse, list, 0),
    "several": (several, lambda: [torch.rand(RAGGED[0], 3).double()], 3),
}


def test_gemm_passes(device):
    call = make_call((256, 16, 61), dtype=torch.float32, device=device)
    x, w, y = (call[name] for name in ("input", "linear_weight", "target"))
    for tensor in (x, w):
        tensor.requires_grad_()
    for function, tensors, passes in ((focal, [2.0], 3), (lambda lp, *, lse: lse - lp, [], 3), (with_rows, [], 4)):
        with flce_ops.workspace(retained=0), FlopCounterMode(display=False) as flops:
            flce_ops.linear_token_loss(x, w, y, function, *tensors).loss.backward()
        assert flops.get_total_flops() == passes * 2 * 256 * 16 * 61
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        flce_ops.linear_token_loss(x, w, y, focal, 2.0)
    assert flops.get_total_flops() == 2 * 256 * 16 * 61


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name, reduction):
    function, made, topk = FUNCTIONS[name]
    tensors, call = made(), make_call(RAGGED, topk=topk, token_weight=True)
    call["token_weight"][::4] = 0.0  # whose gradients have derivatives by the weight all the same

    def seconds(loss_of, **options):
        leaves = {n: t.clone().requires_grad_() for n, t in call.items() if t is not None and n != "target"}
        x, w = leaves["input"], leaves["linear_weight"]
        options |= {"token_weight": leaves["token_weight"], "reduction": reduction}
        loss = loss_of(x, w, call["target"], function, *tensors, **options)[0].square().sum()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        return *found, *torch.autograd.grad(sum(g.square().sum() for g in found), list(leaves.values()))

    for found, exact in zip(seconds(flce_ops.linear_token_loss), seconds(dense_token_loss, reads=function.reads)):
        assert error(found, exact) < 1e-11


def test_a_second_derivative_of_a_function_without_a_name():
    """The function lives as long as the graph."""
    call = make_call(RAGGED)
    x, w = call["input"].requires_grad_(), call["linear_weight"]
    loss = flce_ops.linear_token_loss(x, w, call["target"], lambda lp: -(lp.exp() * lp)).loss
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    exact = dense_token_loss(x, w, call["target"], lambda lp: -(lp.exp() * lp))[0]
    (expected,) = torch.autograd.grad(exact, x, create_graph=True)
    assert error(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0]) < 1e-11


def test_functions_without_a_name_are_forgotten():
    from flce_ops.objectives import token_function

    call, before = make_call(RAGGED), len(token_function._of_calls)
    for _ in range(3):
        run(flce_ops.linear_token_loss, call, lambda lp: -lp)
    assert len(token_function._of_calls) == before


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func(name):
    function, made, topk = FUNCTIONS[name]
    call, tensors = make_call(RAGGED, topk=topk), made()
    x, w, y = (call[name] for name in ("input", "linear_weight", "target"))
    ours = lambda x, w: flce_ops.linear_token_loss(x, w, y, function, *tensors)[0]  # noqa: E731
    dense = lambda x, w: dense_token_loss(x, w, y, function, *tensors, reads=function.reads)[0]  # noqa: E731
    for found, exact in zip(torch.func.grad(ours, (0, 1))(x, w), torch.func.grad(dense, (0, 1))(x, w), strict=True):
        assert error(found, exact) < 1e-12
    xs = torch.stack([x, x + 0.1])
    assert error(torch.vmap(ours, (0, None))(xs, w), torch.stack([dense(x, w) for x in xs])) < 1e-12


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_four_gammas_and_numbers_of_tokens_are_few_graphs(options):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(x, w, y, gamma):
        return flce_ops.linear_token_loss(x, w, y, focal, gamma, **options)[0]

    for tokens, gamma in ((61, 2.0), (61, 2.5), (61, 3.0), (61, 0.5), (40, 1.0), (33, 1.5), (50, 2.0)):
        call = make_call((tokens, 33, 97), dtype=torch.float32)
        x, w, y = (call[name] for name in ("input", "linear_weight", "target"))
        x.requires_grad_()
        found, expected = step(x, w, y, gamma), flce_ops.linear_token_loss(x, w, y, focal, gamma, **options)[0]
        torch.testing.assert_close(found, expected)
        for ours, truth in zip(*(torch.autograd.grad(loss.sum(), x) for loss in (found, expected))):
            torch.testing.assert_close(ours, truth)
    assert counter.frame_count <= 3  # a number that changes is an input of the second, tokens of the third
    before = counter.frame_count
    for gamma in (torch.tensor(2.0), torch.tensor(0.5)):
        step(x, w, y, gamma)
    assert counter.frame_count == before + 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inductor_with_a_dynamic_number_of_tokens(name):
    function, made, topk = FUNCTIONS[name]
    step = torch.compile(lambda *args: flce_ops.linear_token_loss(*args)[0], fullgraph=True, dynamic=True)
    call, tensors = make_call(RAGGED, topk=topk), made()
    for tokens in (61, 40):
        x, w, y = call["input"][:tokens].clone(), call["linear_weight"], call["target"][:tokens]
        x.requires_grad_()
        own = [t[:tokens] if isinstance(t, torch.Tensor) else t for t in tensors]
        found, expected = step(x, w, y, function, *own), flce_ops.linear_token_loss(x, w, y, function, *own)[0]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


def test_compile_asks_for_a_registered_function():
    call = make_call(RAGGED, dtype=torch.float32)
    step = torch.compile(flce_ops.linear_token_loss, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="decorate it with @flce_ops.token_loss"):
        step(*list(call.values())[:3], lambda lp: -lp)


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.head, self.function = torch.nn.Linear(33, 97), function

    def forward(self, x, y, a):
        return flce_ops.linear_token_loss(x, self.head.weight, y, self.function, a, linear_bias=self.head.bias)[0]


@pytest.mark.parametrize("strict", [True, False])
def test_export_has_the_name_and_a_list_of_tensors(strict, tmp_path):
    call, a = make_call(RAGGED, dtype=torch.float32), torch.rand(RAGGED[0])
    model, given = Model(weighted), (call["input"], call["target"], a)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(model, given, dynamic_shapes=({0: rows}, {0: rows}, {0: rows}), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    (node,) = [n for n in program.graph.nodes if "flce" in str(n.target)]
    assert node.target == torch.ops.flce.linear_token_loss.default
    assert weighted.name in node.args and any(isinstance(argument, list) for argument in node.args)
    fewer = tuple(tensor[:40] for tensor in given)
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    torch.testing.assert_close(loaded(*fewer), model(*fewer))


def test_another_process_needs_the_module_that_registers(tmp_path):
    script = """
import torch, flce_ops
x, w, y = torch.randn(5, 3), torch.randn(7, 3), torch.arange(5)
try:
    torch.ops.flce.linear_token_loss(x, w, y, "losses_of_a_user.focal", [])
except RuntimeError as error:
    assert "import the module that registers it" in str(error), error
import losses_of_a_user
print(torch.ops.flce.linear_token_loss(x, w, y, "losses_of_a_user.focal", [])[0])
"""
    source = "import flce_ops\n\n@flce_ops.token_loss\ndef focal(log_prob):\n    return -log_prob\n"
    (tmp_path / "losses_of_a_user.py").write_text(source)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FUNCTIONS)
def test_opcheck(name, device):
    function, made, topk = FUNCTIONS[name]
    call = make_call(RAGGED, dtype=torch.float32, topk=topk, bias=True, token_weight=True, device=device)
    tensors = [torch.as_tensor(t, device=device).float() for t in made()]
    operands = [call[n] for n in ("input", "linear_weight", "target")]
    for tensor in operands[:2]:
        tensor.requires_grad_()
    args = [*operands, function.name, tensors]
    for options in ({}, {"reduction": "none", "token_weight": call["token_weight"]}):
        opcheck(torch.ops.flce.linear_token_loss.default, args, options)
    if "entropy" not in function.reads:
        inner = [*operands, call["linear_bias"], None, torch.rand(RAGGED[0], device=device)]
        if name == "weighted":  # opcheck's grad_output is the sign of the loss
            tensors[0].abs_().neg_()
        asked = {"output_mask": [True, True, False], "function": function.name, "tensors": tensors}
        opcheck(torch.ops.flce.linear_cross_entropy_with_grad.default, inner, asked)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast(half):
    call = make_call(RAGGED, dtype=torch.float32)
    with torch.autocast("cpu", half):
        found = run(flce_ops.linear_token_loss, call, focal, 2.0)
    cast = {n: t.to(half) if n in ("input", "linear_weight") else t for n, t in call.items() if t is not None}
    expected = run(flce_ops.linear_token_loss, cast, focal, 2.0)
    assert found["loss"].dtype == torch.float32
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["input"], expected["input"].float())


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_tensors_of_inference_mode_are_taken(options):
    """Old log-probabilities are often made by a roll-out in inference mode."""
    call = make_call(RAGGED)
    x, w, y = (call[name] for name in ("input", "linear_weight", "target"))
    with torch.inference_mode():
        old, gamma = flce_ops.linear_log_probs(x, w, y).log_probs, torch.tensor(0.5).double()
        flce_ops.linear_token_loss(x, w, y, lambda lp, old: -(lp - old).exp(), old)
    ratio, cotangent = lambda lp, old, g: -((lp - old).exp() ** g), torch.ones(61) if options else None  # noqa: E731
    found = run(flce_ops.linear_token_loss, call, ratio, old, gamma, cotangent=cotangent, **options)
    exact = run(dense_token_loss, call, ratio, old.clone(), gamma.clone(), cotangent=cotangent, **options)
    assert error(found["input"], exact["input"]) < 1e-12
    advantages = torch.rand(61).double()
    losses = [
        flce_ops.linear_policy_loss(x.requires_grad_(), w, y, advantages, o, **options)[0] for o in (old, old.clone())
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), x) for loss in losses))


def test_inductor_fuses_a_function_with_its_derivative():
    """From the second call on. Other numbers of tokens are the same graph."""
    counters.clear()
    for tokens in (61, 61, 40, 52):
        call = make_call((tokens, 33, 97), dtype=torch.float32)
        found = run(flce_ops.linear_token_loss, call, fused, 2.0)
        expected = run(flce_ops.linear_token_loss, call, focal, 2.0)
        for key, truth in expected.items():
            torch.testing.assert_close(found[key], truth)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_fused_function_of_several_classes_and_lse():
    @flce_ops.token_loss(name="tests.fused_of_several", compile=True)
    def loss(log_prob, q, *, lse):
        return -(q * log_prob).sum() + 1e-2 * lse**2

    call, q = make_call(RAGGED, topk=3), torch.rand(RAGGED[0], 3).double()
    exact = run(dense_token_loss, call, loss, q, reads=("lse",))
    for _ in range(2):
        found = run(flce_ops.linear_token_loss, call, loss, q)
        for key, truth in exact.items():
            assert error(found[key], truth) < 1e-12, key


def test_a_graph_is_stored_under_the_code_of_its_function(monkeypatch):
    """A graph of recomputed logits contains the function's operations, but a compiler's key has its name alone."""
    from flce_ops.support import compile_cache

    keys = {}
    monkeypatch.setattr(compile_cache, "key_compiled_graphs", lambda name, key: keys.__setitem__(name, key))
    call = make_call(RAGGED, dtype=torch.float32)
    args = [call["input"].requires_grad_(), call["linear_weight"], call["target"]]
    step = torch.compile(flce_ops.linear_token_loss, fullgraph=True, backend="aot_eager")
    step(*args, focal, 2.0, reduction="none")
    (key,) = (key for name, key in keys.items() if name.endswith(focal.name))
    assert key == compile_cache.digest_of_function(focal.function)

    def changed(log_prob, gamma):
        return -((1 - log_prob.exp()) ** gamma) * log_prob * 2

    def of(helper):
        return lambda log_prob, gamma: helper(log_prob, gamma)

    digests = [compile_cache.digest_of_function(f) for f in (changed, focal.function, of(changed), of(focal.function))]
    assert len(set(digests)) == 4 and digests[3] == compile_cache.digest_of_function(of(focal.function))


def test_a_name_is_looked_up_when_the_operator_runs():
    loss = token_loss_of(lambda lp: -lp)
    assert token_loss_named(loss.name) is loss
