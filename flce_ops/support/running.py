"""What this thread is running: the public function, which errors name, and the operator call. Code below the operator
uses the call to compile its kernels ahead (triton/launch/ahead.py).
"""

import threading
from collections.abc import Callable
from typing import Any


class Running(threading.local):
    function: str = ""  # the public function that the user called, in its backward, too
    launch: Callable | None = None  # a function that launches all kernels of the call, those of backward included
    call: Any = None  # its Arguments
    backward: Any = None  # its OperatorFunction, if a backward may follow that calls another operator
    differentiated: bool = False  # whether an OperatorFunction runs its operator


running = Running()
