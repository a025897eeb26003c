"""The operator call that this thread runs. Nested code uses it for work done once for a kind of call."""

import threading
from collections.abc import Callable
from typing import Any


class Running(threading.local):
    launch: Callable | None = None  # everything that is launched for the call, in backward, too
    call: Any = None  # its Arguments
    backward: Any = None  # its OperatorFunction, if a backward may follow that calls another operator
    differentiated: bool = False  # whether an OperatorFunction runs its operator


running = Running()
