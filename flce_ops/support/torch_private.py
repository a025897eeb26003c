"""The private names of torch that the operators use. docs/what_we_rely_on.md lists them, and the few that other files
read: integrations/transformers of modules, support/sizes.py and meta/ of torch.fx.experimental.

PyTorch has no public equivalent of these. `tests/compile/test_torch_private.py` tests the functions here; the page
names the test that fails if a torch release drops a name.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

logger = logging.getLogger("flce_ops")

# A context in which a call skips the autograd keys. An Autograd kernel uses it to call the kernel below.
below_autograd = torch._C._AutoDispatchBelowAutograd

# The dispatch keys of a thread that is in no context of torch. They are read in a new thread, because a context may be
# active where this file is imported.
with ThreadPoolExecutor(1) as _thread:
    AT_REST = _thread.submit(
        lambda: (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
    ).result()


@contextmanager
def with_autograd() -> Iterator[None]:
    """Autograd and torch.func inside an operator's kernel, which runs below the autograd keys.

    torch.func.vjp, which is public, brings its own autograd keys, but fails inside a kernel that runs under a dispatch
    mode, such as a FLOP counter.
    """
    with torch._C._ForceDispatchKeyGuard(*AT_REST), torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def with_transforms() -> Iterator[None]:
    """torch.func in the body of an entry operator that a tracer runs below the keys of autograd and torch.func, as it
    does in the regions of cond, map and nested_compile_region. Its modes stay.
    """
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), AT_REST[1]):
        yield


# Collectives inside an operator, which a tracer records. torch.distributed's own write to their argument.
collectives = torch.ops._c10d_functional

# An assert on sizes and numbers, which a compiled graph makes when it runs if the condition depends on data.
assert_when_it_runs: Callable[[Any, str], None] = torch._assert_scalar

# True inside torch.func transforms (grad, vmap, jacrev, ...), whose backward always builds a graph.
functorch_is_active = torch._C._are_functorch_transforms_active

# True when the running backward was asked to retain its graph, so that saved tensors may be read again.
graph_is_kept_after_this_backward = torch._C._autograd._get_current_graph_task_keep_graph


# The saved_tensors_hooks of the innermost context, such as a non-reentrant checkpoint or offloading; None without one.
saved_tensor_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

# Has "recompute" while AOTAutograd traces the body of a `torch.utils.checkpoint` call that Dynamo captured.
metadata_of_trace = torch.fx.traceback.get_current_meta

# True while torch.profiler or emit_nvtx records the operators that run.
profiler_is_on = torch._C._autograd._profiler_enabled


PROBE = torch.empty(0)


def forward_mode_is_active() -> bool:
    """True inside forward_ad.dual_level, and so inside torch.func.jvp. Elsewhere no tensor has a tangent, and
    unpack_dual returns what it is given.
    """
    return forward_ad.unpack_dual(PROBE).primal is not PROBE


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether one of the tensors has a forward-mode tangent."""
    if not forward_mode_is_active():
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether a derivative by one of the tensors may be requested. If not, nothing computed from them needs a graph.

    The request may come by reverse mode, by forward mode, or by a torch.func transform, which does not say what it
    wants.
    """
    if functorch_is_active() or has_tangent(*tensors):
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def plain_apply(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` outside of torch.func, for values that are all parameters of `forward`.

    Function.apply binds the values to forward's signature with `inspect`, which makes 80 Python calls for 14
    values.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def runs_in_this_backward(node) -> bool:
    """Whether the running backward continues to `node`, an entry of next_functions, which means that its gradient is
    wanted.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `node` is a leaf, whose gradient was requested through torch.autograd.grad
        return True


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def comes_from_outside_a_traced_graph(tensor: torch.Tensor) -> bool:
    """True for an input of the graph that AOTAutograd traces, if an operation before the graph made it.

    Such an input has a grad_fn without an operation. If it is overwritten, outputs lose their gradient to it.
    """
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "torch::autograd::Error"


