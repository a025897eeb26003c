"""A torch.compile backend that records the operators of each graph before it passes the graph on."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._dynamo import lookup_backend


class RecordingBackend:
    """`torch.compile(f, backend=RecordingBackend("inductor"))`. `.graphs` has the operator names of each graph."""

    def __init__(self, backend: str) -> None:
        self.compile_graph = lookup_backend(backend)
        self.graphs: list[set[str]] = []

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
        targets = (node.target for node in graph_module.graph.nodes if node.op == "call_function")
        self.graphs.append({str(target).removesuffix(".default") for target in targets})
        return self.compile_graph(graph_module, inputs)


def inductor_or_without(device: torch.device) -> str:
    """Returns "inductor". On a CPU without a C++ compiler for its code it returns "aot_eager", where ATen runs the same
    graphs, and says so.
    """
    if device.type != "cpu":
        return "inductor"
    missing = []
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++")):
        missing.append("a C++ compiler (apt-get install g++)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python.h (apt-get install python3-dev)")
    if not missing:
        return "inductor"
    print(f"NOTE: torch.compile with backend aot_eager; its C++ backend needs {' and '.join(missing)}", flush=True)
    return "aot_eager"
