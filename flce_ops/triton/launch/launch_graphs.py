"""If a step's launches repeat at the same addresses, they go to the driver as one: a CUDA graph.

    1st time at these addresses    launch by launch
    2nd time                       launch by launch; also captured, on a stream where nothing runs
    from the 3rd                   one launch of the graph

A loop that frees its gradients before the next step gets the same memory in every step, so its addresses repeat. Two
calls of the same kind can differ only in their addresses (replay.py defines a kind).

A graph takes driver memory, so the last SETS_AT_MOST sets of addresses are remembered. A loop over more sets finds none
of them again, and makes no graph.

On an H200's host, sixteen launches take 100 to 115 us and their graph 15 us. Making the graph takes 30 to 280 us, once.
"""

import ctypes
import threading
from collections.abc import Hashable
from contextlib import suppress

import torch

from .driver_launch import Capture, DriverLaunches, bind_context, capture_stream, check, driver

LAUNCHES_AT_LEAST = 4  # with fewer a graph is no faster
LAUNCHES_AT_MOST = 96  # with more launches the host is no bottleneck
SETS_AT_MOST = 64  # over all kinds


class Graph:
    """A CUDA graph of the launches, at the addresses that they have when it is made."""

    def __init__(self, launches: DriverLaunches) -> None:
        self.instance = ctypes.c_void_p()
        self.destroy = driver().cuGraphExecDestroy
        stream = capture_stream(launches.device).cuda_stream
        with Capture(stream) as capture:
            launches.run(stream)
        instance, no_flags = ctypes.byref(self.instance), ctypes.c_ulonglong(0)
        check(driver().cuGraphInstantiateWithFlags(instance, capture.graph, no_flags))

    def __del__(self) -> None:
        if self.instance:
            self.destroy(self.instance)


# by launches and addresses, None if seen once; the one that was used last stands last
_graphs: dict[tuple[DriverLaunches, Hashable], Graph | None] = {}
_lock = threading.Lock()


def launch_graph(launches: DriverLaunches, addresses: Hashable, stream: int) -> bool:
    """Launches the graph for these addresses. Returns whether there was one."""
    if torch.cuda.is_current_stream_capturing():
        return False
    with _lock:
        graph, key = None, (launches, addresses)
        if key in _graphs:
            graph = _graphs[key] = _graphs.pop(key)
    if graph is None:
        return False
    bind_context(launches.device)
    check(driver().cuGraphLaunch(graph.instance, ctypes.c_void_p(stream)))
    return True


def remember(launches: DriverLaunches, addresses: Hashable) -> None:
    """Notes that the launches have run at these addresses, which their cells still hold. Makes a graph the second
    time.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    if not LAUNCHES_AT_LEAST <= len(launches.launches) <= LAUNCHES_AT_MOST:
        return
    with _lock:
        key = launches, addresses
        graph = _graphs.get(key)
        if graph is None and key in _graphs:
            with suppress(RuntimeError):  # another thread may be capturing; the launches themselves have run
                graph = Graph(launches)
        _graphs[key] = graph
        if len(_graphs) > SETS_AT_MOST:
            del _graphs[next(iter(_graphs))]
