"""What this thread is running: the public function, which errors name, and the operator call. Code below the operator
uses the call to compile its kernels ahead (triton/launch/ahead.py).
"""

import threading


class Running(threading.local):
    function: str = ""  # the public function that the user called, in its backward, too


running = Running()
