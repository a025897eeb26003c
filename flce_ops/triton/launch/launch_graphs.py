"""If a step's launches repeat at the same addresses, they go to the driver as one: a CUDA graph.

    1st time at these addresses    launch by launch
    2nd time                       launch by launch; also captured, on a stream where nothing runs
    from the 3rd                   one launch of the graph

A loop that frees its gradients before the next step gets the same memory in every step, so its addresses repeat. Two
calls of the same kind can differ only in their addresses (replay.py defines a kind).

A graph takes driver memory, so the number of graphs is limited. A new graph replaces one that was not used for a while.

On an H200's host, sixteen launches take 100 to 115 us and their graph 15 us. Making the graph takes 30 to 280 us, once.
"""

import ctypes
import threading
import time
from collections.abc import Hashable

import torch

from .driver_launch import Capture, DriverLaunches, bind_context, capture_stream, check, driver

LAUNCHES_AT_LEAST = 4  # with fewer a graph is no faster
LAUNCHES_AT_MOST = 96  # with more launches the host is no bottleneck
ADDRESSES_AT_MOST = 8  # sets of addresses that a kind remembers; a loop with more sets never gets a graph
GRAPHS_AT_MOST = 32  # over all kinds
IDLE_SECONDS = 10.0  # after this time a graph makes room for another


class Graph:
    """A CUDA graph of the launches, at the addresses that they have when it is made."""

    def __init__(self, launches: DriverLaunches) -> None:
        self.instance, self.used = ctypes.c_void_p(), time.monotonic()
        self.destroy = driver().cuGraphExecDestroy
        stream = capture_stream(launches.device).cuda_stream
        with Capture(stream) as capture:
            launches.run(stream)
        instance, no_flags = ctypes.byref(self.instance), ctypes.c_ulonglong(0)
        check(driver().cuGraphInstantiateWithFlags(instance, capture.graph, no_flags))

    def launch(self, stream: int) -> None:
        self.used = time.monotonic()
        check(driver().cuGraphLaunch(self.instance, ctypes.c_void_p(stream)))

    def __del__(self) -> None:
        if self.instance:
            self.destroy(self.instance)


# all graphs: (graph, the dictionary that holds it, its key there)
_graphs: list[tuple[Graph, dict[Hashable, Graph | None], Hashable]] = []
_lock = threading.Lock()  # guards `_graphs` and the dictionaries


class LaunchGraphs:
    """The graphs of one kind of call."""

    def __init__(self, launches: DriverLaunches) -> None:
        self.launches = launches
        self.known: dict[Hashable, Graph | None] = {}  # by addresses; None: seen once, without a graph
        self.usable = LAUNCHES_AT_LEAST <= len(launches.launches) <= LAUNCHES_AT_MOST

    def run(self, addresses: Hashable, stream: int) -> bool:
        """Launches the graph for these addresses. Returns whether there was one."""
        graph = self.known.get(addresses)
        if graph is None or torch.cuda.is_current_stream_capturing():
            return False
        bind_context(self.launches.device)
        graph.launch(stream)
        return True

    def add(self, addresses: Hashable) -> None:
        """Notes that the launches have run at these addresses, which their cells still hold. Makes a graph the second
        time.
        """
        if not self.usable or torch.cuda.is_current_stream_capturing():
            return
        with _lock:
            if addresses not in self.known:
                self.known[addresses] = None
                if len(self.known) > ADDRESSES_AT_MOST:
                    forget(self.known, next(iter(self.known)))
            elif self.known[addresses] is None and is_room():
                try:
                    self.known[addresses] = graph = Graph(self.launches)
                    _graphs.append((graph, self.known, addresses))
                except RuntimeError:  # another thread may be capturing; the launches themselves have run
                    self.usable = False


def is_room() -> bool:
    """Whether one more graph may be made. Forgets an idle one if necessary."""
    if len(_graphs) < GRAPHS_AT_MOST:
        return True
    graph, known, addresses = min(_graphs, key=lambda made: made[0].used)
    if time.monotonic() - graph.used < IDLE_SECONDS:
        return False
    forget(known, addresses)
    return True


def forget(known: dict[Hashable, Graph | None], addresses: Hashable) -> None:
    graph = known.pop(addresses, None)
    _graphs[:] = [made for made in _graphs if made[0] is not graph]
