"""A test of each function in support/torch_private.py, which fails if torch drops a name that the function reads; and
the names of docs/what_we_rely_on.md, compared with the sources.
"""

import ast
import importlib
import inspect
import re
import sys
import uuid
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.tensor
from fresh_process import ROOT
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flce_ops.support import torch_private


def test_below_autograd_skips_the_autograd_keys():
    x = torch.ones(2, requires_grad=True)
    with torch_private.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_with_transforms_runs_vmap_below_autograd_and_keeps_the_modes():
    with FakeTensorMode(), torch_private.below_autograd(), torch_private.with_transforms():
        assert isinstance(torch.func.vmap(lambda x: x + torch.ones(()))(torch.ones(2)), FakeTensor)


def test_functorch_is_active_only_inside_a_transform():
    seen = []

    def f(x):
        seen.append(torch_private.functorch_is_active())
        return x.sum()

    f(torch.ones(2))
    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_plain_apply_is_apply():
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
    torch_private.plain_apply(Scaled)(x, 3.0).sum().backward()
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


def test_saved_tensor_hooks_are_seen_in_a_non_reentrant_checkpoint():
    seen = []

    def f(x):
        seen.append(torch_private.saved_tensor_hooks() is not None)
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    f(x)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, True]


def test_metadata_of_trace_names_a_checkpointed_region_while_aot_traces_it():
    seen = []

    @torch.library.custom_op("flce_test::identity", mutates_args=())
    def identity(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @identity.register_fake
    def _(x):
        seen.append("recompute" in torch_private.metadata_of_trace())
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
    """tests/sinks/test_grad_output_compiled.py tests that the lowering runs, and the code that Inductor generates."""
    lowerings = pytest.importorskip("torch._inductor.lowering").lowerings
    op = torch.ops.flce.linear_cross_entropy_upstream.default
    torch_private.written_over_where_donated(op, torch.ops.flce.linear_cross_entropy_upstream_.default)
    assert op in lowerings
    from torch._inductor import ir

    assert issubclass(ir.DonatedBuffer, ir.InputBuffer)


@pytest.mark.parametrize("name", ["_inductor.config", "_inductor.lowering"])
def test_a_module_of_the_compiler_that_torch_has_moved_is_named_once(name, monkeypatch, caplog):
    for loaded_by in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx"):
        importlib.import_module(loaded_by)
    torch_private.warn_of_missing.cache_clear()
    for _ in range(2):
        torch_private.key_compiled_graphs("flce_test", "1")
        torch_private.written_over_where_donated(torch.ops.aten.mul.Tensor, None)  # has a lowering
    assert not caplog.records
    monkeypatch.setitem(sys.modules, f"torch.{name}", None)
    for _ in range(2):
        torch_private.key_compiled_graphs("flce_test", "1")
        torch_private.written_over_where_donated(torch.ops.aten.mul.Tensor, None)
    assert [record.name for record in caplog.records] == ["flce_ops"]
    assert f"has no module torch.{name}: " in caplog.text


def test_a_compiler_that_is_not_loaded_is_not_missed(monkeypatch, caplog):
    torch_private.warn_of_missing.cache_clear()
    for name in ("_inductor.config", "_inductor.lowering", "_dynamo.convert_frame", "_inductor.compile_fx"):
        monkeypatch.delitem(sys.modules, f"torch.{name}", raising=False)
    torch_private.key_compiled_graphs("flce_test", "1")
    torch_private.written_over_where_donated(torch.ops.aten.mul.Tensor, None)
    assert not caplog.records and "torch._inductor.config" not in sys.modules


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


def test_has_hooks_sees_a_hook_on_the_gradient():
    tensor = torch.ones(2, requires_grad=True) * 2.0
    assert not torch_private.has_hooks(tensor)
    tensor.register_hook(lambda grad: grad)
    assert torch_private.has_hooks(tensor)


def test_assert_when_it_runs_is_a_guard_free_assert_of_a_graph():
    """A size that depends on data passes, and the graph refuses another one when it runs."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def shown(x):
        found = x[x > 0.0]
        torch_private.assert_when_it_runs(found.shape[0] == 2, "expected two")
        return found * 2.0

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert shown(torch.tensor([1.0, -1.0, 2.0])).tolist() == [2.0, 4.0]
        with pytest.raises(RuntimeError, match="expected two"):
            shown(torch.tensor([1.0, -1.0, -2.0]))


def test_collectives_send_and_wait(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group, numbers = distributed.group.WORLD.group_name, torch.ones(3)
        gathered = torch_private.collectives.all_gather_into_tensor(numbers, 1, group)
        added = torch_private.collectives.all_reduce(numbers, "sum", group)
        for found in (gathered, added):
            assert torch_private.collectives.wait_tensor(found).tolist() == [1.0, 1.0, 1.0]
    finally:
        distributed.destroy_process_group()


def test_a_value_registered_without_leaves_is_kept_by_maps_over_tensors():
    class Marker:
        pass

    marker = Marker()
    torch_private.register_without_leaves(marker)
    doubled = tree_map(lambda leaf: 2 * leaf, {"loss": 3, "marker": marker})
    assert doubled == {"loss": 6, "marker": marker}


def names_of_torch(source):
    """Attributes with a leading underscore, and what is read of private modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not (name := node.attr).startswith("__"):
            of_private_module = re.search(r"\._(C|functorch|autograd|pytree)$", ast.unparse(node.value))
            if name not in ("_C", "_functorch", "_autograd", "_pytree") and (name[0] == "_" or of_private_module):
                found.add(name)
    return found


def test_autograd_and_vmap_work_inside_a_kernel_below_any_context():
    library = torch.library.Library("of_this_test", "DEF")
    library.define("slopes(Tensor x) -> Tensor")

    def slopes(x):
        with torch_private.with_autograd():
            x = x.clone().detach().requires_grad_()
            return torch.autograd.grad(torch.func.vmap(lambda x: x**3)(x).sum(), x)[0]

    library.impl("slopes", slopes, "CompositeExplicitAutograd")
    x, op = torch.tensor([1.0, 2.0], requires_grad=True), torch.ops.of_this_test.slopes
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
        with context, torch_private.below_autograd():
            assert op(x).tolist() == [3.0, 12.0]
    with torch.inference_mode():
        assert op(torch.tensor([1.0, 2.0])).tolist() == [3.0, 12.0]


def test_profiler_is_on_only_inside_a_profile():
    assert not torch_private.profiler_is_on()
    with torch.profiler.profile():
        assert torch_private.profiler_is_on()


def test_with_unwrapped_finds_the_tensors_of_all_transforms():
    found = []

    def f(x):
        found.extend(torch_private.with_unwrapped(x))
        return x.sum()

    torch.func.grad(torch.func.grad(f))(x := torch.tensor(2.0))
    assert len(found) == 3 and found[-1] is x
    assert torch_private.with_unwrapped(x) == [x]


# Read of torch, but spelled as public names are, which a pattern cannot tell from the public ones.
SPELLED_AS_PUBLIC = {
    "support/torch_private.py": (
        *("unsafe_marked_cacheable_functions", "lowerings", "register_lowering", "fallback_handler", "data.data"),
        *("ir.DonatedBuffer", "V.graph.current_node", "get_current_meta", "debug_unwrap", "untyped_storage", "apply"),
        *("hooks_dict_ref", "unpack_dual", "torch::autograd::Error", "recompute"),
        *("torch._dynamo.convert_frame", "torch._inductor.compile_fx"),
    ),
    "parallel.py": ("_apply", "src_data_rank"),
    "distributed/layout.py": ("group_name", "split_factor"),
    "entry/__init__.py": ("set_autocast_enabled", "is_in_onnx_export"),
    "meta/checks.py": ("SparseSemiStructuredTensor",),
    "ops/__init__.py": ("FuncTorchDynamicLayerFrontMode",),
    "support/sizes.py": ("fake_mode",),
    "ops/made_in_forward.py": ("BackwardCFunction", "variable"),
}


def private_names_of_torch():
    found = names_of_torch((ROOT / "flce_ops/support/torch_private.py").read_text())
    for file, names in SPELLED_AS_PUBLIC.items():
        source = (ROOT / "flce_ops" / file).read_text().replace('data, "data"', "data.data")
        assert [name for name in names if name not in source] == []
        found.update(names)
    return found


def test_at_most_25_private_names_of_torch_are_read():
    """Those with an underscore and those of Inductor."""
    source = (ROOT / "flce_ops/support/torch_private.py").read_text()
    of_compiler = {"unsafe_marked_cacheable_functions", "lowerings", "register_lowering", "fallback_handler"}
    of_compiler |= {"ir.DonatedBuffer", "V.graph.current_node"}
    assert len(names := names_of_torch(source) | of_compiler) <= 25, sorted(names)


def test_at_most_47_names_that_torch_does_not_document_are_read():
    """Those above, and those that are spelled as public ones."""
    assert len(names := private_names_of_torch()) <= 47, sorted(names)


def test_no_other_file_reads_private_names():
    """Exception: torch.compile's own module, which has no public name."""
    private = re.compile(r"\btorch(\.\w+)*\._(?!dynamo\b|_)\w+|\._(?:backward_hooks|schema)\b|_c10d_functional")
    files = (file for folder in ("flce_ops", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))
    found = {str(file.relative_to(ROOT)): private.search(file.read_text()) for file in files}
    others = {file: match[0] for file, match in found.items() if match and file != "flce_ops/support/torch_private.py"}
    assert others == {}


def test_no_file_reads_private_names_of_triton():
    """The package imports triton, triton.language, and the class of host-made tensor descriptors."""
    private = re.compile(r"\b(triton|tl|libdevice)(\.\w+)*\._[a-z]\w*|\bfrom triton\.(?!tools\.tensor_descriptor\b)\S+")
    found = {str(file): private.search(file.read_text()) for file in (ROOT / "flce_ops").rglob("*.py")}
    assert {file: match[0] for file, match in found.items() if match} == {}


# ---------------------------------------------------------------- docs/what_we_rely_on.md

LIBRARIES = ("transformers", "trl", "torchtitan", "megatron", "peft", "accelerate", "verl", "deepspeed")
OF_A_NAMED_TUPLE = {"_replace", "_fields", "_asdict", "_make", "_field_defaults"}


def names_of_libraries():
    """What flce_ops/integrations reads, replaces and subclasses of other libraries: their imports, the methods that are
    set on their classes, every Place, their private attributes, and all attributes that neither torch nor Python nor
    this package has.
    """
    found = unexplained_attributes()
    for path in (ROOT / "flce_ops/integrations").rglob("*.py"):
        tree, imported = ast.parse(path.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in LIBRARIES:
                imported |= {name.name for name in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Place":
                found.add(".".join(ast.literal_eval(part) for part in node.args[:2]))
                found |= {word.value.value for word in node.keywords if word.arg == "caller"}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in imported:
                if isinstance(node.ctx, ast.Store):
                    found.add(f"{ast.unparse(node.value)}.{node.attr}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "watch_trainers":  # sets these methods
                found |= {f"Trainer.{keyword.arg}" for keyword in node.keywords}
            if isinstance(node, ast.Attribute):
                found |= {node.attr} if re.match(r"_(?!_)", node.attr) else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"_(?!_|flce)\w+", node.value) else set()
        found |= imported - {"utils"}  # a module, of which one name is read
    return found - OF_A_NAMED_TUPLE


def all_names(value) -> Iterator[str]:
    """What it has, and what the modules in it have."""
    yield from dir(value)
    for inner in vars(value).values() if isinstance(value, type(sys)) else ():
        if type(inner) is type(sys):
            yield from dir(inner)


def unexplained_attributes():
    """Attributes that flce_ops/integrations reads or sets of objects of other libraries."""
    layer, compiled = torch.nn.Linear(1, 1), (lambda: None).__code__
    objects = (torch, torch.nn, torch.distributed, torch.Tensor, torch.distributed.tensor.DTensor, layer, compiled)
    objects += (torch.autograd.function.FunctionCtx(),)
    python = [
        list,
        dict,
        str,
        type,
        slice,
        property,
        sys,
        inspect.Parameter,
        *map(importlib.import_module, IMPORTED_BY_INTEGRATIONS),
    ]
    explained = {name for value in (*objects, *python) for name in all_names(value)}
    of_layers = {*dir(layer), *dir(torch.Tensor), *dir(dict)}
    own, of_constants, trees = set(), set(), [ast.parse(path.read_text()) for path in (ROOT / "flce_ops").rglob("*.py")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if (owner := ast.unparse(node.value)) == "self":
                own.add(node.attr)
            elif owner.isupper():  # a constant of a file
                of_constants.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    found = set()
    for path in (ROOT / "flce_ops/integrations").rglob("*.py"):
        tree = ast.parse(path.read_text())
        methods = {id(method) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for method in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found |= {node.attr} - own - of_constants - explained
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
                if isinstance(name := node.args[1], ast.Constant):
                    found |= {name.value} - of_constants - of_layers
            elif isinstance(node, ast.FunctionDef) and id(node) not in methods and node.args.args:
                # a function that replaces a method of another library's class, or is called with its trainer
                if (first := node.args.args[0].arg) in ("self", "trainer"):
                    read = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
                    chain = re.compile(rf"{first}(\.\w+)*")
                    found |= {one.attr for one in read if chain.fullmatch(ast.unparse(one.value))} - of_layers
    return {name for name in found if not name.startswith(("flce_", "__"))}


IMPORTED_BY_INTEGRATIONS = (
    *("contextlib", "functools", "importlib.metadata", "importlib.util", "inspect", "logging", "operator"),
)


def experimental_names_of_torch():
    found = set()
    for path in (ROOT / "flce_ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.fx.experimental"):
                found |= {name.name for name in node.names}
    return found


def names_of_triton():
    """Beside triton.jit and triton.language: what the package reads of the module, and imports of its parts."""
    found = set()
    for path in (ROOT / "flce_ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"triton(\.\w+)+", dotted := ast.unparse(node)):
                found.add(dotted.removeprefix("triton."))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton."):
                found |= {f"{node.module.removeprefix('triton.')}.{name.name}" for name in node.names}
    longer = {name.rpartition(".")[0] for name in found} | {"knobs"}
    return found - longer


def test_the_page_of_what_we_rely_on_names_every_name():
    page = (ROOT / "docs/what_we_rely_on.md").read_text()
    quoted = set(re.findall(r"`([^`]+)`", page))
    quoted |= {name.removeprefix("triton.") for name in quoted} | {name.rpartition(".")[2] for name in quoted}
    expected = private_names_of_torch() | names_of_libraries() | experimental_names_of_torch() | names_of_triton()
    assert expected - quoted == set()
    assert {"Trainer.train", "Trainer.prediction_step", "trl.trainer.utils._use_triton", "AsyncCompileMode"} < expected


def test_the_tests_that_the_page_of_what_we_rely_on_names_exist():
    page = (ROOT / "docs/what_we_rely_on.md").read_text()
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert named and [name for name in named if f"def {name}(" not in text] == []
    here = {name for name in globals() if name.startswith("test_")}
    of_names = here - {name for name in here if re.search("page|files?_read|at_most|not_missed", name)}
    assert of_names <= set(named), of_names - set(named)
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py", page)) <= files
