"""Makes Triton's interpreter 2.5 times as fast and as strict as its newest version, lets its tensor maps add to memory,
and checks what memory is used.
"""

import functools
import importlib.util
import inspect
from types import ModuleType, SimpleNamespace


def is_installed() -> bool:
    return None not in (importlib.util.find_spec("triton"), importlib.util.find_spec("numpy"))  # it needs both


def remember_what_is_patched() -> None:
    """At every function call within a kernel, the interpreter searches all names of triton.language for those to patch.

    These names are the same at every call. So they are listed once; a namespace that is already patched has none left,
    because it is patched as a whole. What is patched, and by what, stays the interpreter's decision. A function that is
    called within a kernel patches nothing if the kernel or a function before it has patched the same modules.
    """
    if not is_installed():
        return
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(namespace: object) -> list[str]:
        return [name for name, member in inspect.getmembers(namespace) if is_builtin(member)]

    def getmembers(namespace: object) -> list[tuple[str, object]]:
        names = builtins_of(namespace)
        if not names or not is_builtin(getattr(namespace, names[0])):
            return []
        return [(name, getattr(namespace, name)) for name in names]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})

    @functools.cache
    def languages_of(function: object) -> list[ModuleType]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in modules if module in (language, language.core)]

    def call(self, *arguments, **options):
        # static_range is a class of triton.language, and a function of the interpreter where it is patched
        if any(module.static_range.__module__ != interpreter.__name__ for module in languages_of(self.fn)):
            patch(self.fn)
        return self.rewrite()(*arguments, **options)

    patch = interpreter._patch_lang
    interpreter.InterpretedFunction.__call__ = call


# where a builder's method takes its mask
MASKS = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}


def demand_boolean_masks() -> None:
    """Refuses masks that are not boolean in every version, as the interpreter of Triton 3.9 does.

    A scalar condition that is combined with a block's is such a mask: the interpreter broadcasts it as an integer.
    """
    if not is_installed():
        return
    import numpy
    from triton.runtime import interpreter

    def demand(name: str, mask_at: int) -> None:
        method = getattr(interpreter.InterpreterBuilder, name)

        @functools.wraps(method)
        def with_check(builder, *arguments, **options):
            mask = arguments[mask_at]
            dtype = numpy.asarray(mask.data).dtype  # a tensor map's mask is an array itself
            if dtype.kind != "b":
                raise TypeError(f"{name}: expected a boolean mask, got {dtype}; is a scalar condition part of it?")
            return method(builder, *arguments, **options)

        setattr(interpreter.InterpreterBuilder, name, with_check)

    for name, mask_at in MASKS.items():
        demand(name, mask_at)


def let_tensor_maps_add(monkeypatch) -> None:
    """Triton's interpreter has tensor maps, but none that add."""
    from triton.runtime import interpreter

    # Triton 3.9 takes one argument for both cache hints
    hints = [None] * (len(inspect.signature(interpreter.InterpreterBuilder.create_masked_store).parameters) - 4)

    def add(builder, kind, tensor_map, value, indices):
        pointers, mask = tensor_map.materialize_pointers(indices)
        there = builder.create_masked_load(pointers, mask, value, *hints, False)
        there.data = there.data + value.data
        return builder.create_masked_store(pointers, there, mask, *hints)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_descriptor_reduce", add, raising=False)


def check_addresses(monkeypatch) -> None:
    """Fails where a kernel reads or writes memory beside its arguments, as compute-sanitizer would on a GPU."""
    if not is_installed():
        return
    import numpy
    from triton.runtime import interpreter

    known: set[tuple[int, int]] = set()  # where the memory of each argument begins and ends
    call = interpreter.GridExecutor.__call__

    def memory_of(argument: object) -> None:
        if isinstance(argument, tuple):
            for part in argument:
                memory_of(part)
        elif hasattr(argument, "base"):
            memory_of(argument.base)
        elif hasattr(argument, "untyped_storage"):
            storage = argument.untyped_storage()
            known.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def with_known_memory(self, *arguments, **options):
        known.clear()
        memory_of((*arguments, *options.values()))
        return call(self, *arguments, **options)

    def check(name: str, mask_at: int) -> None:
        method = getattr(interpreter.InterpreterBuilder, name)

        @functools.wraps(method)
        def with_check(builder, *arguments, **options):
            pointers, mask = arguments[name == "create_atomic_rmw"], arguments[mask_at]
            # a tensor map's mask is an array itself
            addresses, here = numpy.asarray(pointers.data), numpy.asarray(mask.data)
            if not here.all():
                addresses = addresses[numpy.broadcast_to(here, addresses.shape).astype(bool)]
            if addresses.size:
                size = pointers.get_element_ty().primitive_bitwidth // 8
                first, last = int(addresses.min()), int(addresses.max())
                if not any(begin <= first and last + size <= end for begin, end in known):  # several arguments, or none
                    inside = [(addresses >= begin) & (addresses + size <= end) for begin, end in known]
                    assert numpy.any(inside, axis=0).all(), f"{name} of memory that is no argument's"
            return method(builder, *arguments, **options)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, with_check)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", with_known_memory)
    for name, mask_at in MASKS.items():
        check(name, mask_at)
