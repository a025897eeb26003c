"""One test for each private torch name in support/torch_private.py: it fails, and names it, if torch drops it."""

import re
import uuid

import pytest
import torch
from fresh_process import ROOT
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from flce_ops.support import torch_private


def test_below_autograd_skips_the_autograd_keys():
    x = torch.ones(2, requires_grad=True)
    with torch_private.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_without_autocast_skips_the_cast(device_type):
    if device_type == "cuda" and not torch.cuda.is_available():
        with torch_private.without_autocast(device_type):  # the key's name must exist without a GPU as well
            return
    x = torch.ones(2, 2, device=device_type)
    with torch.autocast(device_type, dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with torch_private.without_autocast(device_type):
            assert (x @ x).dtype == torch.float32


@pytest.mark.gpu
def test_current_stream_is_that_of_the_device():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch_private.current_stream(side.device_index) == side.cuda_stream
    assert torch_private.current_stream(side.device_index) == torch.cuda.current_stream().cuda_stream


def test_functorch_is_active_only_inside_a_transform():
    seen = []

    def f(x):
        seen.append(torch_private.functorch_is_active())
        return x.sum()

    f(torch.ones(2))
    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_apply_function_is_apply():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, factor):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor, None

    x = torch.ones(2, requires_grad=True)
    torch_private.apply_function(Scaled, x, 3.0).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_forward_mode_is_active_only_inside_a_level():
    seen = []

    def f(x):
        seen.append(torch_private.forward_mode_is_active())
        return x.sin()

    x = torch.ones(2)
    f(x)
    with torch.autograd.forward_ad.dual_level():
        f(x)
    torch.func.jvp(f, (x,), (x,))
    f(x)
    assert seen == [False, True, True, False]


def test_saved_tensor_hooks_are_active_in_a_non_reentrant_checkpoint():
    seen = []

    def f(x):
        seen.append(torch_private.saved_tensor_hooks_are_active())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    f(x)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, True]


def test_tracing_a_checkpointed_region_is_seen_while_aot_traces_it():
    seen = []

    @torch.library.custom_op("flce_test::identity", mutates_args=())
    def identity(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @identity.register_fake
    def _(x):
        seen.append(torch_private.tracing_a_checkpointed_region())
        return torch.empty_like(x)

    identity.register_autograd(lambda ctx, grad: grad)

    def plain(x):
        return identity(x).sum()

    def checkpointed(x):
        return checkpoint(lambda y: identity(y.sin()), x, use_reentrant=False).sum()

    x = torch.ones(4, requires_grad=True)
    torch.compile(plain, backend="aot_eager", fullgraph=True)(x)
    assert seen and not any(seen)
    seen.clear()
    torch.compile(checkpointed, backend="aot_eager", fullgraph=True)(x)
    assert any(seen)


def test_written_over_where_donated_gives_inductor_a_lowering():
    """tests/sinks/test_grad_output_compiled.py tests the code that Inductor generates with it."""
    lowerings = pytest.importorskip("torch._inductor.lowering").lowerings
    op = torch.ops.flce.linear_cross_entropy_upstream.default
    torch_private.written_over_where_donated(op, torch.ops.flce.linear_cross_entropy_upstream_.default)
    assert op in lowerings
    from torch._inductor import ir

    assert issubclass(ir.DonatedBuffer, ir.InputBuffer)


def seen_in_backward(seen, look):
    """An identity whose backward appends look(gradient) to `seen`."""

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(look(grad))
            return grad

    return Probe.apply


def test_graph_is_kept_after_this_backward_reads_retain_graph():
    seen: list[bool] = []
    probe = seen_in_backward(seen, lambda grad: torch_private.graph_is_kept_after_this_backward())
    loss = probe(torch.ones(1, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


def test_is_batched_knows_the_batches_of_is_grads_batched():
    seen: list[bool] = []
    probe = seen_in_backward(seen, torch_private.is_batched)
    x = torch.ones((), requires_grad=True)
    torch.autograd.grad(probe(x), x, torch.ones(3), is_grads_batched=True)
    torch.autograd.grad(probe(x), x)
    assert seen == [True, False]


def test_runs_in_this_backward_tells_wanted_gradients_from_others():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, grad):
            seen.append([torch_private.runs_in_this_backward(node) for node, _ in ctx.next_functions])
            return grad, grad

    leaf = torch.ones((), requires_grad=True)
    x, y = leaf.sin(), leaf.exp()
    torch.autograd.grad(Probe.apply(x, y), y, retain_graph=True)
    torch.autograd.grad(Probe.apply(x, y), x, retain_graph=True)
    torch.autograd.grad(Probe.apply(leaf, y), leaf, retain_graph=True)
    torch.autograd.grad(Probe.apply(leaf, y.detach().requires_grad_()), leaf, retain_graph=True)
    Probe.apply(x, y).backward()
    assert seen == [[False, True], [True, False], [True, True], [True, False], [True, True]]


def test_root_of_is_the_tensor_that_is_viewed():
    tensor = torch.randn(6, 4)
    assert torch_private.root_of(tensor) is tensor
    assert torch_private.root_of(tensor.view(3, 8)[:, 1:].T) is tensor
    assert torch_private.root_of(made := tensor * 2.0) is made


def test_comes_from_outside_a_traced_graph_knows_its_inputs_from_what_it_computes():
    seen = []

    library = torch.library.Library("flce_tests", "FRAGMENT")
    library.define("seen_from(Tensor x) -> Tensor")

    def body(x):
        seen.append(torch_private.comes_from_outside_a_traced_graph(x))
        return x.clone()

    library.impl("seen_from", body, "CompositeImplicitAutograd")
    leaf = torch.ones(3, requires_grad=True)
    for function, expected in ((lambda x: x, True), (lambda x: x * 2.0, False)):
        compiled = torch.compile(
            lambda x, function=function: torch.ops.flce_tests.seen_from(function(x)),
            backend="aot_eager",
            fullgraph=True,
        )
        seen.clear()
        compiled(leaf * 1.0)
        assert seen and set(seen) == {expected}
    assert not torch_private.comes_from_outside_a_traced_graph(leaf * 1.0)


def test_an_input_that_one_operator_reads_is_saved_without_version_check():
    """An input that another operator reads, too, keeps the check, because that operator saved it and would read changed
    values.
    """
    from functorch.compile import aot_function, nop

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor, ctx.traced = factor, torch_private.traced_input(factor)
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            if ctx.traced is not None:
                torch_private.save_without_version_check(ctx.traced, torch.ops.aten.mul.Tensor)
            return grad * ctx.factor, None

    def gradient(function, view):
        x, factor = torch.ones(2, requires_grad=True), torch.ones(3, 2)
        of_rows = lambda x, factor: function(x, factor[1] if view else factor)  # noqa: E731
        made = aot_function(of_rows, nop)(x, factor).sum()
        factor.fill_(3.0)
        made.backward()
        return x.grad.tolist()

    assert torch_private.traced_input(torch.ones(2)) is None
    assert gradient(Product.apply, view=False) == [9.0, 9.0] and gradient(Product.apply, view=True) == [3.0, 3.0]
    for view in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(lambda x, factor: Product.apply(x, factor) + torch.atan2(x, factor), view)


def test_assert_on_device_carries_the_message():
    torch_private.assert_on_device(torch.tensor(True), "never seen")
    with pytest.raises(RuntimeError, match="what went wrong"):
        torch_private.assert_on_device(torch.tensor(False), "what went wrong")


def test_check_value_looks_on_the_host_and_asserts_where_a_tracer_records():
    def f(x):
        torch_private.check_value(x > 0.0, "what went wrong")
        return x * 2.0

    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0])
    assert torch.func.vmap(f)(good).tolist() == [2.0, 4.0]
    for run in (torch.func.vmap(f), torch.func.vmap(torch.func.grad(f))):
        with pytest.raises(ValueError, match="what went wrong"):
            run(bad)
    graph = make_fx(f)(good[0])
    with pytest.raises(RuntimeError, match="what went wrong"):
        graph(bad[1])


