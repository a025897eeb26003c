"""Triton's compiled launchers, read by one thread at a time.

Triton up to 3.6 compiles a launcher in C for each signature of a kernel, and imports it as a Python module. All these
modules have one name. When a file is imported the second time, for another kernel of that signature, Python fills the
one module that has the name. If two threads import, as those of ahead.py do, a kernel could so get the launcher of
another: its launch fails with "function takes exactly 23 arguments (24 given)", or, if both have as many arguments,
the kernel runs on wrong ones. So here every import returns what the module holds at that moment.
"""

import threading
from types import SimpleNamespace
from typing import Any

_one_at_a_time = threading.Lock()


def load_one_at_a_time() -> None:
    """Changes how Triton loads modules that it has compiled, for every Triton user of the process."""
    try:
        from triton.runtime import build
    except ImportError:  # the planner has a stand-in for triton
        return
    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return

    def load_alone(name: str, path: str) -> Any:
        with _one_at_a_time:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