def with_unwrapped(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, and what each transform of torch.func has wrapped in it."""
    found = [tensor]
    while (inner := torch.func.debug_unwrap(found[-1], recurse=False)) is not found[-1]:
        found.append(inner)
    return found


def is_batched(tensor: torch.Tensor) -> bool:
    """True for the batches of torch.autograd.grad(is_grads_batched=True), which runs its own vmap. A batch has no
    memory that one of its entries could be written into.
    """
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fails with `message` if the 0-d bool tensor is False. On CUDA this is a device-side assert, without a host
    synchronisation.
    """
    torch._assert_async(condition, message)


def check_value(holds: torch.Tensor, message: str) -> None:
    """Raises ValueError if the bool tensor is not all True. On CUDA, and wherever a tracer records operators, it is an
    assert.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and functorch_is_active():  # an assert has no batching rule, and Dynamo cannot unwrap
        return
    if holds.is_meta:  # a meta tensor has no value
        return
    # under vmap, a tensor can neither be read nor asserted
    holds = (holds if compiling else with_unwrapped(holds)[-1]).all()
    if compiling or holds.device.type == "cuda":
        assert_on_device(holds, message)
        return
    try:
        known = bool(holds)
    except RuntimeError:  # a tracer records operators, and does not know the value
        assert_on_device(holds, message)
        return
    if not known:
        raise ValueError(message)


def module_of_compiler(name: str, loaded_by: str, without: str) -> Any:
    """The module; None if torch.compile has not loaded `loaded_by`, which imports it. If torch has moved the module, a
    warning says what goes on without it.
    """
    if sys.modules.get(name) is None and loaded_by in sys.modules:
        try:
            return importlib.import_module(name)
        except ImportError:
            warn_of_missing(name, without)
    return sys.modules.get(name)


@functools.cache
def warn_of_missing(name: str, without: str) -> None:
    logger.warning(f"torch {torch.__version__} has no module {name}: {without}")


def key_compiled_graphs(function: str, key: str) -> None:
    """Makes `key` part of the cache keys of graphs compiled from now on, if a compiler is loaded at all.

    The key gets its own name in a dictionary that is part of every cache key. Other entries, and the user's
    `torch.compiler.config.cache_key_tag`, stay. Dynamo loads that module before it traces anything.
    """
    config = module_of_compiler(
        "torch._inductor.config", "torch._dynamo.convert_frame", "clear torch.compile's caches after an upgrade"
    )
    if config is not None and config.unsafe_marked_cacheable_functions.get(function) != key:
        config.unsafe_marked_cacheable_functions = {**config.unsafe_marked_cacheable_functions, function: key}


# From this size on, donated gradients are multiplied in place, which saves a copy in memory. Below it Inductor's own
# kernel multiplies out of place, because the in-place operator costs 100 to 200 us of host time: with one call for
# 32 MiB a step of 2048x512x32000 took 0.78 ms instead of 0.60. Inductor's kernel takes 60 us for 128 MiB and 500 us for
# the 1 GiB of 256x4096x128256.
WRITTEN_OVER_FROM = 128 << 20


def written_over_where_donated(op: Any, in_place: Any) -> None:
    """Makes Inductor, if it is loaded, run `in_place(tensors, factor)` for `op(tensors, factor, leaf) -> tensors`.

    This applies to tensors that are large and donated: forward saved them for this one backward, and nothing else uses
    them. AOTAutograd refuses retain_graph for a backward with donated tensors. Other tensors are multiplied into new
    memory. Inductor's own pass for operators that overwrite arguments would first copy every input of a graph.
    """
    compiler = module_of_compiler(
        "torch._inductor.lowering", "torch._inductor.compile_fx", "a compiled backward copies large gradients"
    )
    if compiler is None or op in compiler.lowerings:
        return
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    @compiler.register_lowering(op, type_promotion_kind=None)
    def lower(tensors, factor, leaf):
        node = V.graph.current_node
        written_over = [
            isinstance(getattr(tensor.data, "data", None), ir.DonatedBuffer)
            and len(before.users) == 1
            and is_large(before.meta["val"])
            for tensor, before in zip(tensors, node.args[0])
        ]
        if any(written_over):
            run = compiler.fallback_handler(in_place, add_to_fallback_set=False)
            run([tensor for tensor, over in zip(tensors, written_over) if over], factor)
        multiply = compiler.lowerings[torch.ops.aten.mul.Tensor]
        return [tensor if over else multiply(tensor, factor) for tensor, over in zip(tensors, written_over)]


def is_large(tensor: torch.Tensor) -> bool:
    """The sizes are those with which the graph was traced. A tensor of symbolic size does not count as large."""
    return isinstance(tensor.numel(), int) and tensor.nbytes >= WRITTEN_OVER_FROM


def hooks_on_the_output(module: torch.nn.Module) -> list[Callable]:
    """The forward and backward hooks that a call of `module` runs, global ones included."""
    groups = (
        GLOBAL_FORWARD_HOOKS,
        torch.nn.modules.module._global_backward_hooks,  # to register one decides what others may be
        GLOBAL_BACKWARD_PRE_HOOKS,
        module._forward_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return [hook for hooks in groups for hook in hooks.values()]


def hooks_on_the_input(module: torch.nn.Module) -> list[Callable]:
    """The forward pre-hooks that a call of `module` runs, global ones included."""
    return [*GLOBAL_FORWARD_PRE_HOOKS.values(), *module._forward_pre_hooks.values()]


def global_hooks(register: Callable) -> dict[int, Callable]:
    """The dictionary to which `register` adds hooks. The handle of a hook refers to it publicly."""
    handle = register(lambda *args: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


GLOBAL_FORWARD_HOOKS = global_hooks(torch.nn.modules.module.register_module_forward_hook)
GLOBAL_FORWARD_PRE_HOOKS = global_hooks(torch.nn.modules.module.register_module_forward_pre_hook)
GLOBAL_BACKWARD_PRE_HOOKS = global_hooks(torch.nn.modules.module.register_module_full_backward_pre_hook)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook on the tensor's gradient was set."""
    return bool(tensor._backward_hooks)


def register_without_leaves(value: object) -> None:
    """Registers `value`, the only one of its class, as a pytree without tensors, so that outputs which contain it can
    be mapped.
    """
    torch.utils._pytree.register_pytree_node(
        type(value),
        lambda found: ([], None),
        lambda leaves, context: value,
        serialized_type_name=f"{type(value).__module__}.{type(value).__qualname__}",
    )
