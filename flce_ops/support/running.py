"""The operator call that this thread is running. Code below the operator uses it to compile the kernels of such calls
ahead (triton/launch/ahead.py).
"""

import threading
from collections.abc import Callable
from typing import Any


class Running(threading.local):
    launch: Callable | None = None  # a function that launches all kernels of the call, those of backward included
    call: Any = None  # its Arguments


running = Running()
