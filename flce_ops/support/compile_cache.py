"""Adds this package's code to the key of torch.compile's on-disk caches, so that an upgrade never runs an older graph.

    Dynamo captures a graph       it holds flce.linear_cross_entropy and its arguments; fake kernels run
    key of the caches             that graph, torch's version, the compiler's configuration
    AOTAutograd traces            the operator's body and its autograd Functions
    inductor compiles             stored under the key

The third step runs Python code of this package, but the key does not depend on that code. With a warm cache, an
upgraded package would run the graph that the former version traced. torch has a table for this case, with functions
that may be cached and a string for each that stands for its code. The fake kernels add this package to the table before
the key is computed. The table is part of the key of every graph that the process compiles later.
"""

import functools
import hashlib
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._ops import ops
from ..version import __version__
from .torch_private import key_compiled_graphs
from .workspace import get_retained


@functools.cache
def code_key() -> str:
    """The version, and a digest of the sources, which distinguishes checkouts of one version."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()}"


def add_to_key() -> None:
    """Adds this package to the cache key of the graph that is being compiled. Fake kernels call it.

    The key also contains the bytes that saved logits may take, because a graph computes its number of saved rows from
    them (flce_ops/ops/paths.py).
    """
    key_compiled_graphs(ops.__name__, f"{code_key()}, {get_retained()} bytes retained")


def add_function_to_key(name: str, function: Callable) -> None:
    """Adds a user's function, whose operations become part of a graph under a name."""
    key_compiled_graphs(f"{ops.__name__} {name}", digest_of_function(function))


THIS_PROCESS = uuid.uuid4().hex


def digest_of_function(function: Callable) -> str:
    """A digest of the function's code and of what the code reads: constants, closures, and the functions it calls. An
    object without such a text is equal to itself alone, in this process.
    """
    digest, seen = hashlib.blake2b(digest_size=16), set()

    def add(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        if value is None or isinstance(value, str | bytes | int | float | complex):
            digest.update(repr(value).encode())
        elif isinstance(value, types.CodeType):
            digest.update(value.co_code)
            add((value.co_consts, value.co_names, value.co_varnames))
        elif id(value) in seen:
            return
        elif isinstance(value, tuple | list | frozenset):
            for part in sorted(value, key=repr) if isinstance(value, frozenset) else value:
                add(part)
        elif isinstance(value, types.FunctionType) and not str(value.__module__).startswith("torch."):
            seen.add(id(value))
            names = names_of_code(value.__code__)
            known = [value.__globals__.get(name) for name in names]
            modules = [m for m in known if isinstance(m, types.ModuleType) and not m.__name__.startswith("torch")]
            known += [getattr(module, name, None) for module in modules for name in names]
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            add((value.__code__, value.__defaults__, str(value.__kwdefaults__), cells, known))
        elif isinstance(value, types.ModuleType | types.BuiltinFunctionType | types.FunctionType | type):
            add(value.__name__)
        else:
            digest.update(f"{id(value)} in {THIS_PROCESS}".encode())

    add(function)
    return digest.hexdigest()


def names_of_code(code: types.CodeType) -> list[str]:
    """The names that the code reads, and those of functions inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [*code.co_names, *(name for part in inner for name in names_of_code(part))]
