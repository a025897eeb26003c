"""Launches that come again at the same addresses go to the driver as one: a CUDA graph.

    1st time at these addresses    launch by launch
    2nd time                       the same; captured, too, on a stream where nothing runs
    from the 3rd                   one launch of the graph

A loop that frees its gradients before the next step gets the same memory in every step, so its addresses come again.
They are all that can differ: everything else is a part of the kind of call (replay.py).

A graph takes memory of the driver, so there are few, and what nobody used for a while makes room.

H200's host: sixteen launches 100 to 115 us, their graph 15; making it, once, 30 to 280.
"""

import ctypes
import threading
import time
from collections.abc import Hashable

import torch

from .driver_launch import Capture, DriverLaunches, bind_context, capture_stream, check, driver

LAUNCHES_AT_LEAST = 4  # of fewer a graph is no faster
LAUNCHES_AT_MOST = 96  # a step of more does not wait for the host
ADDRESSES_AT_MOST = 8  # of a kind that are remembered: a loop that has more of them is launched as it was
GRAPHS_AT_MOST = 32  # of all kinds
IDLE_SECONDS = 10.0  # after which a graph makes room for another


class Graph:
    """The launches at the addresses that they have while this is made."""

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


_graphs: list[tuple[Graph, dict[Hashable, Graph | None], Hashable]] = []  # all there are, and where
_lock = threading.Lock()  # of these


class LaunchGraphs:
    """Of one kind of call."""

    def __init__(self, launches: DriverLaunches) -> None:
        self.launches = launches
        self.known: dict[Hashable, Graph | None] = {}  # by addresses; None where there is none yet
        self.usable = LAUNCHES_AT_LEAST <= len(launches.launches) <= LAUNCHES_AT_MOST

    def run(self, addresses: Hashable, stream: int) -> bool:
        """Whether there is a graph of these, which then runs."""
        graph = self.known.get(addresses)
        if graph is None or torch.cuda.is_current_stream_capturing():
            return False
        bind_context(self.launches.device)
        graph.launch(stream)
        return True

    def add(self, addresses: Hashable) -> None:
        """The launches have run at these, which they still have."""
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
                except RuntimeError:  # another thread captures, say; what was asked for has run
                    self.usable = False


def is_room() -> bool:
    """For one more graph."""
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
