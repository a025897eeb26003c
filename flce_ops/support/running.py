"""The public function that this thread is running, which errors name."""

import threading


class Running(threading.local):
    function: str = ""  # the public function that the user called, in its backward, too


running = Running()
