"""Keys torch.compile's on-disk caches by this package's code, so that an upgrade never runs a graph of the old one.

    Dynamo captures a graph       it holds flce.linear_cross_entropy and its arguments; fake kernels run
    key of the caches             that graph, torch's version, the compiler's configuration
    AOTAutograd traces            what the operator's body and its autograd Functions do
    inductor compiles             stored under the key

The third step runs Python of this package, and nothing of it is in the key: with a warm cache an upgraded package
would run what the former one traced. torch has a table for this case, of functions that may be cached, each with a
string that stands for its code. The fake kernels enter this package there, in time for the key; graphs of processes
that never trace one of these operators keep theirs.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from .._ops import ops
from ..version import __version__
from .torch_private import key_compiled_graphs
from .workspace import get_retained


@functools.cache
def code_key() -> str:
    """The version, and a digest of the sources for checkouts between two versions."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()}"


def keyed(fake: Callable) -> Callable:
    """The fake kernel of an operator, which also puts this package into the key of what is being compiled.

    And the bytes from which a graph has its number of saved rows (flce_ops/ops/saved_logits.py).
    """

    @functools.wraps(fake)
    def run(*args, **kwargs):
        key_compiled_graphs(ops.__name__, f"{code_key()}, {get_retained()} bytes retained")
        return fake(*args, **kwargs)

    return run