def test_functional_lets_no_tracer_see_what_is_written_in_place():
    @torch_private.functional
    def halved_exponentials(x):
        return x.exp().mul_(0.5)

    x = torch.randn(3)
    assert torch.equal(halved_exponentials(x), x.exp() * 0.5)
    graph = make_fx(halved_exponentials, tracing_mode="symbolic")(x).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names == ["aten.exp.default", "aten.mul.Tensor"]


def test_key_compiled_graphs_separates_what_torch_compile_has_cached():
    def compile_again(x):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(torch.mm)(x, x)
        return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]

    config = torch._inductor.config
    with (
        torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())),
        torch._functorch.config.patch(enable_autograd_cache=True),
        config.patch(unsafe_marked_cacheable_functions={}, fx_graph_cache=True),
    ):
        torch_private.key_compiled_graphs("flce_test", "1")
        assert compile_again(torch.ones(2, 2)) == (0, 1)
        assert compile_again(torch.ones(2, 2)) == (1, 0)
        torch_private.key_compiled_graphs("flce_test", "2")
        assert compile_again(torch.ones(2, 2)) == (0, 1)
        torch_private.key_compiled_graphs("flce_test", "1")
        assert compile_again(torch.ones(2, 2)) == (1, 0)


def test_hooks_on_input_and_output_are_those_of_the_module_and_of_all_modules():
    module, handles = torch.nn.Linear(2, 2), []
    everywhere = torch.nn.modules.module

    def add(register):
        def hook(*args):
            return None

        handles.append(register(hook))
        return hook

    try:
        added = [
            add(module.register_forward_hook),
            add(module.register_full_backward_hook),
            add(module.register_full_backward_pre_hook),
            add(everywhere.register_module_forward_hook),
            add(everywhere.register_module_full_backward_hook),
            add(everywhere.register_module_full_backward_pre_hook),
        ]
        before = [add(module.register_forward_pre_hook), add(everywhere.register_module_forward_pre_hook)]
        assert set(torch_private.hooks_on_the_output(module)) == set(added)
        assert set(torch_private.hooks_on_the_input(module)) == set(before)
    finally:
        for handle in handles:
            handle.remove()
    assert torch_private.hooks_on_the_output(module) == torch_private.hooks_on_the_input(module) == []


def test_a_value_registered_without_leaves_is_kept_by_maps_over_tensors():
    class Marker:
        pass

    marker = Marker()
    torch_private.register_without_leaves(marker)
    doubled = tree_map(lambda leaf: 2 * leaf, {"loss": 3, "marker": marker})
    assert doubled == {"loss": 6, "marker": marker}


def test_no_other_file_reads_private_names():
    """Exceptions: torch.compile's own module, operators by their type, and functional collectives. They have no public
    name.
    """
    private = re.compile(r"\btorch(\.\w+)*\._(?!dynamo\b|ops\.OpOverload|c10d_functional\.|_)\w+")
    files = (file for folder in ("flce_ops", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))
    found = {str(file.relative_to(ROOT)): private.search(file.read_text()) for file in files}
    others = {file: match[0] for file, match in found.items() if match and file != "flce_ops/support/torch_private.py"}
    assert others == {}
