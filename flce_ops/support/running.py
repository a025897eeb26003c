"""The call of an operator that this thread runs, for what is done once a kind of call from deep inside of it."""

import threading
from collections.abc import Callable
from typing import Any


class Running(threading.local):
    launch: Callable | None = None  # what is launched for it, in backward too
    call: Any = None  # its Arguments


running = Running()
