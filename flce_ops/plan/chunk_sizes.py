"""The chunk sizes of the Triton kernels, on systems without Triton, such as macOS and Windows.

Chunk sizes are plain Python in the kernels' files (flce_ops/triton). While the planner reads them, a stand-in module
replaces Triton; it can define kernels, but not launch them. Afterwards the stand-in and the kernels' modules are
removed from sys.modules, so that a step on CUDA still fails with an error that names Triton.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ..support.vendor import has_triton


class Constexpr:
    def __init__(self, value: Any) -> None:
        self.value = value


def stand_ins() -> dict[str, ModuleType]:
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language).update(constexpr=Constexpr, __getattr__=lambda name: object)  # other types only annotate arguments
    vars(triton).update(
        language=language,
        jit=lambda kernel, **options: kernel,
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
    )
    return {"triton": triton, "triton.language": language}


@contextlib.contextmanager
def chunk_sizes_of_kernels() -> Iterator[None]:
    """Inside this context, flce_ops.triton can be imported for its chunk sizes, but cannot run."""
    if has_triton():
        yield
        return
    before = dict(sys.modules)
    sys.modules.update(stand_ins())
    try:
        yield
    finally:
        package = __package__.rpartition(".")[0]
        forgotten = ("triton", f"{package}.triton", f"{package}.objectives.in_triton")
        for name in [name for name in sys.modules if name.startswith(forgotten)]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.startswith("triton")})
