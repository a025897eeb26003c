"""What Triton reads of the kernels' sources when they are defined and first launched, without reading it slowly.

lines     triton.jit calls inspect.getsourcelines, which tokenizes: 0.5 ms a function, 60 ms for flce_ops.triton. This
          file reads a function's last line from the positions in its code object.
hashes    A kernel's key in Triton's cache contains a hash of its source and of all functions that it calls: 40 ms
          for 17 kernels. ahead.py keeps the hashes with its mark, which is of these sources only.
"""

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, SimpleNamespace
from typing import Any

PACKAGE = __name__.partition(".triton.")[0]


def read_by_positions() -> None:
    """Makes triton.jit take the lines of this package's functions from their code."""
    jit: Any = sys.modules.get("triton.runtime.jit")  # missing if the planner has a stand-in for triton
    if jit is not None:
        jit.inspect = SimpleNamespace(**vars(inspect) | {"getsourcelines": source_lines})


def source_lines(function: Callable) -> tuple[list[str], int]:
    """As inspect.getsourcelines."""
    code: CodeType = function.__code__
    last = last_line(code) if function.__module__.startswith(f"{PACKAGE}.") else None
    if last is None:
        return inspect.getsourcelines(function)
    return linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 : last], (
        code.co_firstlineno
    )


def last_line(code: CodeType) -> int | None:
    """None if the code has no positions: before Python 3.11, or by Python's option no_debug_ranges."""
    positions: Any = getattr(code, "co_positions", tuple)()
    ends = [end for _, end, column, _ in positions if column is not None and end is not None]
    inner = [last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return None if not ends or None in inner else max([*ends, *filter(None, inner)])


def hashes() -> dict[str, str]:
    """The hashes that Triton has made so far."""
    return {name: function.hash for name, function in jitted() if function.hash}


def know_hashes(known: Mapping[str, str]) -> None:
    for name, function in jitted():
        if function.hash is None:
            function.hash = known.get(name)


def jitted() -> Iterator[tuple[str, Any]]:
    """This package's functions for the GPU, by name."""
    from triton.runtime.jit import JITCallable

    for module in [module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE}.")]:
        for value in vars(module).values():
            if isinstance(value, JITCallable):
                yield f"{value.__module__}.{value.__qualname__}", value
