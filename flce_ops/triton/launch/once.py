"""What Triton does once in a process, in threads that run beside the imports of flce_ops.triton.

    hash_triton     hashes Triton's own files, a part of every key in its cache: 0.35 s, mostly without the GIL
    make_driver     loads Triton's driver; if Triton's cache is empty, compiles it in C: 0.4 s. Then imports what
                    Triton imports when it reads the arguments of a first launch.

The threads start only if CUDA is in use.
"""

import threading
from contextlib import suppress

import torch


def hash_triton() -> None:
    with suppress(Exception):  # the first launch raises it, here and below
        from triton.runtime.cache import triton_key  # here: the planner has a stand-in for triton

        triton_key()


def make_driver() -> None:
    with suppress(Exception):
        from triton.runtime import driver

        driver.active.get_current_target()
        import triton.experimental.gluon.nvidia.hopper  # noqa: F401


_threads = [threading.Thread(target=work, daemon=True) for work in (hash_triton, make_driver)]
if torch.cuda.is_initialized():
    for _thread in _threads:
        _thread.start()


def wait_for_triton() -> None:
    for thread in _threads:
        if thread.ident is not None:  # it was started
            thread.join()
