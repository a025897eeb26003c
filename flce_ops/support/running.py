"""What this thread runs: the user's function, which errors name, and the operator call, for work that is done once for
a kind of call.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Running(threading.local):
    function: str = ""  # the public function that the user called, in its backward, too
    launch: Callable | None = None  # everything that is launched for the call, in backward, too
    call: Any = None  # its Arguments


running = Running()


@contextmanager
def runs(function: str) -> Iterator[None]:
    outer, running.function = running.function, function
    try:
        yield
    finally:
        running.function = outer
