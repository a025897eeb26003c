"""What Triton does once in a process, in threads that run beside the imports of flce_ops.triton.

    know_triton     A part of every key in Triton's cache is a digest of Triton's own files, 0.4 s for 400 MB. It is
                    kept in Triton's cache, and valid as long as the files' sizes and times stay, as Python's bytecode
                    is.
    make_driver     loads Triton's driver; if Triton's cache is empty, compiles it in C: 0.4 s. Then imports what
                    Triton imports when it reads the arguments of a first launch.

The threads start only if CUDA is in use.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

KEPT = "flce_ops_triton_key"  # name of a file in Triton's cache


def know_triton() -> None:
    with suppress(Exception):  # the first launch raises it, here and below
        from triton.runtime import cache  # here: the planner has a stand-in for triton

        files = cache.get_cache_manager(hashlib.sha256("\n".join(files_of_triton(cache.__file__)).encode()).hexdigest())
        kept = files.get_file(KEPT)
        if kept is None:
            files.put(cache.triton_key(), KEPT, binary=False)
        else:
            key = Path(kept).read_text()
            cache.triton_key = functools.cache(lambda: key)


def files_of_triton(module: str) -> Iterator[str]:
    """Path, size and time of every file of Triton's code, as Triton's digest reads them. `module` is one of them."""
    for folder, folders, names in os.walk(Path(module).parents[1]):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".so")):
                status = os.stat(path := os.path.join(folder, name))
                yield f"{path} {status.st_size} {status.st_mtime_ns}"


def make_driver() -> None:
    with suppress(Exception):
        from triton.runtime import driver

        driver.active.get_current_target()
        import triton.experimental.gluon.nvidia.hopper  # noqa: F401


_digest, _driver = (threading.Thread(target=work, daemon=True) for work in (know_triton, make_driver))
if torch.cuda.is_initialized():
    for _thread in (_digest, _driver):
        _thread.start()


def wait_for_driver() -> None:
    wait_for(_driver)


def wait_for_triton() -> None:
    wait_for(_digest, _driver)


def wait_for(*threads: threading.Thread) -> None:
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()
