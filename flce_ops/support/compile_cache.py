"""Adds this package's code to the key of torch.compile's on-disk caches, so that an upgrade never runs an older graph.

    Dynamo captures a graph       it holds flce.linear_cross_entropy and its arguments; fake kernels run
    key of the caches             that graph, torch's version, the compiler's configuration
    AOTAutograd traces            the operator's body and its autograd Functions
    inductor compiles             stored under the key

The third step runs Python code of this package, but the key does not depend on that code. With a warm cache, an
upgraded package would run the graph that the former version traced. torch has a table for this case, with functions
that may be cached and a string for each that stands for its code. The fake kernels add this package to the table before
the key is computed. Graphs that contain none of these operators keep their keys.
"""

import functools
import hashlib
from pathlib import Path

from .._ops import ops
from ..version import __version__
from .torch_private import key_compiled_graphs
from .workspace import get_retained


@functools.cache
def code_key() -> str:
    """The version, and a digest of the sources, which distinguishes checkouts of one version."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()}"


def add_to_key() -> None:
    """Adds this package to the cache key of the graph that is being compiled. Fake kernels call it.

    The key also contains the bytes that saved logits may take, because a graph computes its number of saved rows from
    them (flce_ops/ops/paths.py).
    """
    key_compiled_graphs(ops.__name__, f"{code_key()}, {get_retained()} bytes retained")
